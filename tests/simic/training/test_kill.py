"""Runs that are killed at any moment end as if they had not been, to the bit.

The tests kill four times; `make fault` kills a hundred times, and tests/faults has every place.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from esper.nissa import RunReader
from esper.simic.training import RunFolder, train_run
from tests.programs import children_of, is_alive, wait_until
from tests.simic.training.killing import attempt
from tests.simic.training.short_runs import esper, started
from tests.simic.training.tiny import ENVS, ROUNDS, assert_same, digest, tiny_run

KILLS = int(os.environ.get("ESPER_KILLS", "4"))

# What happens once, at the beginning; then where, and how long a phase takes at most.
FIRST = {"controls": 0.1, "baselines": 0.15}
PHASES = {
    "playing": 0.2,
    "evaluating": 0.15,
    "checkpoint": 0.06,
    "learning": 0.05,
    "start": 0.3,
    "store": 0.02,
    "closing": 0.01,
}
# How often a function is called in a few rounds.
CALLS = {
    "rename": 4,
    "telemetry commit": 3,
    "replace": 24,
    "telemetry transaction": 10,
    "unlink": 20,
    "fsync": 60,
    "telemetry write": 6,
    "rmtree": 6,
    "insert": 100,
    "save": 8,
    "mkdir": 6,
    "rmdir": 8,
    "telemetry rewind": 1,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = tiny_run(tmp_path_factory.mktemp("whole") / "run")
    assert train_run(run)
    return run


def plans(draw: random.Random) -> Iterator[dict[str, Any]]:
    """Every place in turn, each time at another moment."""
    while True:
        phases = [*FIRST, *PHASES]
        places = [(name, True) for name in phases] + [(name, False) for name in CALLS]
        places = places[: len(FIRST)] + draw.sample(places[len(FIRST) :], len(places) - len(FIRST))
        for name, is_phase in places:
            if is_phase:
                longest = {**FIRST, **PHASES}[name]
                entry = draw.randint(1, 1 if longest == FIRST.get(name) or name == "start" else 2)
                yield {"phase": name, "entry": entry, "delay": draw.uniform(0.0, longest)}
            else:
                number = draw.randint(1, CALLS[name])
                yield {"call": name, "number": number, "after": draw.random() < 0.5}


@pytest.mark.slow
def test_resume_after_many_kills_matches_uninterrupted_run(
    reference: RunFolder, tmp_path: Path
) -> None:
    draw = random.Random(KILLS)
    killed_in: Counter[str] = Counter()
    planned = plans(draw)
    run = tiny_run(tmp_path / "run-0")
    in_this_run, limit, runs = 0, 8, 0
    while True:
        enough = killed_in.total() >= KILLS
        plan = None if enough or in_this_run >= limit else next(planned)
        code, phase = attempt(run, plan)
        if code < 0:
            killed_in[phase if plan is None or "phase" in plan else f"{plan['call']}()"] += 1
            in_this_run += 1
            if run.rounds():
                run.read_checkpoint(run.rounds()[-1])
            continue
        assert (code, phase) == (0, "nothing"), plan
        assert run.rounds() == [ROUNDS - 2, ROUNDS - 1, ROUNDS]
        assert_same(run, reference)
        assert digest(run) == digest(reference)
        if enough:
            break
        runs += 1
        run = tiny_run(tmp_path / f"run-{runs}")
        in_this_run, limit = 0, draw.randint(4, 9)
    print(f"\n{killed_in.total()} kills in {runs + 1} runs: {dict(killed_in)}")
    assert len(killed_in) >= min(KILLS, 20) // 2, "kills were spread over phases and calls"


@pytest.mark.nightly
def test_killed_processes_match_uninterrupted_run(tmp_path: Path) -> None:
    """Each time the launcher, whose processes must not stay behind, or one of them, after which
    all are started again."""
    finished_run, run = (
        tiny_run(tmp_path / name, processes=2, rounds=4, logged_envs=ENVS)
        for name in ("whole", "run")
    )
    assert esper("resume", finished_run.path, "--quiet").returncode == 0
    draw = random.Random(KILLS)
    restarted = 0
    for number in range(max(2, KILLS // 10)):
        process = started("resume", run.path, "--quiet")
        wait_until(lambda: len(children_of(process.pid)) == 2)  # noqa: B023 - called at once
        workers = children_of(process.pid)
        if number % 2:
            last = max([0, *run.rounds()])  # so that something was learned
            wait_until(lambda: max([0, *run.rounds()]) > last or not is_alive(process.pid))  # noqa: B023
        time.sleep(draw.uniform(0.0, 0.7 if number % 2 == 0 else 0.1))
        os.kill(draw.choice(workers) if number % 2 else process.pid, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        wait_until(lambda: not any(map(is_alive, workers)), 5.0)  # noqa: B023
        assert process.returncode == (0 if number % 2 else -signal.SIGKILL), err
        restarted += "A process was lost, and all were started again (1)" in err
        if process.returncode == 0:
            break
    assert restarted
    assert_same(run, finished_run)
    with RunReader(run.path) as reader:
        assert any("started again" in str(note) for note in reader.each("notes"))


def test_unfinished_checkpoints_are_cleared(
    tmp_path: Path,
) -> None:
    run = tiny_run(tmp_path / "run")
    (run.begin_checkpoint(3) / "agent-0").mkdir()
    for round_ in (1, 2, 3, 4, 5):
        run.checkpoint(round_).mkdir()
    assert run.rounds() == [1, 2, 3, 4, 5]
    run.clear_unfinished()
    names = sorted(each.name for each in (run.path / "checkpoints").iterdir())
    assert names == ["round-000003", "round-000004", "round-000005"]
