"""Generated data for `growing_tasks.py`: numbers, lines, images and lines of tokens.

A loader gives inputs and targets by split, for a seed. Some tasks leave nothing to gain (a plane in
noise, labels that are mostly wrong), so that harm can be seen.

Shapes: `M` samples, `T` positions, `L` points of a line.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path

import torch
from growing_pools import Counts, Data
from torch import Tensor

from esper.datasets.generated import generate_glyphs
from esper.garden.families import FAMILIES, noisy_labels
from esper.leyline.streams import derive_seed

GLYPH = 40  # points of an MNIST-1D sample
TOKENS, LENGTH, TAGS = 32, 24, 4  # of sequence labelling
JOINTS = 6
FORMS, PLANE = 10, 12  # inputs
BURST, BURSTS = 48, 6  # points, classes
STROKE = 16  # points of a side
BRACKETS, REPEATS, LINE_OF_REPEATS = 12, 16, 20  # tokens, tokens and their number
CELLS, MELODY, BEAT, BEATS, HANDS = 10, 36, 64, 8, 20
RECORDS, LINE_OF_RECORDS = 24, 28
HUM, HUMS = 48, 6  # points, classes
CHART, CHARTS = 24, 8
ORDER, ORDERS = 72, 4
RAIL, RAILS = 22, 8
TIDE, TIDES, BEAM = 56, 6, 5
GUESTS, TABLE = 12, 20  # tokens, and their number

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def _drawn(draw: Draw, seed: int, samples: Counts, packed: Path | None) -> Data:
    """Every split from a stream of its own, which the generator's name is a part of."""
    parts = {}
    for name, count in samples.items():
        stream = torch.Generator().manual_seed(derive_seed(seed, draw.__name__, name))
        parts[name] = draw(count, stream)
    return parts


def _regression(draw: Draw, seed: int, samples: Counts, packed: Path | None) -> Data:
    """[M, inputs] and [M, 1], where the targets to train on have mean 0 and variance 1."""
    parts = _drawn(draw, seed, samples, packed)
    targets = parts["train"][1]
    centre, spread = targets.mean(), targets.std()
    return {
        name: (inputs, ((values - centre) / spread).unsqueeze(1))
        for name, (inputs, values) in parts.items()
    }


# --- numbers -------------------------------------------------------------------------------------


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


def _friedman_angles(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [M, 4] of Friedman's other functions, and the two sides of a triangle [M]."""
    x = torch.rand(count, 4, generator=stream)
    first, second = 100 * x[:, 0], math.pi * (40 + 520 * x[:, 1])
    other = second * x[:, 2] - 1 / (second * (1 + 10 * x[:, 3]))
    return 2 * x - 1, first, other


def _friedman2(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Friedman's second function: the length of the longest side, with noise."""
    inputs, first, other = _friedman_angles(count, stream)
    return inputs, torch.hypot(first, other) + 50 * torch.randn(count, generator=stream)


def _friedman3(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Friedman's third function: an angle, with noise."""
    inputs, first, other = _friedman_angles(count, stream)
    return inputs, torch.atan2(other, first) + 0.05 * torch.randn(count, generator=stream)


def _plane(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """A weighted sum in as much noise: a host that learns it has nothing to gain."""
    x = 2 * torch.rand(count, PLANE, generator=stream) - 1
    noise = torch.randn(count, generator=stream)
    return x, x @ torch.linspace(-1, 1, PLANE) + noise


def _forms(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which of four fixed quadratic forms is the largest; some labels are wrong."""
    fixed = torch.randn(
        4, FORMS, FORMS, generator=torch.Generator().manual_seed(derive_seed("forms"))
    )
    x = torch.randn(count, FORMS, generator=stream)
    labels = torch.einsum("mi,kij,mj->mk", x, fixed, x).argmax(1)
    return x, _wrong(labels, 0.05, 4, stream)


def _sphere(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """How far two points of a sphere are apart, by their latitudes and longitudes."""
    x = 2 * torch.rand(count, 4, generator=stream) - 1
    (north, other_north), (east, other_east) = (x[:, :2] * math.pi / 2).T, (x[:, 2:] * math.pi).T
    level = north.cos() * other_north.cos() * (east - other_east).cos()
    return x, (north.sin() * other_north.sin() + level).clamp(-1, 1).acos()


def _charges(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """The energy of two equal charges and an opposite one, by their places in a square."""
    x = 2 * torch.rand(count, 6, generator=stream) - 1
    places = x.view(count, 3, 2)
    pairs = ((0, 1, 1.0), (0, 2, -1.0), (1, 2, -1.0))
    far = [(places[:, one] - places[:, other]).norm(dim=1) for one, other, _ in pairs]
    energies = [sign / (0.3 + gap) for gap, (_, _, sign) in zip(far, pairs, strict=True)]
    return x, torch.stack(energies).sum(0) + 0.05 * torch.randn(count, generator=stream)


def _cells(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three questions about ten numbers, whose answers make eight classes; some are wrong."""
    x = 2 * torch.rand(count, CELLS, generator=stream) - 1
    signs, sums = x[:, 0] * x[:, 1] > 0, x[:, 2] + x[:, 3] > x[:, 4]
    labels = 4 * signs.long() + 2 * sums.long() + (x[:, 5:8].amax(1) > 0.6).long()
    return x, _wrong(labels, 0.05, 8, stream)


def _charts(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which of eight fixed charts has most to do with these numbers, however large they are?"""
    fixed = torch.randn(
        CHARTS, CHART, generator=torch.Generator().manual_seed(derive_seed("charts"))
    )
    labels = torch.randint(CHARTS, (count,), generator=stream)
    x = fixed[labels] + 1.3 * torch.randn(count, CHART, generator=stream)
    return x * (4 * torch.rand(count, 1, generator=stream) - 2).exp(), labels


def _beam(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """How far a beam bends, by its length, load, width, height and where it is held; with noise."""
    x = 2 * torch.rand(count, BEAM, generator=stream) - 1
    long, load, wide, high, held = (1 + 0.4 * x).T
    bent = load * long**3 / (wide * high**3) * (1 + 0.8 * (6 * held * long).sin())
    return x, bent.log() + 0.05 * torch.randn(count, generator=stream)


def _wrong(labels: Tensor, share: float, classes: int, stream: torch.Generator) -> Tensor:
    return noisy_labels(labels, share, classes, stream.initial_seed())


# --- lines ---------------------------------------------------------------------------------------


def glyphs(seed: int, samples: Counts, packed: Path | None) -> Data:
    """MNIST-1D: [M, 40] and [M]."""
    return {
        name: generate_glyphs(count, derive_seed(seed, "data", name))
        for name, count in samples.items()
    }


def _family(
    name: str, gain: float, noise: float, seed: int, samples: Counts, packed: Path | None
) -> Data:
    """A family of the garden, [M, 40] and [M]; a share of the labels is noise."""
    family, parts = FAMILIES[name], {}
    parameters = dict(family.defaults) | ({"gain": gain} if "gain" in family.defaults else {})
    for split, count in samples.items():
        own = derive_seed(seed, "growing", name, split)
        inputs, labels = family.generate(count, own, parameters)
        parts[split] = (inputs, noisy_labels(labels, noise, family.classes, own))
    return parts


def _bursts(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """A short wave somewhere on the line, of any phase, in noise: which of six lengths has it?"""
    labels = torch.randint(BURSTS, (count,), generator=stream)
    middles = 8 + (BURST - 16) * torch.rand(count, 1, generator=stream)
    phases = 2 * math.pi * torch.rand(count, 1, generator=stream)
    away = torch.arange(BURST) - middles  # [M, L]
    waves = (2 * math.pi * (1 + 0.4 * labels[:, None]) / 16 * away + phases).cos()
    lines = waves * (-((away / 5) ** 2)).exp()
    lines += 0.35 * torch.randn(count, BURST, generator=stream)
    return lines / lines.std(), labels


def _melodies(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three bumps, low, middle and high, somewhere on the line: which of six orders have they?"""
    orders = torch.tensor(list(permutations((0.5, 1.0, 1.5))))  # [6, 3]
    labels = torch.randint(len(orders), (count,), generator=stream)
    starts = 3 + 14 * torch.rand(count, 1, generator=stream)
    lines = 0.2 * torch.randn(count, MELODY, generator=stream)
    for number in range(3):
        away = torch.arange(MELODY) - starts - 8 * number
        lines += orders[labels, number, None] * (-(away**2) / 4).exp()
    return lines / lines.std(), labels


def _beats(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two tones at once, in noise: which of eight distances lies between them?"""
    labels = torch.randint(BEATS, (count,), generator=stream)
    low = 5 + 5 * torch.rand(count, 1, generator=stream)
    phases = 2 * math.pi * torch.rand(2, count, 1, generator=stream)
    turns = 2 * math.pi * torch.arange(BEAT) / BEAT
    high = low + 0.8 * (1 + labels[:, None])
    lines = (low * turns + phases[0]).sin() + (high * turns + phases[1]).sin()
    lines = lines + 0.3 * torch.randn(count, BEAT, generator=stream)
    return lines / lines.std(), labels


def _hums(loud: float, count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise that a machine hums at one of six pitches, from any moment on: at which one? Some hum
    up to exp(±loud) times louder than others.
    """
    labels = torch.randint(HUMS, (count,), generator=stream)
    pitch = 2 * math.pi * (0.08 + 0.035 * labels)
    noise = torch.randn(count, HUM + 30, generator=stream)
    lines = torch.zeros_like(noise)
    for now in range(2, HUM + 30):
        held = 2 * 0.92 * pitch.cos() * lines[:, now - 1] - 0.92**2 * lines[:, now - 2]
        lines[:, now] = held + noise[:, now]
    lines = lines[:, 30:] / lines[:, 30:].std(1, keepdim=True)
    lines += 0.5 * torch.randn(count, HUM, generator=stream)
    return lines * (loud * (2 * torch.rand(count, 1, generator=stream) - 1)).exp(), labels


def _even_hums(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    return _hums(0.0, count, stream)


def _uneven_hums(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    return _hums(2.0, count, stream)


def _orders(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """A peak and a dip far from each other and from the ends: which comes first? Is the second one
    the higher one?
    """
    labels = torch.randint(ORDERS, (count,), generator=stream)
    first = 16 + 10 * torch.rand(count, 1, generator=stream)
    second = first + 20 + 10 * torch.rand(count, 1, generator=stream)
    sign, taller = 1.0 - 2.0 * (labels % 2)[:, None], (labels // 2)[:, None]
    lines = 0.25 * torch.randn(count, ORDER, generator=stream)
    for middle, way, tall in ((first, sign, 1 - taller), (second, -sign, taller)):
        lines += way * (1.2 + 0.8 * tall) * (-((torch.arange(ORDER) - middle) ** 2) / 4).exp()
    return lines / lines.std(), labels


def _tides(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """A slow wave whose height swells: how often on the line, of six ways?"""
    labels = torch.randint(TIDES, (count,), generator=stream)
    turns = torch.arange(TIDE) / TIDE
    phases = 2 * math.pi * torch.rand(2, count, 1, generator=stream)
    swell = 1 + 0.8 * (2 * math.pi * (1 + 0.5 * labels[:, None]) * turns + phases[0]).sin()
    lines = swell * (2 * math.pi * 9 * turns + phases[1]).sin()
    lines = lines + 0.5 * torch.randn(count, TIDE, generator=stream)
    return lines / lines.std(), labels


# --- images --------------------------------------------------------------------------------------


def _segments(ends: Tensor, side: int) -> Tensor:
    """[M, side, side]: one line each, from `ends` [M, 2, 2] of rows and columns."""
    grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1)
    start, along = ends[:, 0, None, None], (ends[:, 1] - ends[:, 0])[:, None, None]
    away = grid - start  # [M, side, side, 2]
    share = ((away * along).sum(-1) / along.square().sum(-1).clamp(min=1e-6)).clamp(0, 1)
    return (-(away - share.unsqueeze(-1) * along).square().sum(-1)).exp()


def _hand(angles: Tensor, lengths: Tensor | float) -> Tensor:
    """[M, 2]"""
    return torch.stack((angles.sin(), angles.cos()), 1) * lengths


def _strokes(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """A short or a long stroke somewhere, of one of five directions: ten classes."""
    labels = torch.randint(10, (count,), generator=stream)
    turned = labels % 5 + 0.5 * torch.rand(count, generator=stream)
    half = _hand(math.pi * turned / 5, (2 + 1.5 * (labels // 5))[:, None])
    middles = 4 + (STROKE - 8) * torch.rand(count, 2, generator=stream)
    images = _segments(torch.stack((middles - half, middles + half), 1), STROKE)
    images += 0.3 * torch.randn(images.shape, generator=stream)
    return (images / images.std()).unsqueeze(1), labels


def _hands(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """A long and a short hand of a clock: which of ten angles lies between them?"""
    labels = torch.randint(10, (count,), generator=stream)
    first = 2 * math.pi * torch.rand(count, generator=stream)
    second = first + 2 * math.pi * (labels + torch.rand(count, generator=stream)) / 10
    middles = HANDS / 2 - 1.5 + 2 * torch.rand(count, 2, generator=stream)
    images = 0.2 * torch.randn(count, HANDS, HANDS, generator=stream)
    for angles, length in ((first, 8.0), (second, 4.5)):
        ends = torch.stack((middles, middles + _hand(angles, length)), 1)
        images += _segments(ends, HANDS)
    return (images / images.std()).unsqueeze(1), labels


def _rails(dark: float, count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two lines side by side somewhere, of any direction: which of eight distances lies between
    them? Some images are up to exp(±dark) times brighter than others.
    """
    labels = torch.randint(RAILS, (count,), generator=stream)
    middles = RAIL / 2 - 2 + 4 * torch.rand(count, 2, generator=stream)
    angles = math.pi * torch.rand(count, generator=stream)
    along, apart = _hand(angles, 5.0), _hand(angles + math.pi / 2, (1.5 + 0.6 * labels)[:, None])
    images = 0.3 * torch.randn(count, RAIL, RAIL, generator=stream)
    for middle in (middles - apart, middles + apart):
        images += _segments(torch.stack((middle - along, middle + along), 1), RAIL)
    bright = (dark * (2 * torch.rand(count, 1, 1, generator=stream) - 1)).exp()
    return (images / images.std() * bright).unsqueeze(1), labels


def _even_rails(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    return _rails(0.0, count, stream)


def _uneven_rails(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    return _rails(2.0, count, stream)


# --- lines of tokens -----------------------------------------------------------------------------


def tagged(seed: int, samples: Counts, packed: Path | None) -> Data:
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


def _brackets(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """How deep in brackets a token is, up to three: 0 opens one, 1 closes one."""
    kinds = torch.tensor([0.3, 0.3] + [0.4 / (BRACKETS - 2)] * (BRACKETS - 2))
    drawn = torch.multinomial(kinds, count * LENGTH, replacement=True, generator=stream)
    tokens = drawn.view(count, LENGTH)
    depth, depths = torch.zeros(count, dtype=torch.long), []
    for column in tokens.T:
        depth = (depth + (column == 0).long() - (column == 1).long()).clamp(min=0)
        depths.append(depth.clamp(max=TAGS - 1))
    return tokens, torch.stack(depths, 1)


def _repeats(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Is it the same as three before? Was it seen an odd number of times before?"""
    tokens = torch.randint(REPEATS, (count, LINE_OF_REPEATS), generator=stream)
    same = tokens[:, :, None] == tokens[:, None]  # [M, T, T]
    odd = same.tril(-1).sum(2) % 2
    again = torch.zeros_like(tokens)
    again[:, 3:] = (tokens[:, 3:] == tokens[:, :-3]).long()
    return tokens, 2 * again + odd


def _records(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Is it more than all before it? Are it and the one two before both even, or both odd?"""
    tokens = torch.randint(RECORDS, (count, LINE_OF_RECORDS), generator=stream)
    most = tokens.cummax(1).values
    record = torch.ones_like(tokens)
    record[:, 1:] = (tokens[:, 1:] > most[:, :-1]).long()
    alike = torch.zeros_like(tokens)
    alike[:, 2:] = (tokens[:, 2:] % 2 == tokens[:, :-2] % 2).long()
    return tokens, 2 * record + alike


def _guests(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Is it the same as the first of its line? Is it more than the one before it?"""
    tokens = torch.randint(GUESTS, (count, TABLE), generator=stream)
    same = torch.rand(count, TABLE, generator=stream) < 0.3
    tokens = torch.where(same, tokens[:, :1], tokens)
    more = torch.zeros_like(tokens)
    more[:, 1:] = (tokens[:, 1:] > tokens[:, :-1]).long()
    return tokens, 2 * (tokens == tokens[:, :1]).long() + more


def _followed(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """What followed when it was seen the last time, in four kinds: kind 0 if it never was."""
    tokens = torch.randint(GUESTS, (count, TABLE), generator=stream)
    last = torch.full((count, GUESTS), -1)
    tags = []
    for now in range(TABLE):
        when = last.gather(1, tokens[:, now : now + 1])  # [M, 1]
        then = tokens.gather(1, (when + 1).clamp(max=TABLE - 1)).squeeze(1)
        tags.append(torch.where(when.squeeze(1) < 0, 0, then % TAGS))
        last.scatter_(1, tokens[:, now : now + 1], now)
    return tokens, torch.stack(tags, 1)


# --- loaders, by what they give ------------------------------------------------------------------

friedman1, arm = partial(_regression, _friedman), partial(_regression, _arm)
friedman2, friedman3 = partial(_regression, _friedman2), partial(_regression, _friedman3)
plane, forms = partial(_regression, _plane), partial(_drawn, _forms)
gained, xor = partial(_family, "gain", 1.5, 0.0), partial(_family, "xor", 0.0, 0.0)
mislabelled = partial(_family, "mnist1d", 0.0, 0.6)
bursts, strokes = partial(_drawn, _bursts), partial(_drawn, _strokes)
brackets, repeats = partial(_drawn, _brackets), partial(_drawn, _repeats)
sphere, charges = partial(_regression, _sphere), partial(_regression, _charges)
cells, melodies, beats = (partial(_drawn, draw) for draw in (_cells, _melodies, _beats))
hands, records = partial(_drawn, _hands), partial(_drawn, _records)
charts, beam = partial(_drawn, _charts), partial(_regression, _beam)
hums, uneven_hums = partial(_drawn, _even_hums), partial(_drawn, _uneven_hums)
orders, tides = partial(_drawn, _orders), partial(_drawn, _tides)
rails, uneven_rails = partial(_drawn, _even_rails), partial(_drawn, _uneven_rails)
guests, followed = partial(_drawn, _guests), partial(_drawn, _followed)
