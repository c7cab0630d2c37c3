"""The text of print(run): fresh, loaded, resumed, of an older version, with every metric."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.api import GrownRun, load_run
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.auditioning import Audition
from tests.api.tables import FEATURES, INPUTS, TRAIN, VAL, mlp, remove_notes

EPOCHS = 12
COPIED = (2, 4, 6)  # epochs after which the run is copied: in the audition, after trials, later
MAX_LINES, MAX_WIDTH = 12, 100


def grown(**options: Any) -> GrownRun:
    usual: dict[str, Any] = {
        "loss": "cross_entropy",
        "budget": esper.Budget("+120%", EPOCHS),
        "slots": ["2", "5"],
        "batch_size": 16,
        "quiet": True,
    }
    return esper.grow(mlp(), TRAIN, VAL, **usual | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> GrownRun:
    """A run with an audition, copied as it was after some epochs."""

    def copy(record: dict[str, Any]) -> None:
        if record["epoch"] in COPIED:
            shutil.copytree(folder / "run", folder / f"epoch{record['epoch']}")

    return grown(out=folder / "run", test=VAL, on_epoch=copy)


def assert_fits(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_WIDTH


def test_printed_run_fits_twelve_lines(run: GrownRun) -> None:
    assert_fits(str(run))
    added = sum(p.numel() for p in run.export().parameters()) - 171
    first, scores, cost, *_ = str(run).splitlines()
    share = f"+{100 * added / 171:.1f} %"
    assert (
        first == f"Sequential: 171 → {171 + added} parameters ({share}, budget +120 %), 12 epochs"
    )
    assert f"{run.before['score']:.1f} % → {run.after['score']:.1f} %" in scores
    assert scores.endswith(f"test accuracy: {run.after['test_score']:.1f} %")
    ratio = run.report().relative_cost
    assert ratio is not None
    assert ratio > 1.2, "shadows and trials count"
    assert cost == f"cost: {ratio:.1f}× the FLOPs of plain training for 12 epochs"


def test_printed_run_has_a_row_for_every_addition(run: GrownRun) -> None:
    rows = [line.split() for line in str(run).splitlines()[5:]]
    assert rows
    assert {(row[0], row[1], row[2]) for row in rows} == {
        (seed.blueprint, seed.slot, f"+{seed.params}") for seed in run.report().grown
    }
    for row in rows:
        contribution = run.contributions[row[1]]
        assert float(row[3].replace("−", "-")) == pytest.approx(contribution.value, abs=0.05)
        assert row[4] == "±"
        assert float(row[5]) == pytest.approx(contribution.standard_error, abs=0.05)


def test_loaded_run_prints_like_the_fresh_one(run: GrownRun, folder: Path) -> None:
    loaded = load_run(folder / "run", mlp(start=7))
    assert str(loaded) == str(run)
    assert repr(loaded) == repr(run)


@pytest.mark.parametrize("epoch", COPIED)
def test_resumed_run_prints_like_the_uninterrupted_one(
    run: GrownRun, folder: Path, epoch: int
) -> None:
    unfinished = load_run(folder / f"epoch{epoch}", mlp())
    assert f"{epoch} of 12 epochs" in str(unfinished)
    assert_fits(str(unfinished))
    resumed = esper.resume(folder / f"epoch{epoch}", mlp(), TRAIN, VAL, test=VAL, quiet=True)
    assert str(resumed) == str(run)


def test_run_of_an_older_version_prints_without_standard_error(
    run: GrownRun, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "run", tmp_path / "old")
    remove_notes(tmp_path / "old", "contributions")
    old = str(load_run(tmp_path / "old", mlp()))
    assert old.splitlines()[:5] == str(run).splitlines()[:5]
    assert "±" in str(run)
    assert "±" not in old


def test_run_without_additions_says_so_when_printed() -> None:
    text = str(grown(controller="never", budget=esper.Budget("+120%", 2)))
    assert "171 → 171 parameters (+0.0 %" in text
    assert "cost: 1.0× the FLOPs of plain training for 2 epochs" in text
    assert text.splitlines()[-1] == "Nothing was added; no seed was planted."


def test_run_with_failed_trials_names_the_closest() -> None:
    demanding = make_controller("audition:spend=50")
    assert isinstance(demanding, Audition)
    object.__setattr__(demanding.config, "ahead", 9.0)  # no trial reaches that
    run = grown(controller=demanding)
    trials = run.report().trials
    assert trials
    best = min(trials, key=lambda trial: trial.val_loss)
    losses = f"validation loss {best.val_loss:.4g}, {best.val_loss_without:.4g} without"
    sentence = str(run).replace("\n  ", " ")
    assert f"Nothing was added; {' and '.join(best.seeds)} came closest ({losses})." in sentence


def regression() -> dict[str, Any]:
    torch.manual_seed(0)
    targets = INPUTS[:, :1] * INPUTS[:, 1:2]
    return {
        "model": nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1)),
        "train": (INPUTS, targets),
        "val": (INPUTS, targets),
        "loss": "mse",
    }


def negative_error(outputs: Tensor, targets: Tensor) -> float:
    return 100.0 - float((outputs - targets).abs().mean())


@pytest.mark.parametrize(
    ("metric", "scores", "unit"),
    [
        ("loss", "validation loss: ", "(validation loss added if removed)"),
        (negative_error, "validation score: ", "(score points lost if removed)"),
    ],
)
def test_printed_regression_has_the_unit_of_its_metric(metric: Any, scores: str, unit: str) -> None:
    run = esper.grow(
        **regression(), metric=metric, budget=esper.Budget("+120%", 8), slots=["1"], lr=1e-2,
        controller="fixed:slot=1,blueprint=lowrank,epoch=1", quiet=True,
    )  # fmt: skip
    lines = str(run).splitlines()
    assert lines[1].startswith(scores)
    assert "%" not in lines[1]
    assert lines[4].endswith(unit)
    assert "accuracy" not in str(run)


def test_repr_of_run_names_model_parameters_and_score(run: GrownRun) -> None:
    after = sum(p.numel() for p in run.export().parameters())
    score = f"accuracy {run.after['score']:.1f} %"
    assert repr(run) == f"<GrownRun Sequential: 171 → {after} parameters, {score}>"
    assert repr(run.report()) == repr(run).replace("GrownRun", "Report")


def test_report_still_prints_the_long_text(run: GrownRun) -> None:
    text = str(run.report())
    assert "within the budget" in text
    assert "grown:" in text
    assert "decisions:" in text
