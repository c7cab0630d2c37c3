"""A run in the greenhouse: several populations in one update, judged, stopped and resumed."""

from dataclasses import replace
from pathlib import Path
from signal import SIGINT
from typing import Any

import pytest
import torch

from esper.distributed import SINGLE_PROCESS
from esper.garden import LAYOUT, Greenhouse
from esper.garden.playing import Playground
from esper.garden.suites import find_suite
from esper.nissa import RunReader
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import GracefulShutdown, RoundReport, RunFolder, evaluator, train_run
from esper.simic.training.evaluator import GreenhouseEvaluator
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers import TokenController
from esper.tamiyo.controllers.auditioning import ATTENTIVE, Audition
from esper.tamiyo.controllers.rules import NeverGrow
from tests.simic.training.tiny import TINY, kept

SMALL = replace(
    TINY,
    suite="greenhouse",
    rounds=2,
    seed=8,
    envs=4,
    populations=2,
    rollouts_per_case=2,
    horizon=8,
    logged_envs=0,
    evaluation=replace(TINY.evaluation, every=2, baselines=("audition",)),
)


@pytest.fixture(autouse=True, scope="module")
def _few_worlds() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.simic.training.evaluator.LISTED", 1)
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", 2)
        yield


def small_run(path: Path) -> RunFolder:
    return RunFolder.create(path, SMALL, {})


@pytest.fixture(scope="module")
def reports() -> list[RoundReport]:
    return []


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, reports: list[RoundReport]) -> RunFolder:
    run = small_run(tmp_path_factory.mktemp("greenhouse") / "run")
    assert train_run(run, on_round=reports.append)
    return run


def test_update_uses_hosts_of_several_shapes(
    finished_run: RunFolder, reports: list[RoundReport]
) -> None:
    assert [report.round for report in reports] == [1, 2]
    for report in reports:
        assert report.metrics is not None
        assert report.metrics["valid_steps"] > 0
        assert report.metrics["optimizer_steps"] > 0
        assert len(report.stages) > 1  # kinds of hosts
    assert reports[1].evaluation is not None
    assert reports[1].evaluation.scores.shape == (1, 1)


def test_mean_return_of_every_round_is_logged(finished_run: RunFolder) -> None:
    with RunReader(finished_run.path) as reader:
        told = reader.query("select round, value from samples where name = 'return'").rows
    assert [round_ for round_, _ in told] == [1, 2]


def test_resumed_run_matches_uninterrupted_run(finished_run: RunFolder, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    stop = GracefulShutdown(say=False)
    assert not train_run(run, on_round=lambda report: vars(stop).update(signal=SIGINT), stop=stop)
    assert run.rounds() == [0, 1]
    assert train_run(run)
    assert kept(run) == kept(finished_run)


def test_untrained_greedy_network_scores_like_the_rule() -> None:
    torch.manual_seed(0)
    validation = GreenhouseEvaluator(1, SMALL.horizon, SINGLE_PROCESS)
    network = validation.evaluate(TokenController(TokenActorCritic(LAYOUT)))
    rule = validation.evaluate(Audition(ATTENTIVE))
    assert torch.equal(network.scores, rule.scores)
    assert network.contexts == ("validation-0-0",)


def test_best_agent_has_a_token_network(finished_run: RunFolder) -> None:
    assert isinstance(PPOAgent.load(finished_run.best).network, TokenActorCritic)


def test_greenhouse_suite_lists_the_validation_contexts() -> None:
    worlds = tuple(plot.contexts[0] for plot in Greenhouse.listed("validation"))
    assert find_suite("greenhouse").training == worlds


def test_evaluator_uses_the_rent_of_the_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    validation = GreenhouseEvaluator(1, SMALL.horizon, SINGLE_PROCESS)
    rents = []

    class Ground(Playground):
        def __init__(self, *given: Any, **how: Any) -> None:
            super().__init__(*given, **how)
            rents.append(self.rent)

    monkeypatch.setattr(evaluator, "Playground", Ground)
    monkeypatch.setattr(validation, "plots", [replace(validation.plots[0], rent=3.7)])
    validation.evaluate(NeverGrow())
    assert rents == [3.7]
