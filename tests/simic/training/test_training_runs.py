"""A run's folder: a checkpoint is whole or absent at every moment."""

import shutil
from pathlib import Path

import pytest
import torch

from esper.archive import write_archive
from esper.simic.training import RunFolder
from tests.simic.training.tiny import tiny_run


def write_checkpoint(run: RunFolder, value: float) -> None:
    part = run.begin_checkpoint(1) / "agent-0"
    write_archive(part, kind="part", version=1, tensors={"x": torch.tensor(value)}, notes={})
    run.finish_checkpoint(1, {"x": torch.tensor(value)}, {"eval_history": []})


def test_checkpoint_of_same_round_is_replaced_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path / "run")
    write_checkpoint(run, 1.0)
    remove, place = shutil.rmtree, run.checkpoint(1)

    def killed(path: Path, **how: object) -> None:
        if (Path(path) / "agent-0").exists():  # of a whole one: its parts go one by one
            remove(Path(path) / "agent-0")
            raise KeyboardInterrupt
        remove(path, **how)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(run, 2.0)
    monkeypatch.undo()
    assert place.is_dir()
    assert float(run.read_checkpoint(1).tensors["x"]) == 2.0
    run.clear_unfinished()
    assert [each.name for each in place.parent.iterdir()] == [place.name]
