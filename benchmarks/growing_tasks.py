"""The tasks of `growing.py`: hosts that may lack something, and what they learn.

Rules are tuned on those for development. Those for a report were written down in
docs/growing-results.md before anything grew on them, in sets: what one showed led to changes, so
the next one was registered. Of the third, bare hosts had been trained once before that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import growing_generators as generated
import torch
from growing_generators import (
    BEAM,
    BEAT,
    BEATS,
    BRACKETS,
    BURST,
    BURSTS,
    CELLS,
    CHART,
    CHARTS,
    FORMS,
    GLYPH,
    GUESTS,
    HANDS,
    HUM,
    HUMS,
    JOINTS,
    LENGTH,
    LINE_OF_RECORDS,
    LINE_OF_REPEATS,
    MELODY,
    ORDER,
    ORDERS,
    PLANE,
    RAIL,
    RAILS,
    RECORDS,
    REPEATS,
    STROKE,
    TABLE,
    TAGS,
    TIDE,
    TIDES,
    TOKENS,
)  # fmt: skip
from growing_hosts import (
    Apart,
    Block,
    Cnn,
    Conv1d,
    Glimpse,
    Gpt,
    ParallelBlock,
    Tagger,
    dense,
)
from growing_pools import CONTEXT, FIRST, SECOND, Counts, Data, clothes, digits, text
from torch import Tensor, nn

import esper

BUDGET = "+25%"
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # of the bare host, one of which all ways share
OWN_RATES = (1 / 3, 1.0, 3.0)  # times that: what a way with a rate of its own may choose from
TUNING_SEEDS = (100, 101, 102)

Group = Literal["development", "report 1", "report 2", "report 3", "own"]
SEEDS: dict[Group, tuple[int, ...]] = {
    "development": (0, 1, 2, 3, 4),
    "report 1": (0, 1, 2, 3, 4),
    "report 2": (10, 11, 12, 13, 14),
    "report 3": (30, 31, 32, 33, 34),
    "own": (20, 21, 22, 23, 24),
}
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
    group: Group
    cautious: bool = True  # is the host's rate the best by the mean less the spread over seeds?
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

FIRST_TASKS = (
    Task(
        name="mnist1d_mlp",
        title="MLP on MNIST-1D",
        group="development",
        cautious=False,
        build=partial(dense, GLYPH, (64, 40), 10, True),
        example=_LINE,
        load=generated.glyphs,
        samples=_LINES,
        epochs=20,
    ),
    Task(
        name="fashion_small",
        title="small CNN on Fashion-MNIST",
        group="development",
        cautious=False,
        build=partial(Cnn, (4, 8, 8), True),
        example=_IMAGE,
        load=partial(clothes, FIRST),
        samples=_CLOTHES,
        epochs=15,
    ),
    Task(
        name="bytes_small",
        title="small GPT on the standard library",
        group="development",
        cautious=False,
        build=partial(_BYTES, Block, 16, 2),
        example=_WINDOW,
        load=partial(text, FIRST),
        samples=_WINDOWS,
        epochs=14,
        batch_size=16,
        guess=math.log(256),
    ),
    Task(
        name="digits_mlp",
        title="MLP on digits",
        group="report 1",
        cautious=False,
        build=partial(dense, 64, (24, 16), 10, False),
        example=partial(torch.randn, 4, 64),
        load=partial(digits, True),
        samples=_DIGITS,
        epochs=25,
    ),
    Task(
        name="friedman_small",
        title="small MLP on Friedman-1",
        group="report 1",
        cautious=False,
        build=partial(dense, 10, (16, 8), 1, False),
        example=partial(torch.randn, 4, 10),
        load=generated.friedman1,
        samples=_NUMBERS,
        epochs=20,
        guess=1.0,
        loss="mse",
    ),
    Task(
        name="friedman_large",
        title="larger MLP on Friedman-1",
        group="report 1",
        cautious=False,
        build=partial(dense, 10, (48, 32, 16), 1, True),
        example=partial(torch.randn, 4, 10),
        load=generated.friedman1,
        samples=_NUMBERS,
        epochs=20,
        guess=1.0,
        loss="mse",
    ),
    Task(
        name="arm",
        title="MLP on the reach of an arm",
        group="report 1",
        cautious=False,
        build=partial(dense, JOINTS, (20, 20), 1, False),
        example=partial(torch.randn, 4, JOINTS),
        load=generated.arm,
        samples=_NUMBERS,
        epochs=20,
        guess=1.0,
        loss="mse",
    ),
    Task(
        name="mnist1d_conv",
        title="1-D CNN on MNIST-1D",
        group="report 1",
        cautious=False,
        build=partial(Conv1d, GLYPH, (8, 8, 8), 10, False),
        example=_LINE,
        load=generated.glyphs,
        samples=_LINES,
        epochs=18,
    ),
    Task(
        name="mnist1d_normconv",
        title="wider 1-D CNN with norms on MNIST-1D",
        group="report 1",
        cautious=False,
        build=partial(Conv1d, GLYPH, (12, 16), 10, True),
        example=_LINE,
        load=generated.glyphs,
        samples=_LINES,
        epochs=18,
    ),
    Task(
        name="digits_cnn",
        title="CNN on digits",
        group="report 1",
        cautious=False,
        build=partial(Cnn, (8, 8, 8), False),
        example=_SMALL_IMAGE,
        load=partial(digits, False),
        samples=_DIGITS,
        epochs=25,
    ),
    Task(
        name="fashion_large",
        title="larger CNN on Fashion-MNIST",
        group="report 1",
        cautious=False,
        build=partial(Cnn, (8, 16, 24), False),
        example=_IMAGE,
        load=partial(clothes, FIRST),
        samples=_CLOTHES,
        epochs=15,
    ),
    Task(
        name="bytes_wide",
        title="wide GPT of one block on the standard library",
        group="report 1",
        cautious=False,
        build=partial(_BYTES, Block, 28, 1),
        example=_WINDOW,
        load=partial(text, FIRST),
        samples=_WINDOWS,
        epochs=14,
        batch_size=16,
        guess=math.log(256),
    ),
    Task(
        name="bytes_deep",
        title="GPT of three parallel blocks on the standard library",
        group="report 1",
        cautious=False,
        build=partial(_BYTES, ParallelBlock, 16, 3),
        example=_WINDOW,
        load=partial(text, FIRST),
        samples=_WINDOWS,
        epochs=14,
        batch_size=16,
        guess=math.log(256),
    ),
    Task(
        name="tags_conv",
        title="1-D CNN that labels sequences",
        group="report 1",
        cautious=False,
        build=partial(Tagger, TOKENS, TAGS, 12, 3),
        example=_LINE_OF_TOKENS,
        load=generated.tagged,
        samples=_TAGGED,
        epochs=16,
        batch_size=32,
        guess=math.log(TAGS),
    ),
    Task(
        name="tags_gpt",
        title="transformer that labels sequences",
        group="report 1",
        cautious=False,
        build=partial(_TOKENS, Block, 16, 1),
        example=_LINE_OF_TOKENS,
        load=generated.tagged,
        samples=_TAGGED,
        epochs=16,
        batch_size=32,
        guess=math.log(TAGS),
    ),
)

_FEWER = {"train": 1500, "validation": 800, "test": 3000}
_FEWER_LINES = {"train": 2000, "validation": 1000, "test": 3000}
_FEWER_WINDOWS = {"train": 600, "validation": 300, "test": 1000}
_FEWER_TAGGED = {"train": 1200, "validation": 500, "test": 2000}


def _numbers(name: str, title: str, group: Group, inputs: int, **more: Any) -> Task:
    """A regression of numbers."""
    example = partial(torch.randn, 4, inputs)
    settings = {"samples": _FEWER, "epochs": 20, "guess": 1.0, "loss": "mse"}
    return Task(name=name, title=title, group=group, example=example, **settings | more)


def _classes(name: str, title: str, group: Group, shape: tuple[int, ...], **more: Any) -> Task:
    """Numbers, lines or images of this shape that belong to classes."""
    example = partial(torch.randn, 4, *shape)
    settings = {"samples": _FEWER_LINES, "epochs": 18}
    return Task(name=name, title=title, group=group, example=example, **settings | more)


def _labelled(name: str, title: str, group: Group, tokens: int, length: int, **more: Any) -> Task:
    """Lines of tokens, all of which have a tag."""
    example = partial(torch.randint, tokens, (4, length))
    settings = {"samples": _FEWER_TAGGED, "epochs": 16, "batch_size": 32, "guess": math.log(TAGS)}
    return Task(name=name, title=title, group=group, example=example, **settings | more)


def _bytes(name: str, title: str, group: Group, **more: Any) -> Task:
    """The next byte."""
    settings = {"samples": _FEWER_WINDOWS, "epochs": 14, "batch_size": 16, "guess": math.log(256)}
    return Task(name=name, title=title, group=group, example=_WINDOW, **settings | more)


MORE_DEVELOPMENT = (
    _numbers(
        "friedman2", "small MLP on Friedman-2", "development", 4,
        build=partial(dense, 4, (20, 12), 1, False), load=generated.friedman2,
    ),
    _numbers(
        "friedman3", "deep MLP with a norm on Friedman-3", "development", 4,
        build=partial(dense, 4, (32, 24, 16), 1, True), load=generated.friedman3,
    ),
    _numbers(
        "plane", "MLP on a plane in noise", "development", PLANE,
        build=partial(dense, PLANE, (24, 12), 1, False), load=generated.plane,
    ),
    _classes(
        "forms", "MLP with a norm on quadratic forms", "development", (FORMS,),
        build=partial(dense, FORMS, (28, 20), 4, True), load=generated.forms,
    ),
    _classes(
        "bursts_mlp", "MLP on short waves", "development", (BURST,),
        build=partial(dense, BURST, (48, 32), BURSTS, False), load=generated.bursts,
    ),
    _classes(
        "gain_conv", "1-D CNN on MNIST-1D of random gain", "development", (GLYPH,),
        build=partial(Conv1d, GLYPH, (6, 10, 8), 10, False), load=generated.gained,
    ),
    _classes(
        "xor_conv", "1-D CNN on two far spikes", "development", (GLYPH,),
        build=partial(Conv1d, GLYPH, (8, 8), 4, False), load=generated.xor,
    ),
    _classes(
        "noise_conv", "1-D CNN with norms on MNIST-1D, 60 % wrong labels", "development", (GLYPH,),
        build=partial(Conv1d, GLYPH, (8, 12), 10, True), load=generated.mislabelled,
    ),
    _classes(
        "strokes_cnn", "CNN on strokes", "development", (1, STROKE, STROKE),
        build=partial(Cnn, (6, 10), False), load=generated.strokes,
    ),
    _labelled(
        "brackets_conv", "1-D CNN that labels brackets", "development", BRACKETS, LENGTH,
        build=partial(Tagger, BRACKETS, TAGS, 10, 2), load=generated.brackets,
    ),
    _labelled(
        "repeats_gpt", "transformer that labels repeats", "development", REPEATS, LINE_OF_REPEATS,
        build=partial(Gpt, REPEATS, TAGS, LINE_OF_REPEATS, Block, 12, 2), load=generated.repeats,
    ),
    _bytes(
        "bytes_parallel", "GPT of one parallel block on the standard library", "development",
        build=partial(_BYTES, ParallelBlock, 20, 1), load=partial(text, FIRST),
    ),
)  # fmt: skip

SECOND_TASKS = (
    _numbers(
        "sphere", "small MLP on distances on a sphere", "report 2", 4,
        build=partial(dense, 4, (18, 14), 1, False), load=generated.sphere,
    ),
    _numbers(
        "charges", "larger MLP on the energy of charges", "report 2", 6,
        build=partial(dense, 6, (40, 28, 16), 1, True), load=generated.charges,
    ),
    _classes(
        "cells", "MLP on three questions about numbers", "report 2", (CELLS,),
        build=partial(dense, CELLS, (24, 16), 8, False), load=generated.cells,
    ),
    _classes(
        "melodies_mlp", "MLP with a norm on melodies", "report 2", (MELODY,),
        build=partial(dense, MELODY, (40, 24), 6, True), load=generated.melodies,
    ),
    _classes(
        "melodies_conv", "1-D CNN on melodies", "report 2", (MELODY,),
        build=partial(Conv1d, MELODY, (6, 10), 6, False), load=generated.melodies,
    ),
    _classes(
        "beats_conv", "deeper 1-D CNN with norms on beats", "report 2", (BEAT,),
        build=partial(Conv1d, BEAT, (8, 12, 12), BEATS, True), load=generated.beats,
    ),
    _classes(
        "fashion_other", "CNN on other images of Fashion-MNIST", "report 2", (1, 28, 28),
        build=partial(Cnn, (6, 10, 14), True), load=partial(clothes, SECOND), epochs=15,
    ),
    _classes(
        "hands_cnn", "CNN on the hands of clocks", "report 2", (1, HANDS, HANDS),
        build=partial(Cnn, (8, 8, 12), False), load=generated.hands,
    ),
    _bytes(
        "bytes_other_wide", "GPT of one block on other files", "report 2",
        build=partial(_BYTES, Block, 24, 1), load=partial(text, SECOND),
    ),
    _bytes(
        "bytes_other_deep", "narrower GPT of two blocks on other files", "report 2",
        build=partial(_BYTES, Block, 14, 2), load=partial(text, SECOND),
    ),
    _labelled(
        "records_conv", "1-D CNN that labels records", "report 2", RECORDS, LINE_OF_RECORDS,
        build=partial(Tagger, RECORDS, TAGS, 14, 2), load=generated.records,
    ),
    _labelled(
        "records_gpt", "transformer that labels records", "report 2", RECORDS, LINE_OF_RECORDS,
        build=partial(Gpt, RECORDS, TAGS, LINE_OF_RECORDS, ParallelBlock, 14, 2),
        load=generated.records,
    ),
)  # fmt: skip

# Hosts of the third set lack something, all but two: neighbours (an MLP on lines), norms (a deep
# host on inputs of any size), a view wide enough, other positions, a second block.
THIRD_TASKS = (
    _classes(
        "hums_mlp", "MLP on hums", "report 3", (HUM,),
        build=partial(dense, HUM, (40, 24), HUMS, False), load=generated.hums,
    ),
    _classes(
        "hums_mlp_large", "larger MLP on hums", "report 3", (HUM,),
        build=partial(dense, HUM, (96, 48), HUMS, False), load=generated.hums,
    ),
    _classes(
        "charts_deep", "deep MLP on charts of any size", "report 3", (CHART,),
        build=partial(dense, CHART, (24, 24, 24, 24, 24), CHARTS, False), load=generated.charts,
    ),
    _numbers(
        "beam", "MLP on the bend of a beam", "report 3", BEAM,
        build=partial(dense, BEAM, (28, 20), 1, False), load=generated.beam,
    ),
    _classes(
        "orders_conv", "1-D CNN of a small view on orders", "report 3", (ORDER,),
        build=partial(Glimpse, 1, (12, 12, 12), 2, ORDERS), load=generated.orders,
    ),
    _classes(
        "orders_conv_large", "wider 1-D CNN of a small view on orders", "report 3", (ORDER,),
        build=partial(Glimpse, 1, (20, 24, 24), 2, ORDERS), load=generated.orders,
    ),
    _classes(
        "hums_deep", "deep 1-D CNN on hums of any loudness", "report 3", (HUM,),
        build=partial(Glimpse, 1, (10, 10, 10, 10, 10, 10), 1, HUMS), load=generated.uneven_hums,
    ),
    _classes(
        "tides_conv", "1-D CNN with norms on tides", "report 3", (TIDE,),
        build=partial(Conv1d, TIDE, (8, 10), TIDES, True), load=generated.tides,
    ),
    _classes(
        "rails_cnn", "CNN of a small view on rails", "report 3", (1, RAIL, RAIL),
        build=partial(Glimpse, 2, (8, 10), 1, RAILS), load=generated.rails,
    ),
    _classes(
        "rails_cnn_large", "wider CNN of a small view on rails", "report 3", (1, RAIL, RAIL),
        build=partial(Glimpse, 2, (12, 20), 1, RAILS), load=generated.rails,
    ),
    _classes(
        "rails_deep", "deep CNN on rails of any brightness", "report 3", (1, RAIL, RAIL),
        build=partial(Glimpse, 2, (8, 8, 8, 8, 8), 2, RAILS), load=generated.uneven_rails,
    ),
    _labelled(
        "guests_apart", "layers that see one token each, on guests", "report 3", GUESTS, TABLE,
        build=partial(Apart, GUESTS, TAGS, TABLE, 16, 2), load=generated.guests,
    ),
    _labelled(
        "guests_apart_large", "more layers that see one token each, on guests", "report 3", GUESTS,
        TABLE, build=partial(Apart, GUESTS, TAGS, TABLE, 24, 3), load=generated.guests,
    ),
    _labelled(
        "followed_gpt", "transformer of one block on followers", "report 3", GUESTS, TABLE,
        build=partial(Gpt, GUESTS, TAGS, TABLE, Block, 20, 1), load=generated.followed,
    ),
)  # fmt: skip

_ALL = (*FIRST_TASKS, *MORE_DEVELOPMENT, *SECOND_TASKS, *THIRD_TASKS)
TASKS = {task.name: task for task in _ALL}


def tasks_for(*groups: Group) -> list[str]:
    return [name for name, task in TASKS.items() if task.group in groups]
