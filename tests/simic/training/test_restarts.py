"""Which launch started a run: only its own restarts continue the run."""

import os
from pathlib import Path

import pytest

from esper.archive.run_folders import LAUNCH
from esper.simic.training import RunFolder
from esper.simic.training.run_processes import is_restart_of, mark_started, restart_count
from tests.simic.training.tiny import tiny_run


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the environment variables of a launched process that was never restarted."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    return monkeypatch


def test_restart_of_the_same_launch_is_recognised(
    tmp_path: Path, launched: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path / "run")
    mark_started(run)
    assert not is_restart_of(run), "nothing was restarted yet"
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restart_count() == 1
    assert is_restart_of(RunFolder(run.path))


@pytest.mark.parametrize("change", ["run id", "parent"])
def test_run_of_another_launch_is_not_continued(
    change: str, tmp_path: Path, launched: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path / "run")
    mark_started(run)
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    if change == "run id":
        launched.setenv("TORCHELASTIC_RUN_ID", "second")
    else:
        parent = os.getppid()
        launched.setattr("os.getppid", lambda: parent + 1)
    assert not is_restart_of(run)


def test_run_without_launch_file_is_not_continued(
    tmp_path: Path, launched: pytest.MonkeyPatch
) -> None:
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not is_restart_of(tiny_run(tmp_path / "run"))
    assert not is_restart_of(RunFolder(tmp_path / "absent"))


def test_process_that_was_not_launched_writes_no_launch_file(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run")
    mark_started(run)
    assert not (run.path / LAUNCH).exists()


def test_folder_with_only_a_launch_file_is_fresh(
    tmp_path: Path, launched: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    mark_started(run)
    assert (run.path / LAUNCH).exists()
    assert run.is_fresh
