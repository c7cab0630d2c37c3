"""Processes that learn together, one of which is lost, stuck, full or of another version."""

import errno
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.nissa import RunReader
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import RunFolder, Trainer, run_processes
from esper.simic.training.run_processes import init_distributed
from tests.ranks import ESPER, run, torchrun
from tests.simic.training.tiny import ENVS, assert_same, tiny_files, tiny_run

# Which rank dies where, and the how manieth time it comes there: one in every start of all.
KILLS: tuple[tuple[int, Any, str, int], ...] = (
    (1, Trainer, "_collect_rollout", 2),
    (0, PPOAgent, "update", 2),
    (0, RunFolder, "finish_checkpoint", 1),
)
TRAIN = ["train", "demo", "--file", "../settings.toml", "--out", "run", "--quiet"]


def train() -> None:
    """As `esper train`; each time until the last a process kills itself where it is told to."""
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for rank, owner, name, number in KILLS[start : start + 1]:
        if int(os.environ["RANK"]) == rank:
            change(owner, name, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert run(ESPER, TRAIN) == 0


def change(owner: Any, name: str, number: int, strike: Callable[[], None]) -> None:
    """Have something happen before the `number`-th call of a function."""
    whole, calls = getattr(owner, name), iter(range(1, number))

    def struck(*given: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            strike()
        return whole(*given, **named)

    setattr(owner, name, struck)


@pytest.mark.slow
def test_killed_ranks_restart_and_match_uninterrupted_run(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    tiny_files(tmp_path, processes=2, rounds=3, logged_envs=ENVS)
    whole, killed = (RunFolder(folder / "run") for folder in folders)
    undisturbed = torchrun(2, ESPER, *TRAIN, cwd=folders[0])
    assert undisturbed.returncode == 0, undisturbed.stderr
    done = torchrun(2, f"{__name__}:train", cwd=folders[1], restarts=len(KILLS))
    assert done.returncode == 0, done.stderr
    for start in range(1, len(KILLS) + 1):
        assert f"A process was lost, and all were started again ({start})" in done.stderr
    assert_same(killed, whole)
    with RunReader(killed.path) as reader:
        notes = [str(note) for note in reader.each("notes")]
    assert sum("started again" in note for note in notes) >= 1


def fill_disk() -> None:
    """The first rank finds its disk full when it writes a checkpoint of the first round."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run/checkpoints")

    if os.environ["RANK"] == "0":
        change(RunFolder, "finish_checkpoint", 2, full)
    raise SystemExit(run(ESPER, ["resume", "run", "--quiet"]))


@pytest.mark.slow
def test_full_disk_ends_all_ranks_with_one_sentence(tmp_path: Path) -> None:
    whole = tiny_run(tmp_path / "run", processes=2, rounds=2)
    done = torchrun(2, f"{__name__}:fill_disk", cwd=tmp_path, restarts=3)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    assert said[0].startswith("esper: A file could not be read or written while run was trained")
    assert "esper resume run" in said[0]
    assert "Traceback" not in done.stderr
    assert "started again" not in done.stderr, "what is refused is not tried again"
    whole.read_checkpoint(0)
    assert whole.rounds() == [0]


def other_version() -> None:
    if os.environ["RANK"] == "1":
        esper.__version__ = "99.0"
    with init_distributed("cpu"):
        raise AssertionError("they met")


def test_ranks_with_different_versions_are_refused(tmp_path: Path) -> None:
    done = torchrun(2, f"{__name__}:other_version", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "need the same versions" in line
    assert "rank 1 has esper 99.0" in line


def late() -> None:
    run_processes.TIMEOUT = timedelta(seconds=2)
    time.sleep(4.0 * int(os.environ["RANK"]))
    with init_distributed("cpu"):
        raise AssertionError("they met")


def stuck() -> None:
    run_processes.TIMEOUT = timedelta(seconds=2)
    with init_distributed("cpu") as processes:
        if processes.rank == 1:
            time.sleep(600)
        processes.sum_(torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        pytest.param(
            late,
            "esper: Not all processes came; valid: 2 of them",
            marks=pytest.mark.nightly,
        ),
        (stuck, "esper: Process 1 of the 2 that learn together ended, as after 0 restarts"),
    ],
)
def test_ranks_wait_for_each_other_at_most_the_timeout(
    fault: Callable[[], None], sentence: str, tmp_path: Path
) -> None:
    done = torchrun(2, f"{__name__}:{fault.__name__}", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(sentence)
    assert "Traceback" not in done.stderr
