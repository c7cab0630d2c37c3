"""A run in the greenhouse: several populations in one update, judged, stopped and resumed."""

from dataclasses import replace
from pathlib import Path
from signal import SIGINT
from typing import Any

import pytest
import torch

from esper.garden import LAYOUT, Greenhouse
from esper.garden.playing import Playground
from esper.garden.suites import find_suite
from esper.nissa import RunReader
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.processes import ALONE
from esper.simic.training import RoundReport, RunFolder, selection, train_run
from esper.simic.training.run_processes import Stopping
from esper.simic.training.selection import PlotJudge
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
    plots=2,
    players=2,
    horizon=8,
    watched=0,
    evaluation=replace(TINY.evaluation, every=2, baselines=("audition",)),
)


@pytest.fixture(autouse=True, scope="module")
def _few_worlds() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.simic.training.selection.LISTED", 1)
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", 2)
        yield


def small_run(path: Path) -> RunFolder:
    return RunFolder.create(path, SMALL, {})


@pytest.fixture(scope="module")
def reports() -> list[RoundReport]:
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, reports: list[RoundReport]) -> RunFolder:
    run = small_run(tmp_path_factory.mktemp("greenhouse") / "run")
    assert train_run(run, listener=reports.append)
    return run


@pytest.mark.slow
def test_one_update_learns_from_hosts_of_several_shapes(
    whole: RunFolder, reports: list[RoundReport]
) -> None:
    assert [report.round for report in reports] == [1, 2]
    for report in reports:
        assert report.metrics is not None
        assert report.metrics["valid_steps"] > 0
        assert report.metrics["optimizer_steps"] > 0
        assert len(report.stages) > 1  # kinds of hosts
    assert reports[1].judgement is not None
    assert reports[1].judgement.scores.shape == (1, 1)


@pytest.mark.slow
def test_the_mean_return_of_every_round_is_told(whole: RunFolder) -> None:
    with RunReader(whole.path) as reader:
        told = reader.query("select round, value from samples where name = 'return'").rows
    assert [round_ for round_, _ in told] == [1, 2]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(whole: RunFolder, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    stop = Stopping(say=False)
    assert not train_run(run, listener=lambda report: vars(stop).update(signal=SIGINT), stop=stop)
    assert run.rounds() == [0, 1]
    assert train_run(run)
    assert kept(run) == kept(whole)


def test_untrained_and_greedy_it_is_judged_as_the_rule() -> None:
    torch.manual_seed(0)
    judge = PlotJudge(1, SMALL.horizon, ALONE)
    ours = judge.judge(TokenController(TokenActorCritic(LAYOUT)))
    theirs = judge.judge(Audition(ATTENTIVE))
    assert torch.equal(ours.scores, theirs.scores)
    assert ours.contexts == ("validation-0-0",)


def test_its_best_agent_has_a_network_over_tokens(whole: RunFolder) -> None:
    assert isinstance(PPOAgent.load(whole.best).network, TokenActorCritic)


def test_its_suite_lists_the_worlds_for_validation() -> None:
    worlds = tuple(plot.contexts[0] for plot in Greenhouse.listed("validation"))
    assert find_suite("greenhouse").training == worlds


def test_an_agent_is_told_the_rent_that_it_is_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, told = PlotJudge(1, SMALL.horizon, ALONE), []

    class Ground(Playground):
        def __init__(self, *given: Any, **how: Any) -> None:
            super().__init__(*given, **how)
            told.append(self.rent)

    monkeypatch.setattr(selection, "Playground", Ground)
    monkeypatch.setattr(judge, "plots", [replace(judge.plots[0], rent=3.7)])
    judge.judge(NeverGrow())
    assert told == [3.7]
