"""The tasks of `growing.py`: hosts that may lack something, and their data.

Three are for development: rules were tuned on them. The others are for the report, and were written
down in docs/growing-results.md before anything was trained on them.

Images and text are taken from pools of a fixed size, so that every machine draws from the same:
from files that are there, or from what `--pack` has put into a folder.

Shapes: `M` samples, `B` batch, `T` positions, `C` channels, `L` points of a line.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import esper
from esper.leyline.streams import derive_seed
from esper.tolaria.data.corpus import Corpus, corpus_splits, read_corpus
from esper.tolaria.data.image_sets import (
    DIGITS_FILE,
    FASHION_MNIST,
    IDX_FILES,
    image_splits,
    read_idx,
)
from esper.tolaria.data.mnist1d import Mnist1dConfig, generate
from esper.tolaria.data.splits import Split, Splits

BUDGET = "+25%"
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # of the bare host, one of which all ways share
OWN_RATES = (1 / 3, 1.0, 3.0)  # times that: what a way with a rate of its own may choose from
TUNING_SEEDS = (100, 101, 102)
SEEDS = (0, 1, 2, 3, 4)

POOLED_IMAGES = {"train": 10_000, "test": 4_000}
POOLED_BYTES = 2_000_000
CONTEXT = 32  # bytes of a window
GLYPH = 40  # points of an MNIST-1D sample
TOKENS, LENGTH, TAGS = 32, 24, 4  # of sequence labelling
JOINTS = 6

Data = dict[str, tuple[Tensor, Tensor]]  # inputs and targets by split
Counts = Mapping[str, int]
Build = Callable[[float], nn.Module]  # with all its widths times a factor


@dataclass(frozen=True)
class Candidate:
    """One seed that could be planted."""

    place: str
    blueprint: str
    params: int

    def __str__(self) -> str:
        return f"{self.blueprint} at {self.place}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A host and what it learns."""

    name: str
    title: str
    development: bool = False
    build: Build
    example: Callable[[], Tensor]  # inputs of some samples
    load: Callable[[int, Counts, Path | None], Data]  # by seed; from packed pools if there are any
    samples: Counts  # by split
    epochs: int
    batch_size: int = 64
    guess: float | None = None  # loss of who knows nothing; None: scored by accuracy
    loss: str = "cross_entropy"

    def data(self, seed: int, packed: Path | None = None) -> Data:
        return self.load(seed, self.samples, packed)

    def score(self, loss: float, accuracy: float) -> float:
        """In points: accuracy in percent, or how much of a guess's loss is gone."""
        return accuracy if self.guess is None else 100.0 * (1.0 - loss / self.guess)

    def candidates(self) -> list[Candidate]:
        """Every seed that fits the budget, wherever the default would hear its shadow."""
        model, inputs = self.build(1.0), self.example()
        found = {place.path: place for place in esper.inspect(model, inputs, budget=BUDGET).places}
        heard = esper.wrap(model, inputs, slots="every", budget=BUDGET).seed_slots
        return [
            Candidate(place, blueprint, params)
            for place in heard
            for blueprint, params in found[place].options.items()
        ]

    def quick(self) -> "Task":
        """The same in seconds; its figures mean nothing."""
        few = {"train": 128, "validation": 64, "test": 64}
        return replace(self, samples=few, epochs=13)


# --- hosts ------------------------------------------------------------------------------------


def scaled(width: int, factor: float, layer: int = 0) -> int:
    """A width times a factor; layers round apart, so that sizes grow in small steps."""
    return width + math.floor(width * (factor - 1.0) + (layer + 1) / 4)


def dense(
    inputs: int, widths: tuple[int, ...], outputs: int, norm: bool, factor: float
) -> nn.Module:
    """[B, inputs] to [B, outputs]."""
    layers: list[nn.Module] = [nn.LayerNorm(inputs)] if norm else []
    before = inputs
    for layer, width in enumerate(widths):
        after = scaled(width, factor, layer)
        layers += [nn.Linear(before, after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.Linear(before, outputs))


class Conv1d(nn.Module):
    """Lines [B, L] to [B, 10], with every convolution halving them."""

    def __init__(self, channels: tuple[int, ...], norm: bool, factor: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before, length = 1, GLYPH
        for layer, width in enumerate(channels):
            after, length = scaled(width, factor, layer), (length + 1) // 2
            layers.append(nn.Conv1d(before, after, 5, stride=2, padding=2))
            layers += [nn.BatchNorm1d(after)] if norm else []
            layers.append(nn.ReLU())
            before = after
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before * length, 10)

    def forward(self, lines: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(lines.unsqueeze(1)).flatten(1))
        return logits


class Cnn(nn.Module):
    """Images [B, 1, H, W] to [B, 10], with every convolution halving them."""

    def __init__(self, channels: tuple[int, ...], norm: bool, factor: float) -> None:
        super().__init__()
        layers, before = [], 1
        for layer, width in enumerate(channels):
            after = scaled(width, factor, layer)
            parts = [nn.Conv2d(before, after, 3, stride=2, padding=1)]
            parts += [nn.BatchNorm2d(after)] if norm else []
            layers.append(nn.Sequential(*parts, nn.ReLU()))
            before = after
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images).mean((2, 3)))
        return logits


class Tagger(nn.Module):
    """Tokens [B, T] to logits [B, T, TAGS], by convolutions that see a few neighbours."""

    def __init__(self, width: int, layers: int, factor: float) -> None:
        super().__init__()
        wide = scaled(width, factor)
        self.tokens = nn.Embedding(TOKENS, wide)
        parts = [[nn.Conv1d(wide, wide, 3, padding=1), nn.ReLU()] for _ in range(layers)]
        self.layers = nn.Sequential(*(part for pair in parts for part in pair))
        self.head = nn.Linear(wide, TAGS)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.layers(self.tokens(tokens).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(seen)
        return logits


class Block(nn.Module):
    """One head of attention and a feed-forward part no wider than the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        query, key, value = self.attend(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(scaled_dot_product_attention(query, key, value, is_causal=True))
        thought: Tensor = x + self.think(self.norm2(x))
        return thought


class ParallelBlock(nn.Module):
    """The same with one norm, and both parts side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        h = self.norm(x)
        query, key, value = self.attend(h).chunk(3, dim=-1)
        seen = self.out(scaled_dot_product_attention(query, key, value, is_causal=True))
        thought: Tensor = x + seen + self.down(gelu(self.up(h)))
        return thought


class Gpt(nn.Module):
    """Tokens [B, T] to logits [B, T, outputs]; a position sees those before it."""

    def __init__(
        self,
        vocabulary: int,
        outputs: int,
        length: int,
        block: type[Block | ParallelBlock],
        width: int,
        blocks: int,
        factor: float,
    ) -> None:
        super().__init__()
        wide = scaled(width, factor)
        self.tokens, self.places = nn.Embedding(vocabulary, wide), nn.Embedding(length, wide)
        self.blocks = nn.Sequential(*(block(wide) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


# --- generated data ----------------------------------------------------------------------------


def _glyphs(seed: int, samples: Counts, packed: Path | None) -> Data:
    """MNIST-1D: [M, 40] and [M]."""
    return {
        name: generate(Mnist1dConfig(samples=count, seed=derive_seed(seed, "data", name)))
        for name, count in samples.items()
    }


def _regression(
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]],
    seed: int,
    samples: Counts,
    packed: Path | None,
) -> Data:
    """[M, inputs] and [M, 1], where the targets to train on have mean 0 and variance 1."""
    parts = {}
    for name, count in samples.items():
        stream = torch.Generator().manual_seed(derive_seed(seed, draw.__name__, name))
        parts[name] = draw(count, stream)
    targets = parts["train"][1]
    centre, spread = targets.mean(), targets.std()
    return {
        name: (inputs, ((values - centre) / spread).unsqueeze(1))
        for name, (inputs, values) in parts.items()
    }


def _friedman(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """J. H. Friedman's first function (1991) of five of ten inputs, with noise."""
    x = torch.rand(count, 10, generator=stream)
    waves = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    noise = torch.randn(count, generator=stream)
    return 2 * x - 1, waves + 10 * x[:, 3] + 5 * x[:, 4] + noise


def _arm(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """How far the end of a chain of links is from its start, by the angles of its joints."""
    bends = 2 * torch.rand(count, JOINTS, generator=stream) - 1
    headings = (bends * math.pi / 2).cumsum(1)
    return bends, torch.hypot(headings.cos().sum(1), headings.sin().sum(1))


def _tagged(seed: int, samples: Counts, packed: Path | None) -> Data:
    """Tokens [M, T] and tags [M, T]: was it seen before in this line? Is it more than the last?"""
    parts = {}
    for name, count in samples.items():
        stream = torch.Generator().manual_seed(derive_seed(seed, "tags", name))
        tokens = torch.randint(TOKENS, (count, LENGTH), generator=stream)
        same = tokens[:, :, None] == tokens[:, None]  # [M, T, T]
        seen = same.tril(-1).any(2)
        more = torch.zeros_like(seen)
        more[:, 1:] = tokens[:, 1:] > tokens[:, :-1]
        parts[name] = (tokens, 2 * seen.long() + more.long())
    return parts


# --- images and text ---------------------------------------------------------------------------


def _digits(flat: bool, seed: int, samples: Counts, packed: Path | None) -> Data:
    """[M, 1, 8, 8], or [M, 64], of the 1,797 that are shipped; test data do not depend on seeds."""
    with np.load(DIGITS_FILE, allow_pickle=False) as stored:
        images, labels = (torch.from_numpy(stored[name]) for name in ("images", "labels"))
    shares = {"validation": 0.2, "test": 0.3}
    splits = image_splits(
        images.unsqueeze(1), labels, shares=shares, seed=seed, origin="handwritten digits"
    )
    found = _rows(splits, seed, samples)
    if flat:
        return {name: (inputs.flatten(1), labels) for name, (inputs, labels) in found.items()}
    return found


def _clothes(seed: int, samples: Counts, packed: Path | None) -> Data:
    """[M, 1, 28, 28]"""
    pool = clothes_pool(packed)
    whole, test = Split(pool["images"], pool["labels"]), Split(pool["test"], pool["test_labels"])
    splits = image_splits(
        whole.inputs, whole.labels, shares={"validation": 0.2}, test=test, seed=seed,
        origin=FASHION_MNIST.title,
    )  # fmt: skip
    return _rows(splits, seed, samples)


@cache
def clothes_pool(packed: Path | None) -> dict[str, Tensor]:
    """The first images of Fashion-MNIST, as bytes."""
    if packed is not None:
        with np.load(packed / "clothes.npz", allow_pickle=False) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}
    paths = FASHION_MNIST.find([(name, f"{name}.gz") for name in IDX_FILES])
    axes = (3, 1, 3, 1)
    found = [
        read_idx(FASHION_MNIST, path, count)[: POOLED_IMAGES[part]]
        for path, count, part in zip(paths, axes, ("train", "train", "test", "test"), strict=True)
    ]
    images, labels, test, test_labels = found
    return {
        "images": images.unsqueeze(1), "labels": labels,
        "test": test.unsqueeze(1), "test_labels": test_labels,
    }  # fmt: skip


def _text(seed: int, samples: Counts, packed: Path | None) -> Data:
    """Windows [M, T] of bytes, and of the bytes after them."""
    corpus = text_pool(packed)
    splits = corpus_splits(corpus, context=CONTEXT, limit=corpus.size, seed=seed)
    return _rows(splits, seed, samples)


@cache
def text_pool(packed: Path | None) -> Corpus:
    """Some files of Python's standard library, in an order of chance."""
    if packed is not None:
        with np.load(packed / "text.npz", allow_pickle=False) as stored:
            names = stored["names"].tobytes().decode().split("\n")
            ends, content = stored["ends"].tolist(), stored["content"].tobytes()
            title, sha256 = stored["origin"].tobytes().decode().split("\n")
        starts = [0, *ends[:-1]]
        files = [content[start:end] for start, end in zip(starts, ends, strict=True)]
        return Corpus(title=title, files=tuple(zip(names, files, strict=True)), sha256=sha256)
    whole = read_corpus()
    files, size = [], 0
    for name, content in sorted(whole.files, key=lambda file: derive_seed("pool", file[0])):
        if size + len(content) <= POOLED_BYTES:
            files.append((name, content))
            size += len(content)
    return Corpus(title=whole.title, files=tuple(sorted(files)), sha256=whole.sha256)


def pack(folder: Path) -> None:
    """Put what other machines may not have into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    clothes = {name: tensor.numpy() for name, tensor in clothes_pool(None).items()}
    np.savez_compressed(folder / "clothes.npz", allow_pickle=False, **clothes)
    text = text_pool(None)
    contents = [content for _, content in text.files]
    words = {"names": "\n".join(name for name, _ in text.files)}
    words["origin"] = f"{text.title}\n{text.sha256}"
    np.savez_compressed(
        folder / "text.npz",
        allow_pickle=False,
        ends=np.cumsum([len(content) for content in contents]),
        content=np.frombuffer(b"".join(contents), np.uint8),
        **{name: np.frombuffer(value.encode(), np.uint8) for name, value in words.items()},
    )


def _rows(splits: Splits, seed: int, samples: Counts) -> Data:
    """Some rows of each split; those of the test split are chosen without the seed."""
    parts = {}
    for name, split in splits.named().items():
        stream = derive_seed(0 if name == "test" else seed, "rows", name)
        order = torch.randperm(split.samples, generator=torch.Generator().manual_seed(stream))
        parts[name] = tuple(split.take(order[: samples[name]]))
    return parts


# --- tasks ------------------------------------------------------------------------------------

_LINES = {"train": 3000, "validation": 1500, "test": 4000}
_NUMBERS = {"train": 2000, "validation": 1000, "test": 4000}
_DIGITS = {"train": 900, "validation": 359, "test": 539}
_CLOTHES = {"train": 2500, "validation": 1500, "test": 4000}
_WINDOWS = {"train": 700, "validation": 300, "test": 1000}
_TAGGED = {"train": 1500, "validation": 600, "test": 2000}
_LINE = partial(torch.randn, 4, GLYPH)
_IMAGE, _SMALL_IMAGE = partial(torch.randn, 4, 1, 28, 28), partial(torch.randn, 4, 1, 8, 8)
_WINDOW = partial(torch.randint, 256, (4, CONTEXT))
_LINE_OF_TOKENS = partial(torch.randint, TOKENS, (4, LENGTH))
_BYTES = partial(Gpt, 256, 256, CONTEXT)
_TOKENS = partial(Gpt, TOKENS, TAGS, LENGTH)

TASKS = {
    task.name: task
    for task in (
        Task(
            name="mnist1d_mlp",
            title="MLP on MNIST-1D",
            development=True,
            build=partial(dense, GLYPH, (64, 40), 10, True),
            example=_LINE,
            load=_glyphs,
            samples=_LINES,
            epochs=20,
        ),
        Task(
            name="fashion_small",
            title="small CNN on Fashion-MNIST",
            development=True,
            build=partial(Cnn, (4, 8, 8), True),
            example=_IMAGE,
            load=_clothes,
            samples=_CLOTHES,
            epochs=15,
        ),
        Task(
            name="bytes_small",
            title="small GPT on the standard library",
            development=True,
            build=partial(_BYTES, Block, 16, 2),
            example=_WINDOW,
            load=_text,
            samples=_WINDOWS,
            epochs=14,
            batch_size=16,
            guess=math.log(256),
        ),
        Task(
            name="digits_mlp",
            title="MLP on digits",
            build=partial(dense, 64, (24, 16), 10, False),
            example=partial(torch.randn, 4, 64),
            load=partial(_digits, True),
            samples=_DIGITS,
            epochs=25,
        ),
        Task(
            name="friedman_small",
            title="small MLP on Friedman-1",
            build=partial(dense, 10, (16, 8), 1, False),
            example=partial(torch.randn, 4, 10),
            load=partial(_regression, _friedman),
            samples=_NUMBERS,
            epochs=20,
            guess=1.0,
            loss="mse",
        ),
        Task(
            name="friedman_large",
            title="larger MLP on Friedman-1",
            build=partial(dense, 10, (48, 32, 16), 1, True),
            example=partial(torch.randn, 4, 10),
            load=partial(_regression, _friedman),
            samples=_NUMBERS,
            epochs=20,
            guess=1.0,
            loss="mse",
        ),
        Task(
            name="arm",
            title="MLP on the reach of an arm",
            build=partial(dense, JOINTS, (20, 20), 1, False),
            example=partial(torch.randn, 4, JOINTS),
            load=partial(_regression, _arm),
            samples=_NUMBERS,
            epochs=20,
            guess=1.0,
            loss="mse",
        ),
        Task(
            name="mnist1d_conv",
            title="1-D CNN on MNIST-1D",
            build=partial(Conv1d, (8, 8, 8), False),
            example=_LINE,
            load=_glyphs,
            samples=_LINES,
            epochs=18,
        ),
        Task(
            name="mnist1d_normconv",
            title="wider 1-D CNN with norms on MNIST-1D",
            build=partial(Conv1d, (12, 16), True),
            example=_LINE,
            load=_glyphs,
            samples=_LINES,
            epochs=18,
        ),
        Task(
            name="digits_cnn",
            title="CNN on digits",
            build=partial(Cnn, (8, 8, 8), False),
            example=_SMALL_IMAGE,
            load=partial(_digits, False),
            samples=_DIGITS,
            epochs=25,
        ),
        Task(
            name="fashion_large",
            title="larger CNN on Fashion-MNIST",
            build=partial(Cnn, (8, 16, 24), False),
            example=_IMAGE,
            load=_clothes,
            samples=_CLOTHES,
            epochs=15,
        ),
        Task(
            name="bytes_wide",
            title="wide GPT of one block on the standard library",
            build=partial(_BYTES, Block, 28, 1),
            example=_WINDOW,
            load=_text,
            samples=_WINDOWS,
            epochs=14,
            batch_size=16,
            guess=math.log(256),
        ),
        Task(
            name="bytes_deep",
            title="GPT of three parallel blocks on the standard library",
            build=partial(_BYTES, ParallelBlock, 16, 3),
            example=_WINDOW,
            load=_text,
            samples=_WINDOWS,
            epochs=14,
            batch_size=16,
            guess=math.log(256),
        ),
        Task(
            name="tags_conv",
            title="1-D CNN that labels sequences",
            build=partial(Tagger, 12, 3),
            example=_LINE_OF_TOKENS,
            load=_tagged,
            samples=_TAGGED,
            epochs=16,
            batch_size=32,
            guess=math.log(TAGS),
        ),
        Task(
            name="tags_gpt",
            title="transformer that labels sequences",
            build=partial(_TOKENS, Block, 16, 1),
            example=_LINE_OF_TOKENS,
            load=_tagged,
            samples=_TAGGED,
            epochs=16,
            batch_size=32,
            guess=math.log(TAGS),
        ),
    )
}
