"""Evaluation during training: contributions of the best episode's seeds, and unchanged scores."""

from pathlib import Path
from typing import Any

import pytest
import torch

from esper.garden.attribution import leave_one_out
from esper.leyline.stages import SeedStage
from esper.nissa import Attributed, RunReader
from esper.simic.training import Trainer, evaluator
from esper.tamiyo.controllers import Arm, FixedSchedule, make_controller
from tests.simic.training.tiny import tiny_run

ARMS = (
    Arm(slot="early", blueprint="mlp", blend="immediate", epoch=3),
    Arm(slot="mid", blueprint="mlp", blend="immediate", epoch=4),
)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    trainer = Trainer(tiny_run(tmp_path / "run", horizon=9))
    trainer.controls.require(trainer.cases)
    return trainer


def test_shapley_values_of_best_episode_sum_to_its_gain(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = evaluator.seed_attribution
    gains: dict[tuple[str, float], float] = {}

    def checked_attribution(population: Any, row: int, job: Any, score: float) -> Attributed:
        num_slots = population.lifecycle.shape[1]
        without_seeds = torch.ones(num_slots, dtype=torch.bool)
        off = torch.stack([~without_seeds, without_seeds])
        rows = torch.tensor([row, row])
        full, bare = population.counterfactual(rows, off, "validation").accuracy
        gains[job.case.context.name, score] = float(full) - float(bare)

        event = original(population, row, job, score)
        left_out = leave_one_out(population, row)
        assert torch.equal(torch.as_tensor(event.left_out), left_out[~left_out.isnan()])
        assert bool(population.lifecycle.at(SeedStage.FOSSILIZED)[row].any())
        return event

    monkeypatch.setattr(evaluator, "seed_attribution", checked_attribution)
    result = trainer.evaluator.evaluate(FixedSchedule(ARMS), attribute=True)
    best = result.best_episode
    assert best is not None
    assert best.score == float(result.scores.max())
    assert len(best.slot) == 2
    assert float(best.shapley.sum()) == pytest.approx(gains[best.context, best.score], abs=1e-4)


def test_attribution_changes_no_score(trainer: Trainer) -> None:
    controller = FixedSchedule(ARMS)
    before = trainer.evaluator.evaluate(controller)
    attributed = trainer.evaluator.evaluate(controller, attribute=True)
    after = trainer.evaluator.evaluate(controller)
    assert before.best_episode is None
    assert torch.equal(before.scores, attributed.scores)
    assert torch.equal(before.scores, after.scores)


def test_controller_that_never_grows_has_no_best_episode(trainer: Trainer) -> None:
    result = trainer.evaluator.evaluate(make_controller("never"), attribute=True)
    assert result.best_episode is None


def test_run_logs_contributions_of_best_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "esper.simic.training.trainer.controller_of_network", lambda network: FixedSchedule(ARMS)
    )
    run = tiny_run(tmp_path / "run", horizon=9, rounds=2)
    trainer = Trainer(run)
    assert trainer.begin()
    assert trainer.train()
    trainer.close()
    with RunReader(run.path) as reader:
        rows = list(reader.each("attributions"))
        (best,) = reader.query(
            "select max(score) from evaluations where round = 2 and context != 'all'"
        ).rows[0]
    assert [row["slot"] for row in rows] == ["early", "mid"]
    assert {row["round"] for row in rows} == {2}
    assert {row["blueprint"] for row in rows} == {"mlp"}
    assert rows[0]["score"] == pytest.approx(best)
