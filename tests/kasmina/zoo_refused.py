"""Models and places on which a slot cannot be right, with a fragment of the reason given."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import SlottedModel, Target
from esper.kasmina.watching import Sample, call
from esper.leyline import Layout
from tests.kasmina import zoo_forms as forms
from tests.kasmina import zoo_sequence as sequence
from tests.kasmina import zoo_vision as vision
from tests.kasmina.zoo import IMAGES, TEXT, VECTORS, normal, tensors_in


@dataclass(frozen=True)
class Refused:
    name: str
    build: Callable[[], nn.Module]
    sample: Sample
    places: tuple[str | Target, ...]
    reason: str

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.build()

    def outputs(self, model: nn.Module) -> list[Tensor]:
        """Of the model as it is; none where the sample does not fit it."""
        with torch.random.fork_rng():
            torch.manual_seed(2)
            try:
                return tensors_in(call(model, self.sample))
            except (RuntimeError, TypeError):
                return []


class Custom(nn.Module):
    """`stem`, then something by hand, then `head`; `rest` may hold what is never called."""

    def __init__(
        self, stem: nn.Module, by_hand: Callable[[Tensor], Tensor], head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.stem, self.by_hand = stem, Lambda(by_hand)
        self.head = nn.Identity() if head is None else head
        self.rest = nn.Linear(2, 2)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(self.by_hand(self.stem(*inputs)))


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class WithoutGradient(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.backbone, self.head = nn.Linear(10, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.how != "no_grad" and torch.is_grad_enabled()):
            h = self.backbone(x)
        return self.head(h.detach() if self.how == "detach" else h)


class TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class TwoWidths(nn.Module):
    """One activation module for all layers, as people share `self.relu`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(10, 8), nn.Linear(8, 6), nn.Linear(6, 4)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


class ImagesAndVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.relu = nn.Conv2d(3, 5, 3), nn.Linear(5, 5), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc(self.relu(self.conv(x)).mean((2, 3))))


class Unflattened(nn.Module):
    """Returns lists inside lists."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 8)

    def forward(self, x: Tensor) -> list[list[Tensor]]:
        return [[self.fc(x)]]


def compiled() -> nn.Module:
    return torch.compile(vision.mlp(), backend="eager")


def compiled_in_place() -> nn.Module:
    model = vision.resnet_basic()
    model.layer2.compile(backend="eager")
    return model


def compiled_part() -> nn.Module:
    model = vision.resnet_basic()
    model.layer1 = torch.compile(model.layer1, backend="eager")
    return model


def scripted_part() -> nn.Module:
    return nn.Sequential(torch.jit.trace(nn.Linear(10, 8), VECTORS), nn.Linear(8, 4))


def padded_encoder() -> nn.Module:
    return sequence.TextEncoder(batch_first=True)


def tokens_by_hand() -> nn.Module:
    """Time first inside, without a module that says so."""
    return Custom(nn.Linear(4, 6), lambda x: x.transpose(0, 1), nn.Linear(6, 2))


class Positions(nn.Module):
    """A vector for each position, whatever the batch is."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 8), nn.Embedding(30, 8)
        self.rnn = nn.GRU(8, 8, batch_first=batch_first)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        time = 1 if self.rnn.batch_first else 0
        where = self.places(torch.arange(x.shape[time]))  # [T, C]
        h = self.words(x) + (where if time else where[:, None])
        return self.head(self.rnn(h)[0].mean(time))  # type: ignore[no-any-return]


def image_from_rows(channels: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.view(len(x), channels, 4, 4)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.LazyLinear(4))


def slotted_already() -> nn.Module:
    model = vision.mlp()
    SlottedModel(model, ["1"], VECTORS).germinate("1", "mlp", "immediate")
    return model


def slotted_inside() -> nn.Module:
    return nn.Sequential(SlottedModel(vision.mlp(), ["1"], VECTORS), nn.Linear(4, 4))


PADDING = torch.arange(7).expand(4, 7) >= torch.tensor([[7], [5], [6], [7]])
SQUARE = normal(4, 6, 6)
LINE = normal(4, 2, 9)

REFUSED = [
    Refused("compiled model", compiled, VECTORS, ("1",), "inside compiled code"),
    Refused("compiled in place", compiled_in_place, IMAGES, ("layer2.0.conv1",), "compiled code"),
    Refused("compiled part", compiled_part, IMAGES, ("layer1",), "inside compiled code"),
    Refused(
        "script", lambda: torch.jit.trace(vision.mlp(), VECTORS), VECTORS, ("1",), "TorchScript"
    ),
    Refused("script part", scripted_part, VECTORS, ("0",), "TorchScript"),
    Refused(
        "data parallel",
        lambda: nn.DataParallel(vision.mlp()),
        VECTORS,
        ("module.1",),
        "parallel wrapper",
    ),
    Refused("no parameters", nn.Flatten, IMAGES, ("",), "has no parameters"),
    Refused("lazy", lazy, VECTORS, ("0",), "parameters without a shape; given: 1.weight, 1.bias"),
    Refused("slotted already", slotted_already, VECTORS, ("3",), "carries slots already"),
    Refused("slotted inside", slotted_inside, VECTORS, ("1",), "carries slots already"),
    Refused("unknown path", vision.resnet_basic, IMAGES, ("layer3",), "did you mean 'layer2'?"),
    Refused(
        "never called",
        lambda: Custom(nn.Linear(10, 8), torch.relu),
        VECTORS,
        ("rest",),
        "does not call it",
    ),
    Refused("module list", sequence.Mixer, IMAGES, ("blocks",), "does not call it"),
    Refused(
        "attention's projection",
        sequence.VisionTransformer,
        IMAGES,
        ("blocks.0.attention.out_proj",),
        "does not call it",
    ),
    Refused(
        "no_grad", lambda: WithoutGradient("no_grad"), VECTORS, ("backbone",), "without gradients"
    ),
    Refused(
        "detached", lambda: WithoutGradient("detach"), VECTORS, ("backbone",), "does not reach"
    ),
    Refused(
        "predictions only",
        lambda: Custom(nn.Linear(10, 8), lambda x: x.argmax(1)),
        VECTORS,
        ("stem",),
        "let the model return what its loss is computed from",
    ),
    Refused(
        "computed weight",
        vision.weight_norm,
        VECTORS,
        ("0.parametrizations.weight",),
        "name the layer that has the weight",
    ),
    Refused(
        "reentrant checkpoint",
        lambda: forms.Checkpointed(reentrant=True),
        VECTORS,
        ("blocks.0",),
        "use_reentrant=False",
    ),
    Refused("unused state", sequence.LstmClassifier, TEXT, ("lstm@1",), "valid: @0"),
    Refused(
        "state of a recurrent net",
        forms.TwoTowers,
        (normal(4, 1, 8, 8), TEXT),
        ("text@1",),
        "no module around it tells",
    ),
    Refused("two tensors", forms.Vae, VECTORS, ("encoder",), "say which tensor to grow"),
    Refused("wrong part", forms.Vae, VECTORS, ("encoder@2",), "valid: @0, @1"),
    Refused("part of a tensor", vision.mlp, VECTORS, ("1@0",), "leave the part out"),
    Refused("list of lists", Unflattened, VECTORS, ("",), "it holds no tensor"),
    Refused("dataclass", forms.Vae, VECTORS, ("",), "given: Reconstruction"),
    Refused(
        "integers",
        lambda: Custom(nn.Linear(10, 8), lambda x: x.argmax(1)),
        VECTORS,
        ("by_hand",),
        "given: torch.int64",
    ),
    Refused(
        "complex numbers",
        lambda: Custom(nn.Linear(10, 8), torch.fft.rfft, Lambda(torch.abs)),
        VECTORS,
        ("by_hand",),
        "given: torch.complex64",
    ),
    Refused(
        "sparse",
        lambda: Custom(nn.Linear(10, 8), Tensor.to_sparse, Lambda(Tensor.to_dense)),
        VECTORS,
        ("by_hand",),
        "torch.sparse_coo",
    ),
    Refused(
        "no channels",
        lambda: Custom(nn.Linear(10, 8), lambda x: x[:, :0]),
        VECTORS,
        ("by_hand",),
        "empty tensor",
    ),
    Refused("empty batch", vision.mlp, VECTORS[:0], ("1",), "empty tensor"),
    Refused(
        "scalar for each row",
        lambda: Custom(nn.Linear(10, 8), lambda x: x.sum(1)),
        VECTORS,
        ("by_hand",),
        "of 1 axes",
    ),
    Refused(
        "volumes",
        lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU()),
        normal(2, 1, 5, 5, 5),
        ("0",),
        "of 5 axes",
    ),
    Refused(
        "no batch",
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.MaxPool2d(2)),
        IMAGES[0],
        ("1",),
        "without a batch axis",
    ),
    Refused(
        "nobody tells",
        lambda: Custom(nn.Linear(16, 48), lambda x: x.view(-1, 6, 8), nn.Flatten()),
        normal(4, 16),
        ("by_hand",),
        "no module around it tells",
    ),
    Refused(
        "as long as wide",
        lambda: Custom(nn.Conv1d(6, 6, 1), lambda x: x.transpose(1, 2), nn.Linear(6, 2)),
        SQUARE,
        ("by_hand",),
        "a transposition would not show",
    ),
    Refused(
        "disagreement",
        lambda: Custom(nn.Conv1d(2, 5, 1), torch.relu, nn.LayerNorm(9)),
        LINE,
        ("by_hand",),
        "disagree",
    ),
    Refused(
        "convnext as deep as wide",
        lambda: vision.ConvNeXt(channels=4),
        IMAGES,
        ("blocks.0",),
        "disagree",
    ),
    Refused(
        "heads of attention",
        lambda: sequence.Gpt(norm_heads=True),
        TEXT,
        ("transformer.h.0.attn.q_norm",),
        "not certain that submodule 'transformer.h.0.attn.q_norm' returns images",
    ),
    Refused(
        "time first by hand",
        tokens_by_hand,
        normal(4, 5, 4),
        ("by_hand",),
        "which axis of submodule 'by_hand' is the batch; given: [5, 4, 6]; state the layout: "
        "Target(path, layout=Layout.TOKENS or Layout.TIME_FIRST).",
    ),
    Refused(
        "batch as long as time",
        # Takes no other batch, which would tell.
        lambda: Custom(nn.Linear(4, 6), lambda x: x.view(5, 5, 6), nn.Linear(6, 2)),
        normal(5, 5, 4),
        ("by_hand",),
        "give a sample whose batch and length differ",
    ),
    Refused(
        "positions",
        lambda: Positions(batch_first=True),
        TEXT,
        ("places",),
        "does not return something for every sample",
    ),
    Refused(
        "wrong layout stated",
        vision.mlp,
        VECTORS,
        (Target("1", layout=Layout.TOKENS),),
        "is not laid out as tokens",
    ),
    Refused(
        "same path twice",
        vision.mlp,
        VECTORS,
        ("1", Target("1", name="again")),
        "are the same module",
    ),
    Refused(
        "two paths", TwoPaths, VECTORS, ("first", "second"), "'first' and 'second' are the same"
    ),
    Refused("two widths", TwoWidths, VECTORS, ("relu",), "different widths"),
    Refused("two shapes", ImagesAndVectors, IMAGES, ("relu",), "different shapes"),
    Refused(
        "padded encoder",
        padded_encoder,
        {"tokens": TEXT, "padding": PADDING},
        ("encoder.layers.0",),
        "set model.encoder.use_nested_tensor = False",
    ),
    Refused("failing sample", vision.mlp, normal(4, 9), ("1",), "mat1 and mat2 shapes"),
    Refused("wrong arguments", vision.mlp, {"y": VECTORS}, ("1",), "TypeError"),
]
