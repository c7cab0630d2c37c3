"""Families of data: generators of labelled lines that differ in what a host lacks to read them.

Every line has 40 points, so one host can meet any of them. Draws do not depend on the size of an
effect: two strengths of gain or noise act on the same samples.

Shapes: `M` samples, `L` points of a line.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.errors import DataError, register, require_known
from esper.leyline.streams import derive_seed
from esper.tolaria.data.mnist1d import CLASSES, Mnist1dConfig, generate

LENGTH = 40
HALF, QUARTER = LENGTH // 2, LENGTH // 4
XOR_CLASSES = 4
PARAMETERS = ("translation", "noise", "amplitude", "gain", "order")  # that a family may have

Parameters = Mapping[str, float]
Generate = Callable[[int, int, Parameters], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class DataFamily:
    """A generator: (samples, seed, parameters) to inputs [M, L] float32 and labels [M] int64."""

    summary: str
    generate: Generate
    defaults: Parameters
    classes: int = CLASSES  # that occur; heads have ten logits whatever the family


def glyphs(samples: int, seed: int, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """MNIST-1D, with mean 0 and variance 1 over the whole set."""
    return generate(
        Mnist1dConfig(
            samples=samples,
            seed=seed,
            length=LENGTH,
            max_translation=int(parameters["translation"]),
            correlated_noise=parameters["noise"],
            scale=parameters["amplitude"],
        )
    )


def gained_glyphs(samples: int, seed: int, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """Glyphs, each sample times its own gain, log-uniform from exp(-gain) to exp(gain)."""
    inputs, labels = glyphs(samples, seed, parameters)
    source = torch.Generator().manual_seed(derive_seed(seed, "gain"))
    gains = (parameters["gain"] * (2 * torch.rand(samples, 1, generator=source) - 1)).exp()
    return inputs * gains, labels


def shuffled_glyphs(samples: int, seed: int, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """Glyphs with their points in another order, the same in every sample; `order` names it."""
    inputs, labels = glyphs(samples, seed, parameters)
    source = torch.Generator().manual_seed(derive_seed("order", int(parameters["order"])))
    return inputs[:, torch.randperm(LENGTH, generator=source)].contiguous(), labels


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


def noisy_labels(labels: Tensor, share: float, classes: int, seed: int) -> Tensor:
    """A share of the labels drawn anew from all classes (by luck, some as they were)."""
    source = torch.Generator().manual_seed(derive_seed(seed, "label noise"))
    hit = torch.rand(len(labels), generator=source) < share
    drawn = torch.randint(classes, labels.shape, generator=source)
    return torch.where(hit, drawn, labels)


_GLYPHS: Parameters = {"translation": 48, "noise": 0.25, "amplitude": 0.4}

FAMILIES: dict[str, DataFamily] = {
    "mnist1d": DataFamily(
        summary="ten glyphs on a line, moved, scaled and noisy (MNIST-1D)",
        generate=glyphs,
        defaults=_GLYPHS,
    ),
    "gain": DataFamily(
        summary="the same glyphs, every sample multiplied by its own random gain",
        generate=gained_glyphs,
        defaults={**_GLYPHS, "gain": 2.0},
    ),
    "xor": DataFamily(
        summary="a signed spike in each half; the class compares their signs and places",
        generate=spikes,
        defaults={"noise": 0.1},
        classes=XOR_CLASSES,
    ),
    "shuffled": DataFamily(
        summary="the same glyphs, their points in another order",
        generate=shuffled_glyphs,
        defaults={**_GLYPHS, "order": 0},
    ),
    "fixed": DataFamily(
        summary="the same glyphs, always at one place",
        generate=glyphs,
        defaults={**_GLYPHS, "translation": 0},
    ),
}


def register_family(name: str, family: DataFamily) -> DataFamily:
    """Make a family of yours known by its name, so that sources can be of it."""
    for parameter in family.defaults:
        require_known("parameter of a family", parameter, PARAMETERS)
    inputs, labels = family.generate(2, 0, family.defaults)
    if inputs.shape != (2, LENGTH) or labels.shape != (2,) or family.classes > CLASSES:
        raise DataError(
            f"Family {name!r} does not fit the garden's hosts",
            given=f"inputs {list(inputs.shape)}, labels {list(labels.shape)} of two samples, "
            f"{family.classes} classes",
            valid=f"[2, {LENGTH}] and [2], at most {CLASSES} classes",
        )
    return register("Family", name, family, FAMILIES)
