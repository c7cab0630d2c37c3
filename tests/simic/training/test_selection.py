"""Judging: what the best episode's seeds are worth, without touching anything else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from esper.garden.attribution import leave_one_out
from esper.leyline.stages import SeedStage
from esper.nissa import Attributed, RunReader
from esper.simic.training import Trainer, selection
from esper.tamiyo.controllers import Arm, FixedSchedule, make_controller
from tests.simic.training.tiny import tiny_run

ARMS = (
    Arm(slot="early", blueprint="mlp", blend="immediate", epoch=3),
    Arm(slot="mid", blueprint="mlp", blend="immediate", epoch=4),
)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    trainer = Trainer(tiny_run(tmp_path / "run", horizon=9))
    trainer.controls.require(trainer.judge.cases)
    return trainer


def test_the_values_of_the_best_episode_sum_to_what_its_seeds_gain(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, gained = selection.attribution, {}

    def of(population: Any, row: int, job: Any, score: float) -> Attributed:
        slots = population.lifecycle.shape[1]
        off = torch.stack([torch.zeros(slots, dtype=torch.bool), torch.ones(slots).bool()])
        whole, none = population.counterfactual(
            torch.tensor([row, row]), off, "validation"
        ).accuracy
        gained[job.case.context.name, score] = float(whole) - float(none)
        found = alone(population, row, job, score)
        left_out = leave_one_out(population, row)
        assert torch.equal(torch.as_tensor(found.left_out), left_out[~left_out.isnan()])
        assert bool(population.lifecycle.at(SeedStage.FOSSILIZED)[row].any())
        return found

    monkeypatch.setattr(selection, "attribution", of)
    judged = trainer.judge.judge(FixedSchedule(ARMS), attribute=True)
    best = judged.best
    assert best is not None
    assert best.score == float(judged.scores.max())
    assert len(best.slot) == 2
    assert float(best.shapley.sum()) == pytest.approx(gained[best.context, best.score], abs=1e-4)


def test_finding_it_out_changes_no_score_and_nothing_grown_has_none(trainer: Trainer) -> None:
    controller = FixedSchedule(ARMS)
    plain = trainer.judge.judge(controller)
    found = trainer.judge.judge(controller, attribute=True)
    again = trainer.judge.judge(controller)
    assert plain.best is None
    assert torch.equal(plain.scores, found.scores)
    assert torch.equal(plain.scores, again.scores)
    nothing = trainer.judge.judge(make_controller("never"), attribute=True)
    assert nothing.best is None


def test_a_run_tells_what_its_best_episodes_seeds_are_worth(
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
