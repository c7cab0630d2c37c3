"""MNIST-1D, generated: ten one-dimensional glyphs, each padded, scaled, moved, sheared and noisy.

Written from the recipe of Greydanus & Kobak, "Scaling down deep learning with MNIST-1D" (2020).

Shapes: `M` samples, `P` points of a template, `W` points of the line on which a glyph is placed,
`L` points of the result.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.archive.files import read_toml

CLASSES = 10
TEMPLATES = read_toml(Path(__file__).with_name("mnist1d.toml"))["templates"]
TEMPLATE_LENGTH = len(TEMPLATES[0])
TEMPLATE_DIVISOR = 6.0  # brings a standardised template to the size the noise levels are meant for
LENGTH = 40
PADDING = (36, 60)  # trailing zeros, fewest and most
SHEAR = 0.75  # spread of the slope that is added
NOISE_WIDTH = 2.0  # standard deviation, in points, of the filter of correlated noise
FILTER_REACH = 4  # standard deviations after which it is cut off
INDEPENDENT_NOISE = 0.02


def generate(
    samples: int, seed: int, *, translation: int = 48, noise: float = 0.25, amplitude: float = 0.4
) -> tuple[Tensor, Tensor]:
    """Inputs [M, L] float32 with mean 0 and variance 1 over the whole set, and labels [M] int64.

    `translation` is of the padded line, at most, and circular; `noise` that outside the glyph,
    before it is filtered; `amplitude` the spread of the glyph's height, as a fraction. Draws do not
    depend on the sizes of the effects, so variants are paired.
    """
    source = torch.Generator().manual_seed(seed)
    width = TEMPLATE_LENGTH + PADDING[1]

    def uniform() -> Tensor:
        return torch.rand(samples, 1, generator=source, dtype=torch.float64)

    labels = torch.randperm(samples, generator=source) % CLASSES
    glyphs, covered = _padded_glyphs(labels, uniform(), width)
    glyphs = glyphs * (1 + amplitude * (uniform() - 0.5))
    offsets = (uniform() * (translation + 1)).long()
    origin = (torch.arange(width) - offsets) % width
    glyphs, covered = glyphs.gather(1, origin), covered.gather(1, origin)
    x = torch.where(covered, glyphs, noise * _correlated_noise(source, samples, width))
    white = torch.randn(samples, width, generator=source, dtype=torch.float64)
    x = x + INDEPENDENT_NOISE * white
    ramp = torch.linspace(-0.5, 0.5, width, dtype=torch.float64)
    x = x - SHEAR * (uniform() - 0.5) * ramp
    x = _read(x, torch.linspace(0, width - 1, LENGTH, dtype=torch.float64).expand(samples, -1))
    return ((x - x.mean()) / x.std()).float(), labels


def _padded_glyphs(labels: Tensor, draw: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Templates stretched over part of the line [M, W], and where they lie [M, W].

    A template and its padding together fill the line, so less padding means a wider glyph.
    """
    low, high = PADDING
    padding = (draw * (high - low + 1)).floor() + low  # [M, 1]
    place = torch.linspace(0, 1, width, dtype=torch.float64)
    place = place * (TEMPLATE_LENGTH - 1 + padding)  # [M, W], in points of the template
    points = torch.tensor(TEMPLATES, dtype=torch.float64)
    centred = points - points.mean(1, keepdim=True)
    scaled = centred / centred.std(1, correction=0, keepdim=True)
    glyphs = (scaled - scaled[:, :1]) / TEMPLATE_DIVISOR  # [10, P], each from 0 to 0
    flat = F.pad(glyphs[labels], (0, high + 1))
    return _read(flat, place), place < TEMPLATE_LENGTH


def _correlated_noise(source: torch.Generator, samples: int, width: int) -> Tensor:
    """Noise [M, W] whose neighbours resemble each other: white noise through a Gaussian filter."""
    reach = int(FILTER_REACH * NOISE_WIDTH + 0.5)
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    kernel = torch.softmax(-0.5 * (steps / NOISE_WIDTH).square(), 0)
    white = torch.randn(samples, width + 2 * reach, generator=source, dtype=torch.float64)
    return F.conv1d(white.unsqueeze(1), kernel.view(1, 1, -1)).squeeze(1)


def _read(line: Tensor, place: Tensor) -> Tensor:
    """The values of `line` [M, W] at `place` [M, L], a fraction of the way between its points."""
    left = place.floor().clamp(0, line.shape[1] - 2).long()
    share = place - left
    return line.gather(1, left) * (1 - share) + line.gather(1, left + 1) * share
