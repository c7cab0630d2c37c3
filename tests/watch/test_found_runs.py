"""Which runs are found below folders, and how each stands."""

import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from esper.nissa import RunEnded, RunStarted
from esper.watch import found_runs
from esper.watch.found_runs import FoundRun, Lookout
from tests.watch.served import CONFIG, begun, compared, grown, whole


def found(*roots: Path) -> dict[str, FoundRun]:
    lookout = Lookout(roots)
    lookout.look()
    return lookout.runs


def test_runs_are_called_by_their_folders_and_evaluations_by_their_files(tmp_path: Path) -> None:
    for name in ("a", "deep/er/b", ".hidden/c", "a/checkpoints/round-1", "node_modules/d"):
        whole(tmp_path / name, rounds=1)
    grown(tmp_path / "net")
    compared(tmp_path / "deep" / "results.jsonl")
    runs = found(tmp_path)
    kinds = {name: run.kind for name, run in runs.items()}
    assert kinds == {
        "a": "training", "deep/er/b": "training", "net": "growth", "deep/results": "evaluation",
    }  # fmt: skip
    assert [*found(tmp_path / "a")] == ["a"], "a run may be named itself"


def test_runs_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    for root in ("first", "second"):
        whole(tmp_path / root / "run", rounds=1)
    names = [*found(tmp_path / "first", tmp_path / "second")]
    assert names == ["run", f"run ({tmp_path / 'second' / 'run' / 'events.sqlite'})"]


def test_a_run_appears_goes_on_ends_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found_runs, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(found_runs, "SCAN_REST", 0.0)
    lookout = Lookout([tmp_path])
    lookout.look()
    assert not lookout.runs
    with begun(tmp_path / "run") as run:
        states = []
        told = [None, RunEnded(round=1, state="stopped"), RunStarted(round=1, config=CONFIG)]
        for event in (*told, RunEnded(round=2, state="failed", text="why")):
            if event is not None:
                run.hub.emit(event)
            run.hub.commit(1)
            lookout.look()
            states.append((lookout.runs["run"].state, lookout.runs["run"].why))
    assert states == [("running", ""), ("stopped", ""), ("running", ""), ("failed", "why")]
    news = lookout.since(lookout.looks - 1)
    assert [(word["run"], word["state"]) for word in news] == [("run", "failed")]
    assert {"end", "state"} <= set(news[0]["kinds"])
    assert lookout.since(lookout.looks) == []
    (tmp_path / "run" / "events.sqlite").unlink()
    lookout.look()
    assert not lookout.runs


def test_nothing_is_opened_while_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(tmp_path / "run", rounds=1)
    lookout = Lookout([tmp_path])
    lookout.look()
    monkeypatch.setattr(found_runs, "RunReader", lambda file: pytest.fail("it is opened"))
    looks = lookout.looks
    for _ in range(5):
        lookout.look()
    assert lookout.looks == looks


@pytest.mark.parametrize(
    ("held", "silent", "state"),
    [
        ("by a process", 5, "running"),
        ("by a process", 700, "stale"),
        ("by nobody", 5, "stale"),
        ("nothing to hold", 5, "running"),
        ("nothing to hold", 200, "stale"),
    ],
)
def test_a_run_without_an_end_goes_on_as_long_as_somebody_is_at_work_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str, silent: int, state: str
) -> None:
    whole(tmp_path / "run", rounds=1, state="")
    now = time.time()
    clock = SimpleNamespace(time=lambda: now + silent, monotonic=time.monotonic)
    monkeypatch.setattr(found_runs, "time", clock)
    lock = tmp_path / "run" / "lock"
    if held != "nothing to hold":
        lock.touch()
    descriptor = os.open(lock if lock.exists() else tmp_path, os.O_RDONLY)
    if held == "by a process":
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    run = found(tmp_path)["run"]
    os.close(descriptor)
    assert run.state == state
    assert bool(run.why) == (state == "stale")
