"""Work that ranks share: who does which part, so that all are through at the same time."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")
TURN = 4  # parts of every rank between two exchanges: what a lost rank may cost at most


class Ranks(Protocol):
    """Processes that play together; each hears what every one of them says."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def each(self, what: T) -> list[T]: ...


class Alone(NamedTuple):
    """A process that plays everything itself."""

    rank: int = 0
    size: int = 1

    def each(self, what: T) -> list[T]:
        return [what]


ALONE = Alone()


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
    do: Callable[[int], T], work: Sequence[tuple[str, float]], *, costs: Costs, ranks: Ranks = ALONE
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
        found = {number: each for some in ranks.each(done) for number, each in some.items()}
        for number in turn:
            costs.learn(*work[number], found[number][1])
        yield [(number, found[number][0]) for number in turn]
