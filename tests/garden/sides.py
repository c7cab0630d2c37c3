"""Ranks that are threads of the test's own process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Side:
    """One of several ranks, each of which is a thread."""

    def __init__(self, rank: int, said: list[object], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._said, self._barrier = rank, len(said), said, barrier

    def all_gather_object(self, value: T) -> list[T]:
        self._said[self.rank] = value
        self._barrier.wait(60)
        heard = list(self._said)
        self._barrier.wait(60)
        return heard  # type: ignore[return-value]


def on_sides(size: int, do: Callable[[Side], T]) -> list[T]:
    """What comes of it in each of so many ranks."""
    said, barrier = list[object]([None] * size), threading.Barrier(size)

    def own(rank: int) -> T:
        try:
            return do(Side(rank, said, barrier))
        except BaseException:
            barrier.abort()  # nobody waits for it
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(own, range(size)))
