"""Work that ranks share: who does which part, so that all are through at the same time."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from esper.distributed import SINGLE_PROCESS

T = TypeVar("T")
TURN = 4  # parts of every rank between two exchanges: what a lost rank may cost at most


class Ranks(Protocol):
    """Processes that share work; `esper.distributed.Processes` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all processes in the order of ranks, in every process."""
        ...


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """By rank, the places of its parts: the longest first, each to whoever is through first."""
    loads, dealt = [0.0] * ranks, [list[int]() for _ in range(ranks)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        rank = min(range(ranks), key=lambda rank: (loads[rank], len(dealt[rank])))
        loads[rank] += costs[place]
        dealt[rank].append(place)
    return dealt


@dataclass
class Costs:
    """What parts of each kind take: in proportion to an estimate, and to what was measured."""

    known: dict[str, tuple[float, float]] = field(default_factory=dict)  # estimates, seconds

    def learn(self, kind: str, estimate: float, seconds: float) -> None:
        before = self.known.get(kind, (0.0, 0.0))
        self.known[kind] = before[0] + estimate, before[1] + seconds

    def __call__(self, kind: str, estimate: float) -> float:
        """Of kinds that were never measured, as much as of the others."""
        found = [self.known[kind]] if kind in self.known else list(self.known.values())
        estimated, measured = (sum(each) for each in zip(*found, strict=True)) if found else (1, 1)
        return estimate * measured / max(estimated, 1e-30)


def in_turns(
    do: Callable[[int], T],
    work: Sequence[tuple[str, float]],
    *,
    costs: Costs,
    ranks: Ranks = SINGLE_PROCESS,
) -> Iterator[list[tuple[int, T]]]:
    """Do all parts, each in one of the ranks; what came of them, the same for all, in their order.

    Yields some parts at a time, with their numbers. `work` is the kind of each part, and its cost
    beside others of the kind.
    """
    length = 1 if ranks.size == 1 else TURN * ranks.size
    for first in range(0, len(work), length):
        turn = range(first, min(first + length, len(work)))
        expected = [costs(*work[number]) for number in turn]
        own = [turn[place] for place in deal(expected, ranks.size)[ranks.rank]]
        done: dict[int, tuple[T, float]] = {}
        for number in own:
            began = time.perf_counter()
            done[number] = do(number), time.perf_counter() - began
        results: dict[int, tuple[T, float]] = {}
        for rank_results in ranks.all_gather_object(done):
            results |= rank_results
        for number in turn:
            costs.learn(*work[number], results[number][1])
        yield [(number, results[number][0]) for number in turn]
