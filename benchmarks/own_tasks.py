"""The tasks of the group `own` of docs/greenhouse.md: models as users have them, for `esper.grow`.

They were registered before any controller was trained in the greenhouse, and nothing is chosen on
them. None of their data or hosts is among those of `growing_tasks.py`.

Shapes: `M` samples, `T` positions, `L` points of a line, `H` points of an image's side.
"""

import math
from functools import partial
from pathlib import Path

import torch
from growing_generators import Draw
from growing_hosts import Block, Cnn, Conv1d, Gpt, Tagger, dense
from growing_pools import Counts, Data
from growing_tasks import Task
from torch import Tensor

from esper.leyline.streams import derive_seed

PULSE, PULSES = 48, 6  # points, classes
ECHO, DELAYS = 56, 5
RING = 18  # points of a side
WORDS, SENTENCE, VERDICTS = 14, 22, 3  # tokens, their number, tags
KEYS, TAPE = 10, 18

_LINES = {"train": 2000, "validation": 1000, "test": 3000}
_NUMBERS = {"train": 1500, "validation": 800, "test": 3000}
_SENTENCES = {"train": 1200, "validation": 500, "test": 2000}


def pulses(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """One of six fixed wiggles of nine points somewhere on a noisy line."""
    shapes = torch.randn(PULSES, 9, generator=torch.Generator().manual_seed(derive_seed("pulses")))
    labels = torch.randint(PULSES, (count,), generator=stream)
    start = torch.randint(PULSE - 9, (count,), generator=stream)
    lines = 0.4 * torch.randn(count, PULSE, generator=stream)
    return lines.scatter_add(1, start[:, None] + torch.arange(9), shapes[labels]), labels


def echoes(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """A burst and its echo; the class is how much later the echo comes."""
    labels = torch.randint(DELAYS, (count,), generator=stream)
    start = torch.randint(12, (count,), generator=stream)
    burst = torch.randn(count, 4, generator=stream)
    lines = 0.2 * torch.randn(count, ECHO, generator=stream)
    for first in (start, start + 14 + 6 * labels):
        lines = lines.scatter_add(1, first[:, None] + torch.arange(4), burst)
    return lines, labels


def rings(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [M, 1, H, H] of a circle: filled or not, small, middling or large, in noise."""
    labels = torch.randint(6, (count,), generator=stream)
    centre = (RING - 1) / 2 + 4 * (torch.rand(count, 2, generator=stream) - 0.5)
    points = torch.arange(RING, dtype=torch.float32)
    across = points[None] - centre[:, :1]
    distance = torch.hypot(across[:, :, None], (points[None] - centre[:, 1:])[:, None, :])
    radius = (2.5 + 2 * (labels % 3))[:, None, None]
    ring, disc = (distance - radius).abs() < 0.9, distance < radius
    seen = torch.where((labels < 3)[:, None, None], ring, disc).float()
    noise = 0.5 * torch.randn(count, RING, RING, generator=stream)
    return (seen + noise).unsqueeze(1), labels


def verdicts(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [M, T]; each one's tag says whether the same came never, once or more often before."""
    tokens = torch.randint(WORDS, (count, SENTENCE), generator=stream)
    same = (tokens[:, :, None] == tokens[:, None, :]).long().tril(-1)
    return tokens, same.sum(2).clamp(max=VERDICTS - 1)


def recalls(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [M, T]; each one's tag is the token as many places before as the first one says."""
    tokens = torch.randint(KEYS, (count, TAPE), generator=stream)
    back = 1 + tokens[:, :1] % 5
    place = (torch.arange(TAPE) - back).clamp(min=0)
    return tokens, tokens.gather(1, place)


def spring(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where a damped spring is, by its mass, stiffness, damping and the time, with noise."""
    x = torch.rand(count, 4, generator=stream)
    mass, stiffness, damping, time = 0.5 + x[:, 0], 2 + 10 * x[:, 1], 0.1 + x[:, 2], 4 * x[:, 3]
    swing = (stiffness / mass - (damping / (2 * mass)).square()).clamp(min=0.1).sqrt()
    where = (-damping * time / (2 * mass)).exp() * (swing * time).cos()
    return 2 * x - 1, where + 0.05 * torch.randn(count, generator=stream)


def _load(
    draw: Draw, seed: int, samples: Counts, packed: Path | None, *, numbers: bool = False
) -> Data:
    """Every split from a stream of its own; numbers to be told have mean 0 and variance 1."""
    parts = {}
    for name, count in samples.items():
        stream = torch.Generator().manual_seed(derive_seed(seed, "own", draw.__name__, name))
        parts[name] = draw(count, stream)
    if numbers:
        told = parts["train"][1]
        centre, spread = told.mean(), told.std()
        parts = {name: (x, ((y - centre) / spread).unsqueeze(1)) for name, (x, y) in parts.items()}
    return parts


OWN_TASKS = (
    Task(
        name="pulses_mlp",
        title="MLP on pulses that lie anywhere",
        group="own",
        build=partial(dense, PULSE, (40, 24), PULSES, False),
        example=partial(torch.randn, 4, PULSE),
        load=partial(_load, pulses),
        samples=_LINES,
        epochs=18,
    ),
    Task(
        name="echoes_conv",
        title="1-D CNN on the delay of an echo",
        group="own",
        build=partial(Conv1d, ECHO, (8, 10), DELAYS, False),
        example=partial(torch.randn, 4, ECHO),
        load=partial(_load, echoes),
        samples=_LINES,
        epochs=18,
    ),
    Task(
        name="rings_cnn",
        title="CNN with norms on rings and discs",
        group="own",
        build=partial(Cnn, (6, 12), True),
        example=partial(torch.randn, 4, 1, RING, RING),
        load=partial(_load, rings),
        samples=_LINES,
        epochs=18,
    ),
    Task(
        name="verdicts_conv",
        title="1-D CNN that tags what came before",
        group="own",
        build=partial(Tagger, WORDS, VERDICTS, 12, 2),
        example=partial(torch.randint, WORDS, (4, SENTENCE)),
        load=partial(_load, verdicts),
        samples=_SENTENCES,
        epochs=16,
        batch_size=32,
        guess=math.log(VERDICTS),
    ),
    Task(
        name="recalls_gpt",
        title="transformer that looks back as far as it is told",
        group="own",
        build=partial(Gpt, KEYS, KEYS, TAPE, Block, 14, 2),
        example=partial(torch.randint, KEYS, (4, TAPE)),
        load=partial(_load, recalls),
        samples=_SENTENCES,
        epochs=16,
        batch_size=32,
        guess=math.log(KEYS),
    ),
    Task(
        name="spring_mlp",
        title="MLP on a damped spring",
        group="own",
        build=partial(dense, 4, (22, 16), 1, False),
        example=partial(torch.randn, 4, 4),
        load=partial(_load, spring, numbers=True),
        samples=_NUMBERS,
        epochs=20,
        guess=1.0,
        loss="mse",
    ),
)
