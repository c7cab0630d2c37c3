"""Folders that are moved, replaced or half made while or after somebody works in them."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.archive import ArchiveError, read_archive, write_archive
from esper.distributed import Processes
from esper.karn.train_commands import _train_here
from esper.kasmina.export_files import writing
from esper.leyline.errors import EsperError
from esper.simic.training import RoundReport, RunFolder, train_run
from tests import programs
from tests.programs import esper_here
from tests.simic.training.tiny import ROUNDS, assert_same, tiny_run

X = torch.arange(96.0).view(32, 3) / 96
DATA = (X, (X.sum(1) > 1.4).long())


def moved(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def deleted(run: Path) -> None:
    shutil.rmtree(run)


def replaced(run: Path) -> None:
    moved(run)
    shutil.copytree(run.with_name("elsewhere"), run)


def without_lock(run: Path) -> None:
    (run / "lock").unlink()


MISHAPS = (moved, deleted, replaced, without_lock)
Mishap = Callable[[Path], None]


def entries(folder: Path) -> set[Path]:
    return {file for file in folder.rglob("*") if "events.sqlite" not in file.name}


def grow(run: Path, at: int, mishap: Callable[[], object]) -> Any:
    def meddle(record: dict[str, Any]) -> None:
        if record["epoch"] == at:
            mishap()

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    given = {"loss": "cross_entropy", "budget": None, "controller": "never", "quiet": True}
    return esper.grow(model, DATA, DATA, epochs=3, out=run, on_epoch=meddle, **given)


@pytest.mark.parametrize("mishap", MISHAPS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", ["train", "grow"])
def test_a_run_whose_folder_is_no_longer_there_stops_and_makes_nothing(
    kind: str, mishap: Mishap, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    after: list[set[Path]] = []

    def happen() -> None:
        mishap(path)
        after.append(entries(tmp_path))

    def listen(report: RoundReport) -> None:
        if report.round == 1:
            happen()

    def go() -> None:
        if kind == "train":
            train_run(tiny_run(path, rounds=2), on_round=listen)
        else:
            grow(path, 2, happen)

    with pytest.raises(EsperError, match="no longer the folder") as told:
        go()
    assert "\n" not in str(told.value)
    assert entries(tmp_path) == after[0]
    if mishap is moved and kind == "train":  # put back, as the message advises
        path.with_name("elsewhere").rename(path)
        assert train_run(RunFolder.open(path))


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    run = tiny_run(tmp_path / "run")
    (run.path / "lock").symlink_to(other)
    with pytest.raises(EsperError, match="lock cannot be made"):
        train_run(run)
    assert other.read_text() == "mine"


KILLED_EXPORT = """
import os, sys
from pathlib import Path
from esper.kasmina.export_files import writing
target = Path(sys.argv[1])
with writing(target, target) as draft:
    draft.write_text("half")
    os.kill(os.getpid(), 9)
"""


def test_folder_of_a_killed_export_does_not_stop_a_later_export(tmp_path: Path) -> None:
    target = tmp_path / "net"
    export = programs.start(KILLED_EXPORT, target)
    assert export.wait() == -9
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".net-")
    with writing(target, target) as draft:
        draft.write_text("complete")
    assert target.read_text() == "complete"
    assert set(tmp_path.iterdir()) == {leftover, target}


@pytest.mark.parametrize("left", [(), ("sample",), ("sample", "checkpoint")])
def test_a_network_that_ended_before_its_first_checkpoint_is_started_again(
    left: tuple[str, ...], tmp_path: Path
) -> None:
    """And the message says so: there is nothing to resume."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "lock").touch()
    for name in left:
        (path / name).mkdir()
        (path / name / "writing.tmp").touch()
    for words in ("resume", "show", "report", "export"):
        told = esper_here(words, path)
        assert told.returncode == 2
        assert "before its first checkpoint; start it again" in told.stderr, words
    assert grow(path, 0, lambda: None).finished


def test_training_resumes_from_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = tiny_run(tmp_path / "run"), tiny_run(tmp_path / "whole")
    assert train_run(whole)
    shutil.copytree(whole.path, run.path, dirs_exist_ok=True)
    train_with_output = lambda: _train_here(run, False, None, Processes()) == 0  # noqa: E731
    for part, train in (("agent-0", lambda: train_run(run)), ("state", train_with_output)):
        (tensors,) = (run.checkpoint(ROUNDS) / part).glob("*.safetensors")
        data = bytearray(tensors.read_bytes())
        data[-1] ^= 1
        tensors.write_bytes(data)
        capsys.readouterr()
        assert train()
        said = capsys.readouterr().err
        assert "is damaged" in said
        assert f"checkpoint of round {ROUNDS - 1} is whole: later rounds are lost" in said
        assert_same(run, whole)
    for round_ in run.rounds():
        (run.checkpoint(round_) / "state" / "manifest.json").write_text("{")
    with pytest.raises(ArchiveError, match="is damaged"):
        train_run(run)


def test_whoever_reads_beside_a_writer_never_sees_damage(tmp_path: Path) -> None:
    place, before, over = tmp_path / "archive", tmp_path / "before", threading.Event()

    def write(number: int) -> None:
        tensors = {"a": torch.full((64,), float(number))}
        kept = before if number % 2 else None
        write_archive(place, kind="k", version=1, tensors=tensors, notes={"n": number}, before=kept)

    def writing() -> None:
        number = 0
        while not over.is_set():
            write(number := number + 1)

    write(0)
    writer = threading.Thread(target=writing)
    writer.start()
    try:
        for _ in range(READS):
            found = read_archive(place, kind="k", version=1)
            assert bool((found.tensors["a"] == found.notes["n"]).all())
    finally:
        over.set()
        writer.join()


READS = int(os.environ.get("ESPER_READS", "1000"))  # of `make fault`: ten thousand


def test_nothing_gets_its_name_before_it_has_reached_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is killed here: what the order protects from is a power cut."""
    synced: set[str] = set()
    early: list[str] = []
    fsync, replace = os.fsync, os.replace

    def syncing(handle: int) -> None:
        fsync(handle)
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))

    def replacing(source: Any, target: Any) -> None:
        early.extend([str(source)] if str(source) not in synced else [])
        synced.discard(str(source))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    grow(tmp_path / "run", 0, lambda: None)
    assert train_run(tiny_run(tmp_path / "training", rounds=1))
    assert not early
