"""Where events go."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from esper.nissa.events import Event


class Sink(Protocol):
    """Takes events in batches, always from the same thread."""

    @property
    def name(self) -> str: ...

    def write(self, batch: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class DurableSink(Protocol):
    """A sink that nothing but samples may be lost on the way to."""

    @property
    def name(self) -> str: ...

    def write(self, batch: Sequence[Event]) -> None: ...

    def close(self) -> None: ...

    def commit(self, round: int) -> None:
        """Return when everything written so far is on the disk."""
        ...
