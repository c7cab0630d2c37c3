"""What CONTRIBUTING says about adding a task, followed to the end: trained on and grown on."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from esper.garden import FAMILIES, DataFamily, find_suite, load_suite, register_family
from esper.leyline.errors import DataError, DuplicateNameError, EsperError, UnknownNameError
from esper.simic.training import RunFolder
from esper.tolaria import tasks
from tests.programs import esper_here

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10))
"""
# So small that it takes seconds; nothing that the page says depends on it.
SMALL = {
    "train": "--rounds 1 --envs 4 --horizon 6 --seeds-per-context 1 --lstm 16 "
    "--ppo.minibatches 1 --quiet --processes 1 --evaluation.seeds 1 --evaluation.baselines random",
    "grow": "--budget.epochs 6 --quiet",
}


def blocks(kind: str) -> list[str]:
    section = PAGE.read_text(encoding="utf-8").partition("## Add a task")[2]
    found: list[str] = re.findall(rf"```{kind}\n(.*?)```", section, re.S)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    family, task = blocks("python")
    (tmp_path / "sign.py").write_text(family, encoding="utf-8")
    (tmp_path / "own_task.py").write_text(task, encoding="utf-8")
    (tmp_path / "signs.toml").write_text(blocks("toml")[0], encoding="utf-8")
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", 2)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    FAMILIES.pop("sign", None)
    for name in ("sign", "net", "own_task"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_family_of_ones_own_is_trained_on_and_grown_on(folder: Path) -> None:
    train, grow = (shlex.split(line) for line in blocks("sh")[0].splitlines())
    told = esper_here(*train[1:], *SMALL["train"].split())
    assert told.returncode == 0, told.stderr
    run = RunFolder.open(folder / "runs" / "signs")
    assert [context.source.family for context in run.suite.training] == ["sign", "sign"]
    assert run.rounds() == [0, 1]
    told = esper_here(*grow[1:], *SMALL["grow"].split())
    assert told.returncode == 0, told.stderr
    assert (folder / "runs" / "net" / "report.txt").is_file()


def test_a_task_of_ones_own_is_grown_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_REGISTRY", dict(tasks._REGISTRY))
    told = esper_here(
        "grow", "net.py:Net", "--data", "own_task.py:task", "--out", "grown",
        *SMALL["grow"].split(),
    )  # fmt: skip
    assert told.returncode == 0, told.stderr


def test_a_suite_remembers_where_its_code_is(folder: Path) -> None:
    suite = find_suite("signs.toml")
    assert suite.code == (str(folder / "sign.py"),)
    assert type(suite).from_dict(suite.to_dict()) == suite
    FAMILIES.pop("sign")
    sys.modules.pop("sign")
    assert load_suite(folder / "signs.toml") == suite, "its code is run where it was not"


def test_code_that_is_missing_or_fails_is_told_in_one_sentence(folder: Path) -> None:
    (folder / "sign.py").write_text("import nothing_like_it\n", encoding="utf-8")
    with pytest.raises(EsperError, match=r"signs\.toml.*cannot be imported.*\(line 1\)"):
        load_suite(folder / "signs.toml")
    (folder / "sign.py").unlink()
    with pytest.raises(EsperError, match=r"no Python file for the suite; given: .*sign\.py"):
        load_suite(folder / "signs.toml")
    (folder / "signs.toml").write_text('name = "x"\ncode = "sign.py"\ntraining = []\n')
    with pytest.raises(DataError, match=r"Wrong type of code in a suite; given: .sign\.py"):
        load_suite(folder / "signs.toml")


def test_a_family_that_does_not_fit_is_refused(folder: Path) -> None:
    find_suite("signs.toml")
    sign = FAMILIES["sign"]
    with pytest.raises(DuplicateNameError, match="'sign' is already registered"):
        register_family("sign", sign)
    strange = DataFamily(summary="", generate=sign.generate, defaults={"volume": 1.0})
    with pytest.raises(UnknownNameError, match="parameter of a family; given: 'volume'"):
        register_family("strange", strange)
    long = DataFamily(
        summary="",
        generate=lambda samples, seed, _: (torch.zeros(samples, 41), torch.zeros(samples)),
        defaults={},
    )
    with pytest.raises(DataError, match=r"given: inputs \[2, 41\], .*valid: \[2, 40\]"):
        register_family("long", long)
    assert "long" not in FAMILIES
