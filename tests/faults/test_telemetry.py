"""Telemetry may fail; the story of a run may not be false."""

import os
import shutil
from pathlib import Path
from signal import SIGINT

import pytest

from esper.nissa import Noted, RunLayout, RunReader, RunStore
from esper.simic.training import GracefulShutdown, RunFolder, train_run
from tests.programs import esper_here
from tests.simic.training.tiny import kept, tiny_run


def test_a_run_whose_telemetry_is_damaged_goes_on_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = (tiny_run(tmp_path / name, rounds=2) for name in ("whole", "run"))
    assert train_run(whole)
    stop = GracefulShutdown(say=False)
    assert not train_run(run, on_round=lambda report: vars(stop).update(signal=SIGINT), stop=stop)
    (run.path / "events.sqlite").write_bytes(b"no database" * 100)
    capsys.readouterr()
    assert train_run(RunFolder.open(run.path))
    assert "goes on without telemetry of its own" in capsys.readouterr().err
    assert kept(run) == kept(whole)
    told = esper_here("show", run.path)
    assert "2 of 2 rounds" in " ".join(told.stdout.split())
    assert "The telemetry cannot be read" in " ".join(told.stdout.split())


def test_a_copy_that_cannot_be_written_to_is_read_with_what_its_writer_left_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    store = RunStore(tmp_path / "run", RunLayout((), (), ()))
    store.write([Noted(round=1, text="kept in the log")])
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy, ignore=shutil.ignore_patterns("*-shm"))
    store.close()
    before = {file.name for file in copy.iterdir()}
    assert "events.sqlite-wal" in before
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != copy)
    with RunReader(copy) as reader:
        assert [row["text"] for row in reader.each("notes")] == ["kept in the log"]
    assert {file.name for file in copy.iterdir()} == before
