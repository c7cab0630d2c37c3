"""A tick that is forgotten, wrong or incomplete says so; what it saw and did is kept by names."""

import json
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import esper
from esper.api import ForgottenTickWarning, FractionWarning, GrowingModel, score_of_loss, wrap
from esper.api.growing_model import UNTICKED_STEPS
from esper.api.ticking import GrowthDecision, measuring, slot_flow
from esper.kasmina.flow_statistics import flow_statistics
from esper.kasmina.gates import GateRules
from esper.leyline.errors import EsperError, OptimizerMismatchError
from esper.leyline.legality import Actions, Legality
from esper.leyline.signals import FLOW_STATISTICS, Signals
from esper.leyline.stages import SeedStage
from tests.api.tables import TRAIN, Script, accuracy, mlp, train_epoch, wrapped


def trained(**options: object) -> tuple[GrowingModel, torch.optim.Optimizer]:
    host = wrapped(**options)
    optimizer = host.optimizer(torch.optim.SGD, lr=0.01)
    train_epoch(host, optimizer)
    return host, optimizer


def test_steps_without_a_tick_are_noticed_once() -> None:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.SGD, lr=0.01)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(UNTICKED_STEPS - 1):
            optimizer.step()
        assert not seen
        for _ in range(50):
            optimizer.step()
    assert [each.category for each in seen] == [ForgottenTickWarning]
    assert "host.tick" in str(seen[0].message)


def test_ticks_that_stop_are_noticed() -> None:
    host, optimizer = trained()
    host.tick("never", train_loss=1.0, val_score=50.0)
    for _ in range(2):
        train_epoch(host, optimizer)
    with pytest.warns(ForgottenTickWarning):
        train_epoch(host, optimizer)


def test_ticks_that_stop_after_loading_are_noticed(tmp_path: Path) -> None:
    host, optimizer = trained()  # epochs of 4 steps
    host.tick("never", train_loss=1.0, val_score=50.0)
    train_epoch(host, optimizer)
    host.save(tmp_path / "host")
    again = wrapped()
    optimizer = again.optimizer(torch.optim.SGD, lr=0.01)
    again.load(tmp_path / "host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_epoch(again, optimizer)
    with pytest.warns(ForgottenTickWarning, match="^12 optimiser steps"):
        train_epoch(again, optimizer)
    fresh, optimizer = trained()  # saved before its first tick
    fresh.save(tmp_path / "fresh")
    again = wrapped()
    optimizer = again.optimizer(torch.optim.SGD, lr=0.01)
    again.load(tmp_path / "fresh")
    assert again.watch.steps == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_epoch(again, optimizer)


def test_an_optimiser_without_the_models_parameters_is_an_error() -> None:
    host = wrapped()
    with pytest.raises(OptimizerMismatchError, match="knows no optimiser"):
        host.tick("never", train_loss=1.0, val_score=50.0)
    half = torch.optim.SGD(list(host.model.parameters())[:2], lr=0.1)
    with pytest.raises(OptimizerMismatchError, match="missing"):
        host.track(half)
    optimizer = host.optimizer(torch.optim.SGD, lr=0.01)
    train_epoch(host, optimizer)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(OptimizerMismatchError, match="1 missing"):
        host.tick("never", train_loss=1.0, val_score=50.0)
    assert int(host.lifecycle.epoch) == 0


def test_training_with_another_optimiser_is_an_error() -> None:
    host = wrapped()
    host.optimizer(torch.optim.SGD, lr=0.01)
    train_epoch(host, torch.optim.SGD(host.parameters(), lr=0.01))
    with pytest.raises(OptimizerMismatchError, match="has made no step"):
        host.tick("never", train_loss=1.0, val_score=50.0)


@pytest.mark.parametrize("controller", ["heuristic", "race", "race:turns=true"])
def test_controllers_that_need_contributions_are_refused_without(controller: str) -> None:
    host, _ = trained()
    with pytest.raises(EsperError, match="pass evaluate="):
        host.tick(controller, train_loss=1.0, val_score=50.0)
    assert int(host.lifecycle.epoch) == 0
    host.tick(controller, train_loss=1.0, val_score=50.0, evaluate=lambda _: 50.0)


def test_without_evaluate_gates_that_need_contributions_are_off() -> None:
    host, optimizer = trained(rules=GateRules())
    lines = Script({1: ("plant", "2", "norm", "immediate"), 2: ("keep", "2")})
    host.tick(lines, train_loss=1.0, val_score=50.0)
    train_epoch(host, optimizer)
    tick = host.tick(lines, train_loss=1.0, val_score=50.0)
    assert tick.committed is None
    assert tick.contributions == {}
    assert host.seed_slots["2"].stage is SeedStage.FOSSILIZED


def test_with_evaluate_a_seed_that_harms_is_not_kept() -> None:
    host, optimizer = trained(rules=GateRules())
    lines = Script({1: ("plant", "2", "norm", "immediate"), 2: ("keep", "2")})
    scores = iter([40.0, 50.0])  # as it is; without the seed it is better
    host.tick(lines, train_loss=1.0, val_score=50.0, evaluate=lambda _: 50.0)
    train_epoch(host, optimizer)
    with pytest.raises(EsperError, match="contributes -10"):
        host.tick(lines, train_loss=1.0, evaluate=lambda _: next(scores))


def test_isolated_seeds_without_a_pass_of_their_own_are_noticed() -> None:
    host, optimizer = trained(isolation="dual_pass")
    lines = Script({1: ("plant", "2", "mlp", "ramp")})
    host.tick(lines, train_loss=1.0, val_score=50.0)
    optimizer.zero_grad()
    cross_entropy(host(TRAIN[0]), TRAIN[1]).backward()
    optimizer.step()
    with pytest.raises(EsperError, match=r"host\.seed_step"):
        host.tick(lines, train_loss=1.0, val_score=50.0)


def test_two_scores_that_are_not_the_same_are_refused() -> None:
    host, optimizer = trained()
    lines = Script({1: ("plant", "2", "norm", "immediate")})
    host.tick(lines, train_loss=1.0, val_score=50.0, evaluate=lambda _: 80.0)  # nothing to compare
    train_epoch(host, optimizer)
    with pytest.raises(EsperError, match="not the same score"):
        host.tick(lines, train_loss=1.0, val_score=50.0, evaluate=lambda _: 80.0)


def test_a_score_that_rounding_put_above_100_counts_as_100() -> None:
    host, optimizer = trained()
    score = 100.0 * torch.tensor(1.0000001)
    assert float(score) > 100.0
    assert host.tick("never", train_loss=1.0, val_score=score).score == 100.0
    train_epoch(host, optimizer)
    assert host.tick("never", train_loss=1.0, evaluate=lambda _: score).score == 100.0
    train_epoch(host, optimizer)
    with pytest.raises(EsperError, match="at most 100"):
        host.tick("never", train_loss=1.0, val_score=100.01)


class Counting(nn.Module):
    """Counts its passes in a buffer, those in evaluation too, and remembers the last input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = mlp(), None
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.last = x
        return self.body(x)  # type: ignore[no-any-return]


def test_measuring_leaves_buffers_as_they_were() -> None:
    host = wrap(Counting(), TRAIN[0][:5], slots=["body.2"], rules=GateRules.unmeasured())
    optimizer = host.optimizer(torch.optim.SGD, lr=0.01)
    lines = Script({1: ("plant", "body.2", "mlp", "immediate")})
    for epochs in (1, 2, 3):
        train_epoch(host, optimizer)
        last = host.model.last
        host.tick(lines, train_loss=1.0, evaluate=accuracy)
        assert host.model.passes == 4 * epochs
        assert host.model.last is last


class Watchful(Script):
    """At every decision, how many parameters of a seed that was taken out still exist."""

    def __init__(self, lines: Mapping[int, tuple[str, ...]]) -> None:
        super().__init__(lines)
        self.alive: list[int] = []
        self.gone: list[weakref.ref[nn.Parameter]] = []

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        self.alive.append(sum(each() is not None for each in self.gone))
        return super().act(signals, legality, starts)


def test_a_seed_that_comes_as_another_goes_is_a_change() -> None:
    lines = Watchful({1: ("plant", "2", "mlp", "immediate"), 2: ("prune", "2"),
                      3: ("plant", "5", "mlp", "ramp")})  # fmt: skip
    host, optimizer = trained()
    changed = []
    for _ in range(4):
        lines.gone = lines.gone or [weakref.ref(p) for p in host.slots.parameters()]
        tick = host.tick(lines, train_loss=1.0, val_score=50.0)
        changed.append(tick.changed)
        if tick.epoch == 3:
            assert str(tick.events[0]) == "2: PRUNED -> EMBARGOED (TIME)"
            assert str(tick.decision) == "plant mlp at 5 (ramp)"
        train_epoch(host, optimizer)
    assert changed == [True, False, True, False]
    # Held until they were compared, since new ones could get their places in memory; not longer.
    assert lines.alive == [0, 4, 4, 0]


def test_fractions_are_noticed() -> None:
    host, optimizer = trained()
    for _ in range(2):
        host.tick("never", train_loss=1.0, val_score=0.5)
        train_epoch(host, optimizer)
    with pytest.warns(FractionWarning, match="multiply fractions by 100"):
        host.tick("never", train_loss=1.0, val_score=0.5)


def test_the_last_tick_of_the_budget_takes_out_what_is_not_permanent() -> None:
    host, optimizer = trained(budget=esper.Budget(epochs=3))
    lines = Script({1: ("plant", "2", "mlp", "immediate")})
    for _ in range(3):
        tick = host.tick(lines, train_loss=1.0, evaluate=accuracy)
        train_epoch(host, optimizer)
    assert str(tick.decision) == "end"
    assert tick.added == 0
    assert not list(host.slots.parameters())
    with pytest.raises(EsperError, match="epochs are over"):
        host.tick(lines, train_loss=1.0, evaluate=accuracy)


def test_losses_become_scores() -> None:
    assert score_of_loss(0.0, 2.0) == 100.0
    assert score_of_loss(2.0, 2.0) == pytest.approx(36.79, abs=0.01)
    assert score_of_loss(1.0, 2.0) > score_of_loss(1.1, 2.0)
    with pytest.raises(EsperError, match="never negative"):
        score_of_loss(-1.0, 2.0)


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (GrowthDecision("WAIT"), "wait"),
        (GrowthDecision("END"), "end"),
        (GrowthDecision("GERMINATE", "a.b", "mlp", "RAMP"), "plant mlp at a.b (ramp)"),
        (GrowthDecision("ADVANCE", "rnn@0", "norm"), "blend in norm at rnn@0"),
        (GrowthDecision("FOSSILIZE", "2", "mlp"), "keep mlp at 2"),
        (GrowthDecision("PRUNE", "2", "mlp"), "prune mlp at 2"),
    ],
)
def test_decisions_are_kept_by_names_and_said_in_words(
    decision: GrowthDecision, words: str
) -> None:
    assert str(decision) == words
    assert GrowthDecision(**json.loads(json.dumps(asdict(decision)))) == decision


def test_flow_is_measured_where_the_slots_are_before_the_seeds_act() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(1, 6, 3), nn.ReLU(), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(36, 4)
    )
    x = torch.randn(12, 1, 8)
    host = esper.wrap(net, sample=x, slots=["1", "2"])
    buffers = [buffer.clone() for buffer in host.buffers()]
    with measuring(host):
        found = slot_flow(host)
        expected = [
            flow_statistics(net[:2](x)[None], 1)[0],
            flow_statistics(net[:3](x)[None], 1)[0],
        ]
    assert found.shape == (1, 2, len(FLOW_STATISTICS))
    torch.testing.assert_close(found[0], torch.stack(expected).double())
    assert bool(found.isfinite().all())
    assert all(map(torch.equal, buffers, host.buffers()))
    assert not net[1]._forward_hooks, "nothing is left behind"


def test_dense_activations_have_no_roughness() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    host = esper.wrap(net, sample=torch.randn(9, 5), slots=["1"])
    with measuring(host):
        found = dict(zip(FLOW_STATISTICS, slot_flow(host)[0, 0].tolist(), strict=True))
    assert found.pop("roughness") != found["spread"]
    assert all(value == value for value in found.values())
