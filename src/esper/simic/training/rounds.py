"""What a round came to and how long its phases took, for whoever watches.

Shapes: `N` environments of this process.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from esper.leyline.results import PPOUpdateMetrics
from esper.nissa import AnomalyFound
from esper.simic.training.selection import Judgement


@dataclass(frozen=True)
class RoundReport:
    """What a round came to, for progress displays."""

    round: int
    returns: Tensor  # [N] of this process's episodes
    metrics: PPOUpdateMetrics
    seconds: dict[str, float]  # by phase
    stages: dict[str, list[int]]  # by slot: how many environments ended in each stage
    judgement: Judgement | None
    anomalies: tuple[AnomalyFound, ...]
    best: float | None  # score by evaluation


Listener = Callable[[RoundReport], None]
Telling = Callable[[str, int, int], None]


@dataclass
class Clock:
    """Seconds by phase."""

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - began
