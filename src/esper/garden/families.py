"""Families of data: generators of labelled lines that differ in what a host lacks to read them.

Every line has 40 points, so one host can meet any of them. Draws do not depend on the size of an
effect: two strengths of gain or noise act on the same samples. Some come with any number of classes
from 2 to 20.

Shapes: `M` samples, `L` points of a line, `K` classes, `E` events on a line.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.archive.files import read_toml
from esper.datasets.generated import CLASSES, LENGTH, generate_glyphs
from esper.leyline.errors import DataError, register, require_known
from esper.leyline.streams import derive_seed

HALF, QUARTER = LENGTH // 2, LENGTH // 4
XOR_CLASSES = 4
MOST_CLASSES = 20
EVENTS = 4  # kinds of them, whose order can be told
# That a family may have.
PARAMETERS = ("translation", "noise", "amplitude", "gain", "order", "width", "spread")

Parameters = Mapping[str, float]
Generate = Callable[[int, int, Parameters], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class DataFamily:
    """A generator: (samples, seed, parameters) to inputs [M, L] float32 and labels [M] int64."""

    summary: str
    generate: Generate
    defaults: Parameters
    classes: int = CLASSES  # that occur; the garden's heads have ten logits whatever the family
    any_classes: bool = False  # or from 2 to 20, as the parameter `classes` says


def glyphs(samples: int, seed: int, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """MNIST-1D, with mean 0 and variance 1 over the whole set.

    With a `gain` each sample has its own, log-uniform from exp(-gain) to exp(gain); with an `order`
    the points are in that one, the same in every sample.
    """
    effects: dict[str, Any] = {n: parameters[n] for n in ("translation", "noise", "amplitude")}
    inputs, labels = generate_glyphs(samples, seed, **effects)
    if "gain" in parameters:
        source = torch.Generator().manual_seed(derive_seed(seed, "gain"))
        drawn = 2 * torch.rand(samples, 1, generator=source) - 1
        inputs = inputs * (parameters["gain"] * drawn).exp()
    if "order" in parameters:
        source = torch.Generator().manual_seed(derive_seed("order", int(parameters["order"])))
        inputs = inputs[:, torch.randperm(LENGTH, generator=source)].contiguous()
    return inputs, labels


def spikes(samples: int, seed: int, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """A signed spike in each half of the line, in noise; variance 1 over the whole set.

    The class is 2 × (do the signs differ?) + (do the spikes lie in different quarters of their
    halves?): neither half alone says anything about it.
    """
    source = torch.Generator().manual_seed(seed)

    def bit() -> Tensor:
        return torch.randint(2, (samples,), generator=source)

    labels = torch.randperm(samples, generator=source) % XOR_CLASSES
    negative, outer = bit(), bit()  # of the left spike; the label decides the right one's
    lines = torch.zeros(samples, LENGTH)
    for side in range(2):
        within = torch.randint(QUARTER, (samples,), generator=source)
        place = side * HALF + QUARTER * (outer ^ (side * (labels % 2))) + within
        sign = 1 - 2 * (negative ^ (side * (labels // 2)))
        lines.scatter_(1, place[:, None], sign[:, None].float())
    lines += parameters["noise"] * torch.randn(samples, LENGTH, generator=source)
    return lines / lines.std(), labels


# --- those of the greenhouse: any number of classes -------------------------------------------


def _bumps(places: Tensor, width: float) -> Tensor:
    """[..., L]: a bump of height 1 around each of these places [...]."""
    return (-0.5 * ((torch.arange(LENGTH) - places[..., None]) / width).square()).exp()


def _drawn(
    lines: Callable[..., Tensor], samples: int, seed: int, parameters: Parameters
) -> tuple[Tensor, Tensor]:
    """Lines for as many labels of each class, in noise; variance 1 over the whole set."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.randperm(samples, generator=source) % int(parameters["classes"])
    found = lines(labels, source, parameters)
    found = found + parameters["noise"] * torch.randn(samples, LENGTH, generator=source)
    return found / found.std(), labels


def _curves(parameters: Parameters) -> Tensor:
    """[K, HALF]: a smooth curve for each class; `order` names the set of them."""
    source = torch.Generator().manual_seed(derive_seed("curves", int(parameters["order"])))
    rough = torch.randn(MOST_CLASSES, 1, HALF // 4 + 1, generator=source)
    smooth = torch.nn.functional.interpolate(rough, HALF, mode="linear")[:, 0]
    return (smooth / smooth.std(1, keepdim=True))[: int(parameters["classes"])]


def curves(labels: Tensor, source: torch.Generator, parameters: Parameters) -> Tensor:
    """The class's curve, over half of the line, moved and scaled."""
    shape = _curves(parameters)[labels]
    place = torch.rand(len(labels), 1, generator=source) * (parameters["translation"] + 1)
    height = 1 + parameters["amplitude"] * torch.randn(len(labels), 1, generator=source)
    index = torch.arange(LENGTH) - place.long().clamp(max=HALF)
    inside = (index >= 0) & (index < HALF)
    return shape.gather(1, index.clamp(0, HALF - 1)) * inside * height


def tones(labels: Tensor, source: torch.Generator, parameters: Parameters) -> Tensor:
    """A wave in any phase; the class is its frequency, from 1.5 to 1.5 + `spread` a line."""
    most = max(int(parameters["classes"]) - 1, 1)
    cycles = 1.5 + parameters["spread"] * labels / most
    phase = torch.rand(len(labels), 1, generator=source)
    return (2 * math.pi * (cycles[:, None] * torch.arange(LENGTH) / LENGTH + phase)).sin()


def bumps(labels: Tensor, source: torch.Generator, parameters: Parameters, wraps: bool) -> Tensor:
    """Bumps apart from each other; the class is their number, or what it `wraps` around to."""
    count = labels
    if wraps:
        turns = (HALF - 1 - labels) // int(parameters["classes"]) + 1
        drawn = (torch.rand(len(labels), generator=source) * turns).long()
        count = labels + int(parameters["classes"]) * drawn.clamp(max=3)  # few, or it is a texture
    rank = torch.rand(len(labels), HALF, generator=source).argsort(1).argsort(1)
    height = 1 + parameters["amplitude"] * torch.randn(len(labels), HALF, generator=source)
    chosen = (rank < count[:, None]) * height  # [M, HALF]
    return chosen @ _bumps(2.0 * torch.arange(HALF), parameters["width"])


def halves(labels: Tensor, source: torch.Generator, parameters: Parameters) -> Tensor:
    """A curve in each half; the class says how many further in its set the second one is."""
    first = torch.randint(int(parameters["classes"]), labels.shape, generator=source)
    shapes = _curves(parameters)
    return torch.cat([shapes[first], shapes[(first + labels) % len(shapes)]], 1)


def events(labels: Tensor, source: torch.Generator, parameters: Parameters) -> Tensor:
    """Four events, somewhere in four stretches of the line; the class is their order."""
    orders = torch.tensor(list(permutations(range(EVENTS))))[labels]  # [M, E] by stretch
    jitter = torch.rand(len(labels), EVENTS, generator=source) * (QUARTER - 4) + 2
    where, width = torch.arange(EVENTS) * QUARTER + jitter, parameters["width"]
    narrow = _bumps(where, width)  # [M, E, L]
    wide, edge = _bumps(where, 2 * width), narrow.diff(prepend=narrow[..., :1])
    kinds = torch.stack([narrow, -narrow, wide, edge])
    return kinds[orders, torch.arange(len(labels))[:, None], torch.arange(EVENTS)].sum(1)


def noisy_labels(labels: Tensor, share: float, classes: int, seed: int) -> Tensor:
    """A share of the labels drawn anew from all classes (by luck, some as they were)."""
    source = torch.Generator().manual_seed(derive_seed(seed, "label noise"))
    hit = torch.rand(len(labels), generator=source) < share
    drawn = torch.randint(classes, labels.shape, generator=source)
    return torch.where(hit, drawn, labels)


_LINES: Mapping[str, Callable[..., Tensor]] = {
    "curves": curves,
    "tones": tones,
    "counts": partial(bumps, wraps=False),
    "parity": partial(bumps, wraps=True),
    "halves": halves,
    "events": events,
}
_GENERATE: dict[str, Generate] = {"glyphs": glyphs, "spikes": spikes}
_GENERATE |= {name: partial(_drawn, lines) for name, lines in _LINES.items()}
FAMILIES: dict[str, DataFamily] = {
    name: DataFamily(generate=_GENERATE[given.pop("lines")], **given)
    for name, given in read_toml(Path(__file__).parent / "data" / "families.toml").items()
}


def register_family(name: str, family: DataFamily) -> DataFamily:
    """Make a family of yours known by its name, so that sources can be of it."""
    for parameter in family.defaults:
        require_known("parameter of a family", parameter, PARAMETERS)
    inputs, labels = family.generate(2, 0, {**family.defaults, "classes": family.classes})
    if inputs.shape != (2, LENGTH) or labels.shape != (2,) or family.classes > CLASSES:
        raise DataError(
            f"Family {name!r} does not fit the garden's hosts",
            given=f"inputs {list(inputs.shape)}, labels {list(labels.shape)} of two samples, "
            f"{family.classes} classes",
            valid=f"[2, {LENGTH}] and [2], at most {CLASSES} classes",
        )
    return register("Family", name, family, FAMILIES)
