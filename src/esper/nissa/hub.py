"""The hub: hands every event to every sink, without making training wait for any of them.

Each sink has a bounded queue and a thread. Where a durable sink's queue is full, samples are
dropped and counted and all else waits for room; other sinks simply lose what they are too slow
for, counted. A sink that fails is reported once and dropped, and training goes on.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Protocol, runtime_checkable

from esper.nissa.events import Dropped, Event, Noted

CAPACITY = 1024  # events that may wait for a sink
BATCH = 256  # events written together
BATCH_SECONDS = 0.02  # or what came within this time
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

    def __init__(self, sink: Sink, failed: Callable[[str], None]) -> None:
        self.sink, self.durable = sink, isinstance(sink, DurableSink)
        self.alive, self._closing, self._failed = True, False, failed
        self._waiting: Queue[Event | _Commit] = Queue(CAPACITY)
        self._dropped: Counter[tuple[int, str]] = Counter()  # (round, kind), not yet told
        self._lock = threading.Lock()  # of what is counted, and of who says that it failed
        self._urgent = threading.Event()  # something waits that should not wait for more
        self._thread = threading.Thread(target=self._run, name=f"nissa {sink.name}", daemon=True)
        self._thread.start()

    def put(self, item: Event | _Commit) -> None:
        """Hand it over, where nothing may be lost when there is room for it."""
        if self._closing:
            return
        needed = isinstance(item, _Commit) or (self.durable and not item.droppable)
        if self._waiting.full():
            self._urgent.set()
        try:
            self._waiting.put(item, needed, PATIENCE_SECONDS)
        except Full:
            if isinstance(item, _Commit) or needed:
                self._fail(f"it has written nothing for {PATIENCE_SECONDS:g} seconds")
                return
            with self._lock:
                self._dropped[item.round, item.kind] += 1
        if isinstance(item, _Commit) or self._waiting.qsize() >= BATCH:
            self._urgent.set()

    def request(self, round: int) -> Callable[[], bool]:
        """Have everything before put on the disk; what is returned waits until it is there, and
        is False if the sink failed."""
        mark = _Commit(round)
        if self.alive:
            self.put(mark)
        if self._closing or not self.alive:
            return lambda: False

        def wait() -> bool:
            if not mark.done.wait(PATIENCE_SECONDS):
                self._fail(f"it has not finished a round for {PATIENCE_SECONDS:g} seconds")
            return mark.held

        return wait

    def close(self) -> None:
        self._closing = True
        self._urgent.set()
        # One that hangs was given up already.
        self._thread.join(PATIENCE_SECONDS if self.durable and self.alive else CLOSING_SECONDS)

    def take_dropped(self) -> list[Dropped]:
        """What was dropped since the last time."""
        with self._lock:
            fresh, self._dropped = self._dropped, Counter()
        return [
            Dropped(round=round, sink=self.sink.name, what=kind, count=count)
            for (round, kind), count in fresh.items()
        ]

    def _run(self) -> None:
        ending = False
        while not ending:
            self._urgent.wait(BATCH_SECONDS)
            self._urgent.clear()
            ending = self._closing or not self.alive
            batch = self._taken()
            try:
                self._write(batch)
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}", batch)
                ending = True
        try:
            self.sink.close()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _taken(self) -> list[Event | _Commit]:
        """All that waits, but for what comes meanwhile."""
        found = []
        with suppress(Empty):
            for _ in range(self._waiting.qsize()):
                found.append(self._waiting.get_nowait())
        return found

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

    def _fail(self, why: str, batch: Sequence[Event | _Commit] = ()) -> None:
        """Take nothing any more, keep nobody who waits, and say why, once."""
        with self._lock:
            first, self.alive = self.alive, False
        for item in (*batch, *self._taken()):
            if isinstance(item, _Commit):
                item.done.set()
        if first:
            dropped = f"Telemetry sink {self.sink.name!r} failed and was dropped"
            self._failed(f"{dropped}, training goes on: {why}")


def tell(text: str) -> None:
    """One line on the standard error, if there is one yet."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class Hub(AbstractContextManager["Hub"]):
    """Takes events from training. Use it in a `with`, so that its end is written too."""

    def __init__(self, *sinks: Sink) -> None:
        self._round = 0
        self._channels = [_Channel(sink, self._failed) for sink in sinks]

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

    def close(self) -> None:
        """Write what is waiting and close the sinks; those that may lose events first."""
        for channel in sorted(self._channels, key=lambda channel: channel.durable):
            if channel.durable:
                self._tell_dropped()
            channel.close()

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _tell_dropped(self) -> None:
        """To all sinks, what any of them lost."""
        for event in [each for channel in self._channels for each in channel.take_dropped()]:
            self.emit(event)

    def _failed(self, text: str) -> None:
        tell(text)
        self.emit(Noted(round=self._round, text=text))
