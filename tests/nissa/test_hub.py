"""The hub: nothing but samples is lost, and no sink stops training."""

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from esper.nissa import Event, Hub, Noted, RunReader, RunStore, Sampled
from esper.nissa import hub as hubs
from tests.nissa.runs import LAYOUT, a_round, counted
from tests.programs import wait_until

LIMIT = 60.0  # seconds: far more than a busy machine needs, less than the patience of a hub


class Recorder:
    """Keeps what it is given; may be slow, closed for a while, or broken."""

    name = "recorder"

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.events: list[Event] = []
        self.batches: list[int] = []
        self.closed = False
        self._before = before

    def write(self, batch: Sequence[Event]) -> None:
        self._before()
        self.events += batch
        self.batches.append(len(batch))

    def close(self) -> None:
        self.closed = True


class DurableRecorder(Recorder):
    name = "durable recorder"

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(before)
        self.commits: list[tuple[int, int]] = []  # round, events written before it

    def commit(self, round: int) -> None:
        self.commits.append((round, len(self.events)))


def fail() -> None:
    raise OSError("the cable was pulled")


def until(gate: threading.Event) -> Callable[[], None]:
    """Stands still until the gate is opened."""

    def wait() -> None:
        assert gate.wait(2 * LIMIT)

    return wait


def notes(count: int) -> list[Noted]:
    return [Noted(round=1, text=str(number)) for number in range(count)]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of sinks that fail."""
    said: list[str] = []
    monkeypatch.setattr(hubs, "tell", said.append)
    return said


def test_every_sink_gets_every_event_in_order() -> None:
    first, second = Recorder(), DurableRecorder()
    given = notes(600)
    with Hub(first, second) as hub:
        for event in given:
            hub.emit(event)
    assert first.events == second.events == given
    assert first.closed
    assert second.closed


def test_events_are_written_together_but_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "BATCH_SECONDS", 0.2)  # longer than a pause of this thread
    sink = Recorder()
    with Hub(sink) as hub:
        for event in notes(200):
            hub.emit(event)
        wait_until(lambda: len(sink.events) == 200)  # nobody had to close or to commit
    assert len(sink.batches) <= 5
    assert max(sink.batches) <= 256


def test_a_commit_waits_for_everything_before_it() -> None:
    sink = DurableRecorder(lambda: time.sleep(0.05))
    with Hub(sink) as hub:
        for number in (1, 2):
            for event in notes(300):
                hub.emit(event)
            assert hub.commit(number)
            assert sink.commits[-1] == (number, 300 * number)


def test_a_commit_without_a_durable_sink_says_so() -> None:
    with Hub(Recorder()) as hub:
        assert not hub.commit(1)


def test_where_there_is_no_room_samples_are_dropped_and_counted_and_all_else_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hubs, "CAPACITY", 8)
    gate, is_writing = threading.Event(), threading.Event()

    def write_slowly() -> None:
        is_writing.set()
        assert gate.wait(LIMIT)

    sink = DurableRecorder(write_slowly)
    with Hub(sink) as hub:
        hub.emit(Noted(round=1, text="first"))
        assert is_writing.wait(LIMIT)  # the sink is busy with the first event from here on
        for number in range(20):
            hub.emit(Sampled(round=1, values={"x": number}))
        waiting = threading.Thread(target=hub.emit, args=(Noted(round=1, text="waited"),))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive(), "a note waits for room"
        gate.set()
        waiting.join(LIMIT)
        assert not waiting.is_alive()
    texts = [event.text for event in sink.events if isinstance(event, Noted)]
    assert texts == ["first", "waited"]
    dropped = [(event.what, event.count) for event in sink.events if event.kind == "dropped"]  # type: ignore[attr-defined]
    assert dropped == [("sample", 12)]
    assert sum(event.kind == "sample" for event in sink.events) == 8


def test_a_slow_sink_that_is_not_durable_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "CAPACITY", 64)
    gate = threading.Event()
    slow = Recorder(until(gate))
    store = RunStore(tmp_path, LAYOUT)
    with Hub(store, slow) as hub:
        start = time.perf_counter()
        for number in range(1, 21):
            for event in a_round(number):
                hub.emit(event)
            assert hub.commit(number)
        assert time.perf_counter() - start < LIMIT
        gate.set()
    with RunReader(tmp_path) as reader:
        assert counted(reader)["decision"] == 100
        lost = reader.dropped()
    assert lost["recorder: decision"] > 0
    came = sum(event.kind == "decision" for event in slow.events)
    assert lost["recorder: decision"] + came == 100


def test_a_sink_that_fails_is_reported_once_and_training_goes_on(
    tmp_path: Path, told: list[str]
) -> None:
    with Hub(RunStore(tmp_path, LAYOUT), Recorder(fail)) as hub:
        for number in (1, 2, 3):
            for event in a_round(number):
                hub.emit(event)
            assert hub.commit(number)
            wait_until(lambda: bool(told))
    assert len(told) == 1
    assert "'recorder' failed and was dropped" in told[0]
    assert "the cable was pulled" in told[0]
    with RunReader(tmp_path) as reader:
        assert counted(reader)["decision"] == 15
        assert [row["text"] for row in reader.each("notes")] == told


@pytest.mark.parametrize("where", ["write", "commit"])
def test_a_full_disk_is_reported_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str], where: str
) -> None:
    def full(*given: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    store, other = RunStore(tmp_path, LAYOUT), Recorder()
    with Hub(store, other) as hub:
        for event in a_round(1):
            hub.emit(event)
        assert hub.commit(1)
        monkeypatch.setattr(store, where, full)
        for number in (2, 3):
            for event in a_round(number):
                hub.emit(event)
            assert not hub.commit(number)
    assert len(told) == 1
    assert "database or disk is full" in told[0]
    assert sum(event.kind == "decision" for event in other.events) == 15
    with RunReader(tmp_path) as reader:
        assert reader.last_commit() == 1


def test_a_really_full_file_is_reported_and_stays_readable(tmp_path: Path, told: list[str]) -> None:
    store = RunStore(tmp_path, LAYOUT)
    with Hub(store) as hub:
        for event in a_round(1):
            hub.emit(event)
        assert hub.commit(1)
        ((pages,),) = store._connection.execute("PRAGMA page_count").fetchall()
        store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        rounds = 1
        while not told and rounds < 200:
            rounds += 1
            for event in a_round(rounds):
                hub.emit(event)
            hub.commit(rounds)
    assert len(told) == 1
    assert "full" in told[0]
    with RunReader(tmp_path) as reader:
        assert reader.last_commit() >= 1
        assert reader.query("SELECT count(*) FROM decisions").rows[0][0] % 6 == 0


def test_a_durable_sink_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    monkeypatch.setattr(hubs, "CAPACITY", 4)
    monkeypatch.setattr(hubs, "PATIENCE_SECONDS", 0.3)
    gate = threading.Event()
    hub = Hub(DurableRecorder(until(gate)))
    start = time.perf_counter()
    for event in notes(20):
        hub.emit(event)
    assert not hub.commit(1)
    assert time.perf_counter() - start < LIMIT
    assert len(told) == 1
    assert "0.3 seconds" in told[0]
    gate.set()
    hub.close()


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError], ids=["gone", "closed"])
def test_an_output_that_fails_does_not_stop_training(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(text: str) -> None:
        raise error

    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=broken))
    kept = Recorder()
    with Hub(Recorder(fail), kept) as hub:
        hub.emit(Noted(round=1, text="hello"))
        wait_until(lambda: len(kept.events) == 2)  # the second event names the failed sink
        hub.emit(Noted(round=1, text="again"))
    assert [event.text for event in kept.events][0::2] == ["hello", "again"]  # type: ignore[attr-defined]


def test_several_threads_may_emit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "CAPACITY", 32)
    sink = DurableRecorder()
    with Hub(sink) as hub:
        threads = [
            threading.Thread(target=lambda: [hub.emit(event) for event in notes(500)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(sink.events) == 2000


def test_after_its_end_a_hub_takes_nothing_and_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hubs, "CAPACITY", 4)
    sink = DurableRecorder()
    with Hub(sink) as hub:
        hub.emit(Noted(round=1, text="in time"))
    for event in notes(20):
        hub.emit(event)
    assert not hub.commit(1)
    hub.close()
    assert len(sink.events) == 1
