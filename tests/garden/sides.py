"""Ranks that are threads of the test's own process."""

import threading
from typing import TypeVar

T = TypeVar("T")


class Side:
    """One of several ranks, each of which is a thread."""

    def __init__(self, rank: int, said: list[object], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._said, self._barrier = rank, len(said), said, barrier

    def each(self, what: T) -> list[T]:
        self._said[self.rank] = what
        self._barrier.wait(60)
        heard = list(self._said)
        self._barrier.wait(60)
        return heard  # type: ignore[return-value]
