"""MNIST-1D: ten one-dimensional glyphs that are padded, scaled, translated, sheared and noisy.

Implements the recipe of Greydanus & Kobak, "Scaling down deep learning with MNIST-1D" (2020).

Shapes: `M` samples, `P` points of a template, `W` points of the line on which a glyph is placed,
`L` points of the result.
"""

import tomllib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.datasets.splitting import DataSets
from esper.leyline.streams import derive_seed

CLASSES = 10
TEMPLATES = tomllib.loads(Path(__file__).with_name("mnist1d.toml").read_text())["templates"]
TEMPLATE_LENGTH = len(TEMPLATES[0])
TEMPLATE_DIVISOR = 6.0  # scales a standardised template to the noise levels of the paper
LENGTH = 40
PADDING = (36, 60)  # minimum and maximum number of trailing zeros
SHEAR = 0.75  # range of the slope that is added
NOISE_WIDTH = 2.0  # standard deviation of the noise filter, in points
FILTER_RADIUS = 4  # the noise filter is cut off after this many standard deviations
INDEPENDENT_NOISE = 0.02
SAMPLES = {"train": 4000, "validation": 2000, "test": 4000}


def mnist1d(seed: int = 0) -> DataSets:
    """Generate MNIST-1D: 4,000 samples to train, 2,000 to validate and 4,000 to test.

    Args:
        seed: Random seed. Another seed gives other samples in all three sets.

    Returns:
        `train, val, test`, each a pair of inputs [samples, 40] float32 and labels [samples] int64
        from 0 to 9.
    """
    train, validation, test = (
        generate_glyphs(count, derive_seed(seed, "data", name)) for name, count in SAMPLES.items()
    )
    return DataSets(train, validation, test)


def generate_glyphs(
    samples: int, seed: int, *, translation: int = 48, noise: float = 0.25, amplitude: float = 0.4
) -> tuple[Tensor, Tensor]:
    """Generate samples of MNIST-1D.

    The random numbers do not depend on the three settings. Sets that differ only in them are
    therefore paired sample by sample.

    Args:
        samples: Number of samples `M`.
        seed: Random seed.
        translation: Maximum circular shift of the padded line, in points.
        noise: Standard deviation of the noise outside the glyph, before the noise filter.
        amplitude: Range of the glyph's height, as a fraction.

    Returns:
        Inputs [M, L] float32 with mean 0 and variance 1 over the whole set, and labels [M] int64.
    """
    generator = torch.Generator().manual_seed(seed)
    width = TEMPLATE_LENGTH + PADDING[1]

    def draw_uniform() -> Tensor:
        return torch.rand(samples, 1, generator=generator, dtype=torch.float64)

    # Balanced labels in random order, and their glyphs with random widths.
    labels = torch.randperm(samples, generator=generator) % CLASSES
    glyphs, is_glyph = _place_glyphs(labels, draw_uniform(), width)

    # Random height, then a random circular shift.
    glyphs = glyphs * (1 + amplitude * (draw_uniform() - 0.5))
    shift = (draw_uniform() * (translation + 1)).long()
    source = (torch.arange(width) - shift) % width
    glyphs, is_glyph = glyphs.gather(1, source), is_glyph.gather(1, source)

    # Correlated noise outside the glyph, independent noise everywhere, and a random slope.
    x = torch.where(is_glyph, glyphs, noise * _correlated_noise(generator, samples, width))
    white = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    x = x + INDEPENDENT_NOISE * white
    ramp = torch.linspace(-0.5, 0.5, width, dtype=torch.float64)
    x = x - SHEAR * (draw_uniform() - 0.5) * ramp

    # Resample the line to `L` points and standardise the whole set.
    points = torch.linspace(0, width - 1, LENGTH, dtype=torch.float64)
    x = _interpolate(x, points.expand(samples, -1))
    return ((x - x.mean()) / x.std()).float(), labels


def _place_glyphs(labels: Tensor, uniform: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Stretch the template of each label over a random part of the line.

    A template and its padding fill the line together, so less padding gives a wider glyph.

    Args:
        labels: Labels [M].
        uniform: Random numbers [M, 1] from 0 to 1 that determine the padding.
        width: Points `W` of the line.

    Returns:
        Glyphs [M, W], and a mask [M, W] of the points that a glyph covers.
    """
    low, high = PADDING
    padding = (uniform * (high - low + 1)).floor() + low  # [M, 1]
    position = torch.linspace(0, 1, width, dtype=torch.float64)
    position = position * (TEMPLATE_LENGTH - 1 + padding)  # [M, W], in points of the template

    # Standardised templates [10, P] that start and end at 0.
    points = torch.tensor(TEMPLATES, dtype=torch.float64)
    centred = points - points.mean(1, keepdim=True)
    scaled = centred / centred.std(1, correction=0, keepdim=True)
    templates = (scaled - scaled[:, :1]) / TEMPLATE_DIVISOR

    padded = F.pad(templates[labels], (0, high + 1))
    return _interpolate(padded, position), position < TEMPLATE_LENGTH


def _correlated_noise(generator: torch.Generator, samples: int, width: int) -> Tensor:
    """Draw noise [M, W] and smooth it with a Gaussian filter."""
    radius = int(FILTER_RADIUS * NOISE_WIDTH + 0.5)
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64)
    kernel = torch.softmax(-0.5 * (offsets / NOISE_WIDTH).square(), 0)
    white = torch.randn(samples, width + 2 * radius, generator=generator, dtype=torch.float64)
    return F.conv1d(white.unsqueeze(1), kernel.view(1, 1, -1)).squeeze(1)


def _interpolate(line: Tensor, position: Tensor) -> Tensor:
    """Interpolate `line` [M, W] linearly at `position` [M, L], in points of the line."""
    left = position.floor().clamp(0, line.shape[1] - 2).long()
    fraction = position - left
    return line.gather(1, left) * (1 - fraction) + line.gather(1, left + 1) * fraction
