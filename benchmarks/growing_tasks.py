"""The three tasks of `growing.py`: a host that is too small, its data, and how it is grown.

Hosts, settings and learning rates were chosen on seeds 100 and 101, of which no result is reported;
docs/growing-results.md says how, and what that leaves in doubt.

Shapes: `B` batch, `T` bytes of a window, `C` channels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from esper.leyline.streams import derive_seed
from esper.tolaria.data.corpus import Corpus, corpus_splits, read_corpus
from esper.tolaria.data.image_sets import FASHION_MNIST, idx_splits
from esper.tolaria.data.splits import Split, Splits
from esper.tolaria.tasks import mnist1d

GLYPH, WIDTHS = 40, (64, 40)  # points of an MNIST-1D sample, middle layers of its MLP
CHANNELS = (4, 8, 8)  # of the CNN
WIDTH, CONTEXT = 16, 32  # of the GPT
CORPUS_LIMIT = 1_000_000  # bytes, of which windows are drawn

Data = dict[str, tuple[Tensor, Tensor]]  # inputs and targets by split


@dataclass(frozen=True, kw_only=True)
class Task:
    """One comparison."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    load: Callable[[int], Splits]  # by seed
    samples: dict[str, int]  # how many of each split at most
    slots: tuple[str, ...]
    controller: str
    epochs: int
    rates: tuple[float, ...]  # learning rates for the architecture from scratch
    rate: float  # of the others
    batch_size: int = 64
    by_loss: bool = False  # else by accuracy

    def data(self, seed: int) -> Data:
        """Rows of the three splits; those of the test split are chosen without the seed."""
        parts = {}
        for name, split in self.load(seed).named().items():
            stream = derive_seed(0 if name == "test" else seed, "rows", name)
            inputs, labels = _some(split, self.samples[name], stream)
            parts[name] = (inputs, labels)
        return parts

    def quick(self) -> "Task":
        """The same in seconds; its figures mean nothing."""
        few = {"train": 320, "validation": 100, "test": 100}
        return replace(self, samples=few, epochs=9)


def _some(split: Split, count: int, stream: int) -> Split:
    order = torch.randperm(split.samples, generator=torch.Generator().manual_seed(stream))
    return split.take(order[:count])


# --- hosts ------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    """[B, 40] to [B, 10]. It sees every point at its own place, and glyphs are shifted."""
    wide, narrow = WIDTHS
    return nn.Sequential(
        nn.LayerNorm(GLYPH),
        nn.Linear(GLYPH, wide),
        nn.ReLU(),
        nn.Linear(wide, narrow),
        nn.ReLU(),
        nn.Linear(narrow, 10),
    )


class Cnn(nn.Module):
    """[B, 1, 28, 28] to [B, 10], with every convolution halving the image."""

    def __init__(self) -> None:
        super().__init__()
        layers, before = [], 1
        for after in CHANNELS:
            convolution = nn.Conv2d(before, after, 3, stride=2, padding=1)
            layers.append(nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU()))
            before = after
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images).mean((2, 3)))
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


class Gpt(nn.Module):
    """Bytes [B, T] to logits [B, T, 256] of the next ones."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


# --- tasks ------------------------------------------------------------------------------------


@cache
def _library() -> Corpus:
    return read_corpus()


def _text(seed: int) -> Splits:
    return corpus_splits(_library(), context=CONTEXT, limit=CORPUS_LIMIT, seed=seed)


EAGER = "patience=0,first=1,spacing=1"  # plant at once; what is not worth it is pruned

TASKS = {
    task.name: task
    for task in (
        Task(
            name="mnist1d",
            title="MLP on MNIST-1D",
            build=mlp,
            load=mnist1d,
            samples={"train": 4000, "validation": 2000, "test": 4000},
            slots=("0", "2", "4"),
            controller=f"heuristic:places=0/convpool,{EAGER},margin=1",
            epochs=25,
            rates=(3e-3, 1e-2, 3e-2),
            rate=1e-2,
        ),
        Task(
            name="fashion_mnist",
            title="CNN on Fashion-MNIST",
            build=Cnn,
            load=partial(idx_splits, FASHION_MNIST),
            samples={"train": 4000, "validation": 1000, "test": 10_000},
            slots=("layers.0", "layers.1", "layers.2"),
            controller=f"heuristic:places=layers.0/conv,{EAGER}",
            epochs=15,
            rates=(3e-2, 1e-1, 2e-1),
            rate=1e-1,
        ),
        Task(
            name="stdlib",
            title="GPT on the standard library",
            build=Gpt,
            load=_text,
            samples={"train": 2700, "validation": 300, "test": 2000},
            slots=("blocks.0", "blocks.1"),
            controller=f"heuristic:places=blocks.1/mlp+blocks.0/attention,{EAGER},together=2,"
            "margin=0.2,rent=0",
            epochs=12,
            rates=(1e-2, 2e-2, 3e-2),
            rate=2e-2,
            batch_size=16,
            by_loss=True,
        ),
    )
}
