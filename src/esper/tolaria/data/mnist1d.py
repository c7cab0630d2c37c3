"""MNIST-1D, generated: ten one-dimensional glyphs, each padded, scaled, moved, sheared and noisy.

Written from the recipe of Greydanus & Kobak, "Scaling down deep learning with MNIST-1D" (2020).

Shapes: `M` samples, `P` points of a template, `W` points of the line on which a glyph is placed,
`L` points of the result.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.settings import Count, NotNegative, Positive, Range, Whole, require_settings

CLASSES = 10
TEMPLATES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
TEMPLATE_LENGTH = len(TEMPLATES[0])
TEMPLATE_DIVISOR = 6.0  # brings a standardised template to the size the noise levels are meant for
FILTER_REACH = 4  # standard deviations after which the noise filter is cut off


@dataclass(frozen=True, kw_only=True)
class Mnist1dConfig:
    """What to generate. Draws do not depend on the sizes of the effects, so variants are paired."""

    samples: Count = 4000
    seed: int = 0
    length: Annotated[int, Range(2, whole=True)] = 40
    padding: tuple[int, int] = (36, 60)  # trailing zeros, fewest and most
    scale: NotNegative = 0.4  # spread of the amplitude, as a fraction
    max_translation: Whole = 48  # of the padded line, circular
    shear: NotNegative = 0.75  # spread of the slope that is added
    correlated_noise: NotNegative = 0.25  # outside the glyph, before it is filtered
    noise_width: Positive = 2.0  # standard deviation of the filter, in points
    independent_noise: NotNegative = 0.02

    def __post_init__(self) -> None:
        whose = "Impossible MNIST-1D configuration:"
        require_settings(self, whose, error=DataError)
        low, high = self.padding
        if not 0 <= low <= high:
            raise DataError(f"{whose} 'padding'", given=self.padding, valid="0 <= fewest <= most")

    @property
    def line(self) -> int:
        """Points of the line on which a glyph is placed (`W`)."""
        return TEMPLATE_LENGTH + self.padding[1]


def generate(config: Mnist1dConfig) -> tuple[Tensor, Tensor]:
    """Inputs [M, L] float32 with mean 0 and variance 1 over the whole set, and labels [M] int64."""
    source = torch.Generator().manual_seed(config.seed)
    count, width = config.samples, config.line

    def uniform() -> Tensor:
        return torch.rand(count, 1, generator=source, dtype=torch.float64)

    labels = torch.randperm(count, generator=source) % CLASSES
    glyphs, covered = _padded_glyphs(labels, uniform(), config)
    glyphs = glyphs * (1 + config.scale * (uniform() - 0.5))
    offsets = (uniform() * (config.max_translation + 1)).long()
    origin = (torch.arange(width) - offsets) % width
    glyphs, covered = glyphs.gather(1, origin), covered.gather(1, origin)
    x = torch.where(covered, glyphs, _correlated_noise(source, config))
    noise = torch.randn(count, width, generator=source, dtype=torch.float64)
    x = x + config.independent_noise * noise
    ramp = torch.linspace(-0.5, 0.5, width, dtype=torch.float64)
    x = x - config.shear * (uniform() - 0.5) * ramp
    x = _read(x, torch.linspace(0, width - 1, config.length, dtype=torch.float64).expand(count, -1))
    return ((x - x.mean()) / x.std()).float(), labels


def _padded_glyphs(labels: Tensor, draw: Tensor, config: Mnist1dConfig) -> tuple[Tensor, Tensor]:
    """Templates stretched over part of the line [M, W], and where they lie [M, W].

    A template and its padding together fill the line, so less padding means a wider glyph.
    """
    low, high = config.padding
    padding = (draw * (high - low + 1)).floor() + low  # [M, 1]
    place = torch.linspace(0, 1, config.line, dtype=torch.float64)
    place = place * (TEMPLATE_LENGTH - 1 + padding)  # [M, W], in points of the template
    points = torch.tensor(TEMPLATES, dtype=torch.float64)
    centred = points - points.mean(1, keepdim=True)
    scaled = centred / centred.std(1, correction=0, keepdim=True)
    glyphs = (scaled - scaled[:, :1]) / TEMPLATE_DIVISOR  # [10, P], each from 0 to 0
    flat = F.pad(glyphs[labels], (0, high + 1))
    return _read(flat, place), place < TEMPLATE_LENGTH


def _correlated_noise(source: torch.Generator, config: Mnist1dConfig) -> Tensor:
    """Noise [M, W] whose neighbours resemble each other: white noise through a Gaussian filter."""
    reach = int(FILTER_REACH * config.noise_width + 0.5)
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    kernel = torch.softmax(-0.5 * (steps / config.noise_width).square(), 0)
    size = (config.samples, config.line + 2 * reach)
    white = torch.randn(size, generator=source, dtype=torch.float64)
    return config.correlated_noise * F.conv1d(white.unsqueeze(1), kernel.view(1, 1, -1)).squeeze(1)


def _read(line: Tensor, place: Tensor) -> Tensor:
    """The values of `line` [M, W] at `place` [M, L], a fraction of the way between its points."""
    left = place.floor().clamp(0, line.shape[1] - 2).long()
    share = place - left
    return line.gather(1, left) * (1 - share) + line.gather(1, left + 1) * share
