"""The hub: hands every event to every sink, without making training wait for any of them.

Each sink has a bounded queue and a thread. Where a durable sink's queue is full, samples are
dropped and counted and all else waits for room; other sinks simply lose what they are too slow
for, counted. A sink that fails is reported once and dropped, and training goes on.
"""

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from esper.nissa.events import Dropped, Event, Noted

CAPACITY = 1024  # events that may wait for a sink
BATCH = 256  # events written together
BATCH_SECONDS = 0.1  # or what came within this time
PATIENCE_SECONDS = 120.0  # a durable sink that makes no room for so long has failed
CLOSING_SECONDS = 10.0  # other sinks have this long to finish


class Sink(Protocol):
    """Where events go: takes them in batches, always from the same thread."""

    @property
    def name(self) -> str: ...

    def write(self, batch: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class DurableSink(Sink, Protocol):
    """A sink that nothing but samples may be lost on the way to."""

    def commit(self, round: int) -> None:
        """Return when everything written so far is on the disk."""
        ...


@dataclass
class _Commit:
    """Stands in a queue behind the events that a round consists of."""

    round: int
    done: threading.Event = field(default_factory=threading.Event)
    held: bool = False


class _Channel:
    """One sink, its queue and its thread."""

    def __init__(
        self, sink: Sink, failed: Callable[[str], None], capacity: int, patience: float
    ) -> None:
        self.sink, self.durable = sink, isinstance(sink, DurableSink)
        self.dropped: Counter[str] = Counter()  # all of them, for people
        self.alive = True
        self._failed, self._capacity, self._patience = failed, capacity, patience
        self._waiting: deque[Event | _Commit] = deque()
        self._fresh: Counter[tuple[int, str]] = Counter()  # (round, kind) dropped, not yet told
        self._urgent = False  # something waits that should not wait for more
        self._closing = False
        self._obituary: str | None = None  # why it failed, until people were told
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name=f"nissa {sink.name}", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        with self._lock:
            there = len(self._waiting) < self._capacity or self._make_room(event)
            if there and self.alive and not self._closing:
                self._waiting.append(event)
                if len(self._waiting) >= BATCH:
                    self._work.notify()
        if self._obituary is not None:
            self._tell()

    def _make_room(self, event: Event) -> bool:
        """Is there room for this event now, or later? With the lock."""
        if event.droppable or not self.durable:
            self.dropped[event.kind] += 1
            self._fresh[event.round, event.kind] += 1
            return False
        self._hurry()
        there = self._room.wait_for(
            lambda: len(self._waiting) < self._capacity or not self.alive, self._patience
        )
        if not there:
            self._give_up(f"it has written nothing for {self._patience:g} seconds")
        return there

    def request(self, round: int) -> Callable[[], bool]:
        """Have everything before put on the disk; what is returned waits until it is there, and
        is False if the sink failed."""
        mark = _Commit(round)
        with self._lock:
            if not self.alive or self._closing:
                return lambda: False
            self._waiting.append(mark)
            self._hurry()

        def wait() -> bool:
            if not mark.done.wait(self._patience):
                self._fail(f"it has not finished a round for {self._patience:g} seconds")
            return mark.held

        return wait

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._hurry()
        # One that hangs was given up already.
        self._thread.join(self._patience if self.durable and self.alive else CLOSING_SECONDS)

    def take_dropped(self) -> list[Dropped]:
        """What was dropped since the last time."""
        with self._lock:
            fresh, self._fresh = self._fresh, Counter()
        return [
            Dropped(round=round, sink=self.sink.name, what=kind, count=count)
            for (round, kind), count in fresh.items()
        ]

    def _hurry(self) -> None:
        self._urgent = True
        self._work.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(
                    lambda: self._urgent or len(self._waiting) >= BATCH, BATCH_SECONDS
                )
                self._urgent = False
                batch = list(self._waiting)
                self._waiting.clear()
                ending = self._closing or not self.alive
                self._room.notify_all()
            try:
                self._write([*(self.take_dropped() if self.durable else ()), *batch])
            except Exception as error:
                self._release(batch)
                self._fail(f"{type(error).__name__}: {error}")
                ending = True
            if ending:
                break
        try:
            self.sink.close()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _write(self, batch: Sequence[Event | _Commit]) -> None:
        events: list[Event] = []
        for item in batch:
            if not isinstance(item, _Commit):
                events.append(item)
            elif isinstance(self.sink, DurableSink):
                self._flush(events)
                self.sink.commit(item.round)
                item.held = True
                item.done.set()
        self._flush(events)

    def _flush(self, events: list[Event]) -> None:
        for first in range(0, len(events), BATCH):
            self.sink.write(events[first : first + BATCH])
        events.clear()

    def _fail(self, why: str) -> None:
        with self._lock:
            self._give_up(why)
        self._tell()

    def _give_up(self, why: str) -> None:
        """Take nothing any more, with the lock. Then, without it, `_tell`."""
        if not self.alive:
            return
        self.alive = False
        self._release(self._waiting)
        self._waiting.clear()
        self._room.notify_all()
        self._work.notify()
        self._obituary = (
            f"Telemetry sink {self.sink.name!r} failed and was dropped, training goes on: {why}"
        )

    def _tell(self) -> None:
        with self._lock:
            text, self._obituary = self._obituary, None
        if text is not None:
            self._failed(text)

    @staticmethod
    def _release(items: Sequence[Event | _Commit] | deque[Event | _Commit]) -> None:
        for item in items:
            if isinstance(item, _Commit):
                item.done.set()


def tell(text: str) -> None:
    """One line on the standard error, if there is one yet."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Hub(AbstractContextManager["Hub"]):
    """Takes events from training. Use it in a `with`, so that its end is written too."""

    def __init__(
        self,
        *sinks: Sink,
        report: Callable[[str], None] = tell,
        capacity: int = CAPACITY,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._report, self._round = report, 0
        self._channels = [_Channel(sink, self._failed, capacity, patience) for sink in sinks]

    def emit(self, event: Event) -> None:
        """Hand over an event; waits only for a durable sink without room."""
        self._round = event.round
        for channel in self._channels:
            if channel.alive:
                channel.put(event)

    def commit(self, round: int) -> bool:
        """Wait until everything emitted so far is on the disk, where a durable sink has it.

        False: there is none, or it failed, and training may go on all the same.
        """
        return self.request(round)()

    def request(self, round: int) -> Callable[[], bool]:
        """As `commit`, without waiting: what is returned waits."""
        self._tell_dropped()
        waits = [channel.request(round) for channel in self._channels if channel.durable]
        return lambda: sum(wait() for wait in waits) > 0  # all are waited for

    @property
    def dropped(self) -> dict[str, int]:
        """How many events of each kind were lost on the way, all sinks together."""
        return dict(sum((channel.dropped for channel in self._channels), Counter[str]()))

    @property
    def failed(self) -> list[str]:
        """Names of the sinks that were dropped."""
        return [channel.sink.name for channel in self._channels if not channel.alive]

    def close(self) -> None:
        """Write what is waiting and close the sinks; those that may lose events first."""
        for channel in sorted(self._channels, key=lambda channel: channel.durable):
            if channel.durable:
                self._tell_dropped()
            channel.close()

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _tell_dropped(self) -> None:
        """Durable sinks tell their own; what others lost is told to all."""
        for channel in self._channels:
            if not channel.durable:
                for event in channel.take_dropped():
                    self.emit(event)

    def _failed(self, text: str) -> None:
        with suppress(Exception):
            self._report(text)
        self.emit(Noted(round=self._round, text=text))
