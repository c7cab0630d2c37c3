"""Models as people write them, and what a slot on them must say: accepted as what, or refused."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.kasmina.probe import Target
from esper.kasmina.watching import Sample, call
from esper.leyline import Layout
from tests.kasmina import zoo_forms as forms
from tests.kasmina import zoo_modern as modern
from tests.kasmina import zoo_more as more
from tests.kasmina import zoo_sequence as sequence
from tests.kasmina import zoo_vision as vision

DENSE, IMAGE, IMAGE_LAST = Layout.DENSE, Layout.IMAGE, Layout.IMAGE_LAST
SEQUENCE, TOKENS, TIME_FIRST = Layout.SEQUENCE, Layout.TOKENS, Layout.TIME_FIRST

_DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_DRAW)


def words(*shape: int) -> Tensor:
    return torch.randint(sequence.WORDS, shape, generator=_DRAW)


@dataclass(frozen=True)
class Entry:
    """A model, a sample, and places for slots, with the layout and channels expected there."""

    name: str
    build: Callable[[], nn.Module]
    sample: Sample
    accepted: dict[str | Target, tuple[Layout, int]]

    @property
    def places(self) -> list[str | Target]:
        return list(self.accepted)

    def model(self, start: int = 1) -> nn.Module:
        """The same weights for the same `start`, without touching the random state."""
        with torch.random.fork_rng():
            torch.manual_seed(start)
            return self.build()

    def run(self, model: nn.Module) -> object:
        return call(model, self.sample)

    def loss(self, output: object) -> Tensor:
        """A loss in which every number of the output counts, with a gradient everywhere."""
        losses = []
        for tensor in tensors_in(output):
            if tensor.is_floating_point():
                goal = torch.arange(tensor.numel(), device=tensor.device).cos().view(tensor.shape)
                losses.append((tensor.float() - goal).square().mean())
        return torch.stack(losses).sum()


def tensors_in(output: object) -> list[Tensor]:
    """All tensors of an output, also inside a dataclass."""
    flat = [
        vars(x) if hasattr(x, "__dict__") and not isinstance(x, Tensor) else x
        for x in tree_leaves(output)
    ]
    return [x for x in tree_leaves(flat) if isinstance(x, Tensor)]


IMAGES, VECTORS, TEXT = normal(4, 3, 8, 8), normal(4, 10), words(4, 7)

_MODERN = [
    Entry("vgg", modern.vgg, IMAGES, {"1": (IMAGE, 5), "5": (IMAGE, 7), "9": (DENSE, 9)}),
    Entry("conv mixer", modern.conv_mixer, IMAGES, {"2.0": (IMAGE, 6), "3": (IMAGE, 6)}),
    Entry("shufflenet", modern.ShuffleNet, IMAGES, {"stem": (IMAGE, 6), "units": (IMAGE, 6)}),
    Entry(
        "efficientnet",
        modern.EfficientNet,
        IMAGES,
        {"blocks.0": (IMAGE, 5), "blocks.1.filter": (IMAGE, 10), "blocks.1.squeeze": (IMAGE, 2)},
    ),
    Entry("crnn", modern.Crnn, IMAGES, {"cnn": (IMAGE, 4), "rnn@0": (TOKENS, 10)}),
    Entry("m5", modern.M5, normal(4, 1, 40), {"bn1": (SEQUENCE, 5), "conv2": (SEQUENCE, 7)}),
    Entry(
        "wavenet",
        modern.WaveNet,
        normal(4, 2, 9),
        {"front": (SEQUENCE, 6), "layers.0@0": (SEQUENCE, 6), "layers.1@1": (SEQUENCE, 4)},
    ),
    Entry(
        "llama",
        lambda: modern.Llama(sequence.WORDS),
        TEXT,
        {"layers.0": (TOKENS, 8), "layers.0.attention": (TOKENS, 8), "layers.1.w1": (TOKENS, 12)},
    ),
    Entry(
        "seq2seq",
        lambda: modern.Seq2Seq(sequence.WORDS),
        (TEXT, words(4, 5)),
        {"encoder@0": (TOKENS, 6), "cell": (DENSE, 6)},
    ),
    Entry(
        "fnet",
        lambda: modern.FNet(sequence.WORDS),
        TEXT,
        {"norm1": (TOKENS, 8), "ff": (TOKENS, 8)},
    ),
    Entry("deep sets", modern.DeepSets, normal(4, 6, 4), {"phi": (TOKENS, 7), "rho.1": (DENSE, 6)}),
    Entry(
        "wide and deep",
        modern.WideAndDeep,
        (torch.tensor([0, 6, 3, 1]), torch.tensor([8, 2, 0, 5])),
        {"deep.1": (DENSE, 10), "deep": (DENSE, 6), "user": (DENSE, 4)},
    ),
    Entry("actor critic", modern.ActorCritic, VECTORS, {"trunk.1": (DENSE, 8), "@0": (DENSE, 3)}),
    Entry("nerf", modern.Nerf, normal(4, 3), {"early": (DENSE, 8), "late": (DENSE, 8)}),
    Entry("tied autoencoder", modern.TiedAutoencoder, VECTORS, {"encoder": (DENSE, 6)}),
    Entry("adapted", modern.adapted, VECTORS, {"0": (DENSE, 8), "1": (DENSE, 8)}),
    Entry(
        "shared layers", modern.SharedLayers, VECTORS, {"block": (DENSE, 8), "enter": (DENSE, 8)}
    ),
    Entry("experts", modern.Experts, VECTORS, {"enter": (DENSE, 8), "router": (DENSE, 3)}),
]

ACCEPTED = [
    *_MODERN,
    Entry(
        "inception",
        more.Inception,
        IMAGES,
        {"narrow": (IMAGE, 4), "wide": (IMAGE, 5), "pooled": (IMAGE, 2)},
    ),
    Entry(
        "feature pyramid",
        more.FeaturePyramid,
        IMAGES,
        {"down1": (IMAGE, 6), "lateral2": (IMAGE, 5), "smooth": (IMAGE, 5)},
    ),
    Entry(
        "bidirectional tagger",
        lambda: more.Tagger(sequence.WORDS),
        TEXT,
        {"embed": (TOKENS, 6), "rnn@0": (TOKENS, 10), "drop": (TOKENS, 10)},
    ),
    Entry(
        "cross-attention",
        more.CrossAttention,
        normal(4, 6, 5),
        {"project": (TOKENS, 8), "attend@0": (TOKENS, 8), "mlp": (TOKENS, 8)},
    ),
    Entry(
        "table with categories",
        more.TableNet,
        (torch.tensor([[0, 5], [3, 1], [2, 2], [1, 0]]), normal(4, 5)),
        {"first": (DENSE, 12), "blocks.1": (DENSE, 12), "categories.0": (DENSE, 3)},
    ),
    Entry(
        "highway",
        more.Highway,
        VECTORS,
        {"transform.0": (DENSE, 10), "carry.1": (DENSE, 10)},
    ),
    Entry("mlp", vision.mlp, VECTORS, {"1": (DENSE, 16), "2": (DENSE, 12), "": (DENSE, 4)}),
    Entry(
        "resnet basic",
        vision.resnet_basic,
        IMAGES,
        {"stem": (IMAGE, 6), "layer1": (IMAGE, 6), "layer2.0.conv1": (IMAGE, 10)},
    ),
    Entry(
        "resnet bottleneck",
        vision.resnet_bottleneck,
        IMAGES,
        {"layer1.body.3": (IMAGE, 3), "layer2": (IMAGE, 6), "pool": (IMAGE, 6)},
    ),
    Entry(
        "resnet preactivation",
        vision.resnet_preactivation,
        IMAGES,
        {"0": (IMAGE, 6), "1": (IMAGE, 6), "2.relu": (IMAGE, 6)},
    ),
    Entry("as deep as wide", vision.as_deep_as_wide, IMAGES, {"1": (IMAGE, 8)}),
    Entry(
        "densenet", vision.densenet, IMAGES, {"1": (IMAGE, 7), "3": (IMAGE, 5), "4": (DENSE, 80)}
    ),
    Entry(
        "unet",
        vision.UNet,
        (normal(4, 1, 8, 8), torch.rand(4, 1, generator=_DRAW)),
        {"down1": (IMAGE, 4), "mid": (IMAGE, 6), "up1": (IMAGE, 4), "time": (DENSE, 6)},
    ),
    Entry(
        "mobilenet",
        vision.MobileNet,
        IMAGES,
        {"blocks.0": (IMAGE, 5), "blocks.1.depthwise": (IMAGE, 10), "classifier.0": (DENSE, 5)},
    ),
    Entry(
        "convnext",
        vision.ConvNeXt,
        IMAGES,
        {"blocks.0": (IMAGE, 6), "blocks.1.norm": (IMAGE_LAST, 6), "norm": (DENSE, 6)},
    ),
    Entry(
        "squeeze excite", vision.SqueezeExciteNet, IMAGES, {"se": (IMAGE, 6), "conv": (IMAGE, 6)}
    ),
    Entry(
        "autoencoder",
        vision.Autoencoder,
        normal(4, 1, 8, 8),
        {"encoder": (DENSE, 3), "decoder.1": (DENSE, 12)},
    ),
    Entry(
        "gan generator", vision.generator, normal(4, 6, 1, 1), {"0": (IMAGE, 8), "5": (IMAGE, 5)}
    ),
    Entry(
        "siamese",
        vision.Siamese,
        (normal(4, 1, 8, 8), normal(4, 1, 8, 8)),
        {"encoder.0": (IMAGE, 4), "encoder": (DENSE, 7)},
    ),
    Entry(
        "in place behind the slot",
        vision.in_place_behind_the_slot,
        IMAGES,
        {"0": (IMAGE, 5), "2": (IMAGE, 5)},
    ),
    Entry("weight norm", vision.weight_norm, VECTORS, {"0": (DENSE, 8)}),
    Entry("spectral norm", vision.spectral_norm, IMAGES, {"0": (IMAGE, 5), "1": (IMAGE, 5)}),
    Entry(
        "frozen backbone",
        vision.FrozenBackbone,
        IMAGES,
        {"backbone": (IMAGE, 5), "backbone.0": (IMAGE, 5), "head.1": (DENSE, 9)},
    ),
    Entry(
        "deep supervision",
        vision.DeepSupervision,
        IMAGES,
        {"stem": (IMAGE, 6), "aux.1": (DENSE, 6)},
    ),
    Entry("norm of all axes", forms.NormOfAllAxes, IMAGES, {"norm": (IMAGE, 6)}),
    Entry("channels first norm", forms.channels_first_norm, IMAGES, {"1": (IMAGE, 6)}),
    Entry(
        "swin",
        forms.Swin,
        IMAGES,
        {"patches": (IMAGE, 5), "stage": (IMAGE_LAST, 5), "merge": (IMAGE_LAST, 6)},
    ),
    Entry(
        "tcn",
        sequence.Tcn,
        normal(4, 2, 9),
        {"network.0": (SEQUENCE, 6), "network.1.conv": (SEQUENCE, 5)},
    ),
    Entry("pointnet", sequence.pointnet, normal(4, 3, 9), {"2": (SEQUENCE, 6)}),
    Entry(
        "lstm classifier",
        sequence.LstmClassifier,
        TEXT,
        {"embedding": (TOKENS, 6), "lstm": (TOKENS, 16)},
    ),
    Entry(
        "word language model",
        sequence.WordLanguageModel,
        words(7, 4),
        {"encoder": (TIME_FIRST, 6), "rnn@0": (TIME_FIRST, 6), "drop": (TIME_FIRST, 6)},
    ),
    Entry("cell loop", sequence.CellLoop, normal(4, 5, 4), {"cell": (DENSE, 7)}),
    Entry("stateful rnn", sequence.StatefulRnn, normal(4, 5, 4), {"rnn@0": (TOKENS, 6)}),
    Entry(
        "transformer encoder, batch first",
        lambda: sequence.TextEncoder(batch_first=True),
        TEXT,
        {
            "position": (TOKENS, 8),
            "encoder.layers.0": (TOKENS, 8),
            "encoder.layers.1.linear1": (TOKENS, 12),
        },
    ),
    Entry(
        "transformer encoder, time first",
        lambda: sequence.TextEncoder(batch_first=False, norm_first=True),
        TEXT,
        {
            "embedding": (TOKENS, 8),
            "encoder.layers.0": (TIME_FIRST, 8),
            "encoder.layers.1.norm2": (TIME_FIRST, 8),
        },
    ),
    Entry(
        "translator",
        sequence.translator,
        (normal(7, 4, 8), normal(5, 4, 8)),
        {"encoder": (TIME_FIRST, 8), "decoder.layers.0": (TIME_FIRST, 8)},
    ),
    Entry(
        "gpt",
        sequence.Gpt,
        (TEXT, words(4, 7)),
        {
            "transformer.wte": (TOKENS, 8),
            "transformer.h.0": (TOKENS, 8),
            "transformer.h.1.attn": (TOKENS, 8),
        },
    ),
    Entry(
        "vision transformer",
        sequence.VisionTransformer,
        IMAGES,
        {"patch_embed": (IMAGE, 8), "blocks.0": (TOKENS, 8), "blocks.1.attention@0": (TOKENS, 8)},
    ),
    Entry(
        "mixer",
        sequence.Mixer,
        IMAGES[:3],
        {"blocks.0": (TOKENS, 7), "blocks.1.token_mix": (TOKENS, 4)},
    ),
    Entry(
        "graph convolution",
        sequence.GraphConvolution,
        (normal(6, 5), torch.rand(6, 6, generator=_DRAW)),
        {"conv1": (DENSE, 8)},
    ),
    Entry(
        "two towers",
        forms.TwoTowers,
        (normal(4, 1, 8, 8), TEXT),
        {"image.1": (IMAGE, 5), "words": (TOKENS, 6), "image": (DENSE, 6)},
    ),
    Entry(
        "dict output",
        forms.DictOutput,
        VECTORS,
        {"trunk@features": (DENSE, 8), "@left": (DENSE, 3)},
    ),
    Entry("vae", forms.Vae, VECTORS, {"encoder@0": (DENSE, 5), "decoder.0": (DENSE, 8)}),
    Entry(
        "feature pyramid",
        forms.FeaturePyramid,
        normal(4, 1, 8, 8),
        {"backbone@0": (IMAGE, 4), "@1": (DENSE, 2)},
    ),
    Entry("own hooks", forms.OwnHooks, VECTORS, {"fc1": (DENSE, 8)}),
    Entry(
        "checkpointed",
        forms.Checkpointed,
        VECTORS,
        {"blocks.0": (DENSE, 8), "blocks.1.0": (DENSE, 8)},
    ),
    Entry(
        "keywords only",
        forms.KeywordsOnly,
        {"numbers": VECTORS, "context": normal(4, 3), "scale": 0.5},
        {"features": (DENSE, 8), "mixer": (DENSE, 6)},
    ),
    *(
        Entry(
            f"stochastic depth by {dice}",
            lambda dice=dice: forms.StochasticDepth(dice),
            normal(4, 8),
            {"layers.1": (DENSE, 8)},
        )
        for dice in ("torch", "python", "numpy", "own")
    ),
    Entry(
        "mixed precision", forms.MixedPrecision, VECTORS, {"fc1": (DENSE, 8), "norm": (DENSE, 8)}
    ),
]
