"""Several processes, signals and locks: what happens around a run, with real processes."""

import os
import signal
from pathlib import Path

import pytest

from esper.distributed import ProcessesError
from esper.leyline import AgreementError
from esper.nissa import RunReader
from esper.simic.training import RunError, RunFolder, train_run
from esper.simic.training.run_processes import _require_same_versions
from tests import programs
from tests.programs import children_of, is_alive, wait_until
from tests.simic.training.short_runs import esper, started
from tests.simic.training.tiny import ENVS, HORIZON, tiny_run, told

LONG = 1000  # rounds of a run that does not end by itself


def two(path: Path, rounds: int = 2) -> RunFolder:
    return tiny_run(path, processes=2, rounds=rounds, logged_envs=ENVS)


def in_round(run: RunFolder, round_: int) -> None:
    wait_until(lambda: bool(run.rounds()) and run.rounds()[-1] >= round_)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of two processes, never interrupted; the second one is an interpreter of its own."""
    run = two(tmp_path_factory.mktemp("whole") / "run")
    done = programs.esper("resume", run.path)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr, "no sink was dropped"
    return run


@pytest.mark.slow
def test_two_processes_log_every_event_once(finished_run: RunFolder) -> None:
    with RunReader(finished_run.path) as reader:
        for table in ("decisions", "steps"):
            rows = reader.query(f"select round, step, env from {table} order by 1, 2, 3").rows  # noqa: S608
            assert rows == [
                (round_, step, env)
                for round_ in (1, 2)
                for step in range(HORIZON)
                for env in range(ENVS)
            ]
        assert reader.query("select count(*) from episodes").rows == [(2 * ENVS,)]
        assert not list(reader.each("notes"))


@pytest.mark.slow
@pytest.mark.parametrize("met", [False, True])
def test_lost_process_ends_the_run_with_one_sentence(met: bool, tmp_path: Path) -> None:
    run = two(tmp_path / "run", LONG)
    process = started("resume", run.path, "--quiet", restarts=0)
    if met:
        in_round(run, 1)
    wait_until(lambda: len(children_of(process.pid)) == 2)
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    line = err.strip().splitlines()[-1]
    assert line.startswith("esper: Process 2 of the 2 that learn together ended")
    assert "killed by signal 9" in line
    assert "Traceback" not in err


@pytest.mark.slow
def test_error_of_one_process_ends_all_with_one_sentence(tmp_path: Path) -> None:
    """It is not tried again: it would be refused again."""
    run = two(tmp_path / "run", LONG)
    with run.locked():
        refused = esper("resume", run.path, "--quiet")
    assert refused.returncode == 2
    (line,) = refused.stderr.strip().splitlines()
    assert line.startswith(f"esper: {run.path} is being trained by another process")


@pytest.mark.slow
def test_resume_skips_a_damaged_checkpoint(finished_run: RunFolder, tmp_path: Path) -> None:
    import shutil

    run = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.path, run.path)
    config = (run.path / "config.toml").read_text(encoding="utf-8")
    more = config.replace("rounds = 2", "rounds = 3")
    (run.path / "config.toml").write_text(more, encoding="utf-8")
    (tensors,) = (run.checkpoint(2) / "agent-0").glob("tensors-*")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    done = esper("resume", run.path, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "is damaged" in done.stderr
    assert "round 1 is whole" in done.stderr
    assert RunFolder(run.path).checkpoint(3).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "processes"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)]
)
def test_signal_stops_after_the_round(
    number: signal.Signals, processes: int, tmp_path: Path
) -> None:
    run = tiny_run(
        tmp_path / "run",
        rounds=LONG,
        checkpoint_every=LONG,
        processes=processes,
        seeds_per_context=1,
    )
    process = started("resume", run.path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round 1/"):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    last = run.rounds()[-1]
    assert last >= 1
    assert f"Stopped after round {last}. Continue with: esper resume {run.path}" in out
    assert "Stopping after this round" in err
    assert "Traceback" not in err
    with run.locked():  # it can be gone on with
        pass
    run.read_checkpoint(last)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    run = two(tmp_path / "run", LONG)
    process = started("resume", run.path)
    in_round(run, 0)
    workers = children_of(process.pid)
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    for line in process.stderr:
        if line.startswith("Stopping after this round"):
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    wait_until(lambda: not any(map(is_alive, workers)), 5.0)


@pytest.mark.slow
def test_run_in_training_is_locked_for_other_processes(
    tmp_path: Path,
) -> None:
    run = tiny_run(tmp_path / "run", rounds=LONG)
    process = started("resume", run.path)
    in_round(run, 0)
    done = esper("resume", run.path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"esper: {run.path} is being trained by another process")
    assert f"process {process.pid}" in line
    process.kill()
    process.wait()
    with run.locked():
        pass


def test_locked_run_raises_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.archive.run_folders.LOCK_SECONDS", 0.1)
    run = tiny_run(tmp_path / "run")
    with run.locked(), pytest.raises(RunError, match="another process"):
        train_run(run)
    with run.locked():
        pass


@pytest.mark.nightly
def test_four_processes_match_one_process(tmp_path: Path) -> None:
    one, four = (tiny_run(tmp_path / str(size), processes=size, rounds=2) for size in (1, 4))
    for run in (one, four):
        assert esper("resume", run.path, "--quiet").returncode == 0
    ours, theirs = told(one), told(four)
    for table in ("decisions", "steps", "evaluations"):
        for left, right in zip(ours[table], theirs[table], strict=True):
            assert list(left) == pytest.approx(list(right), rel=1e-3, abs=1e-3), table


def test_different_versions_of_ranks_raise_one_sentence() -> None:
    with pytest.raises(ProcessesError, match=r"rank 0 has torch 1; rank 2 has torch 2"):
        _require_same_versions(["torch 1", "torch 1", "torch 2"])


def test_wrong_number_of_processes_raises_agreement_error(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", processes=2)
    with pytest.raises(AgreementError, match=r"given: 1; valid: 2; continue with: esper resume"):
        train_run(run)
