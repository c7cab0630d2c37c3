"""A loop of one's own keeps its shape: groups, schedulers, accumulation, AMP, compile, DDP."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import esper
from esper.api import GrowingModel, Tick
from esper.kasmina.gates import GateRules
from esper.leyline.stages import SeedStage
from tests.api.tables import (
    INPUTS,
    TRAIN,
    Script,
    accuracy,
    mlp,
    require_same,
    states,
    train_epoch,
    wrapped,
)

GROWS = Script(
    {1: ("plant", "2", "mlp", "ramp"), 2: ("blend in", "2"), 5: ("keep", "2"),
     6: ("plant", "5", "norm", "gate"), 7: ("prune", "5")}
)  # fmt: skip
EPOCHS = 8


def live(
    host: GrowingModel, train: Callable[[], float], **more: Any
) -> tuple[list[Tick], list[SeedStage]]:
    """Grow by the script; returns the ticks, and the stages of the first slot."""
    ticks, stages = [], []
    for _ in range(EPOCHS):
        ticks.append(host.tick(GROWS, train_loss=train(), evaluate=accuracy, **more))
        stages.append(host.seed_slots["2"].stage)
    return ticks, stages


def test_four_calls_grow_a_model() -> None:
    rules = GateRules.unmeasured()
    host = esper.wrap(mlp(), sample=INPUTS[:4], slots=["2", "5"], budget="+300%", rules=rules)
    optimizer = host.optimizer(torch.optim.AdamW, lr=0.01)
    ticks, stages = live(host, lambda: train_epoch(host, optimizer))
    assert stages[0] is SeedStage.TRAINING
    assert stages[-1] is SeedStage.FOSSILIZED
    assert [tick.changed for tick in ticks] == [True, *[False] * 4, True, True, False]
    assert str(ticks[0].decision) == "plant mlp at 2 (ramp)"
    assert str(ticks[4].decision) == "keep mlp at 2"
    assert "2: HOLDING -> FOSSILIZED (FOSSILIZE)" in map(str, ticks[4].events)
    plain = host.export()
    x = TRAIN[0][:7]
    with host.committed():
        assert torch.equal(plain.eval()(x), host.eval()(x))


@pytest.mark.parametrize("isolation", ["straight_through", "dual_pass"])
def test_isolated_seeds_learn_and_the_host_does_not_notice(isolation: str) -> None:
    torch.manual_seed(3)
    alone = mlp()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for _ in range(3):
        train_epoch(alone, optimizer)
    torch.manual_seed(3)
    host = wrapped(isolation=isolation)
    optimizer = host.optimizer(torch.optim.Adam, lr=0.01)
    plant = Script({1: ("plant", "2", "mlp", "ramp")})
    newborn = None
    for _ in range(3):
        loss = train_epoch(host, optimizer)
        host.tick(plant, train_loss=loss, evaluate=accuracy)
        newborn = newborn or copy.deepcopy(dict(host.slots.named_parameters()))
    assert newborn
    moved = {name: p for name, p in host.slots.named_parameters() if not p.equal(newborn[name])}
    assert moved
    require_same(alone.state_dict(), host.model.state_dict())


def test_contributions_are_the_score_with_a_seed_minus_without() -> None:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.Adam, lr=0.05)
    lines = {1: ("plant", "2", "mlp", "immediate"), 2: ("plant", "5", "mlp", "immediate"),
             3: ("keep", "2")}  # fmt: skip
    for _ in range(5):
        loss = train_epoch(host, optimizer)
        host.eval()
        with torch.no_grad(), host.without("2"):
            without = accuracy(host)
        with torch.no_grad(), host.committed():
            committed = accuracy(host)
        with torch.no_grad():
            whole = accuracy(host)
        seen = host.seed_slots["2"].seed is not None
        tick = host.tick(Script(lines), train_loss=loss, evaluate=accuracy)
    assert seen
    assert tick.score == whole
    assert tick.committed == committed
    assert tick.contributions["2"] == whole - without
    assert set(tick.contributions) == {"2", "5"}
    assert host.seed_slots["2"].seed.contribution == whole - without  # type: ignore[union-attr]


def test_measuring_leaves_modes_and_random_numbers_alone() -> None:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.Adam, lr=0.05)
    host.model[1].eval()  # a frozen normalisation stays frozen

    def score(model: nn.Module) -> float:
        torch.rand(3)
        assert not any(module.training for module in model.modules())
        return accuracy(model)

    lines = Script({1: ("plant", "2", "mlp", "immediate")})
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(host(TRAIN[0]), TRAIN[1]).backward()
        optimizer.step()
        before = torch.get_rng_state()
        modes = [module.training for module in host.modules()]
        host.tick(lines, train_loss=1.0, evaluate=score)
        assert torch.equal(before, torch.get_rng_state())
        kept = [module.training for module in host.modules()][: len(modes)]
        assert sorted(kept) == sorted(modes)


def test_groups_and_schedulers_go_on_as_seeds_join_and_leave() -> None:
    host = wrapped()
    weights = [p for p in host.model.parameters() if p.dim() > 1]
    others = [p for p in host.model.parameters() if p.dim() < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.002}]
    optimizer = host.optimizer(torch.optim.AdamW, groups=groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        loss = train_epoch(host, optimizer)
        schedule.step()
        host.tick(GROWS, train_loss=loss, evaluate=accuracy)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in host.parameters()}
        assert {id(p) for p in optimizer.state} <= held
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.0, 0.0, 0.0])
    assert len(optimizer.param_groups[0]["params"]) == len(weights) + len(
        list(host.slots.parameters())
    )


def test_tracking_an_optimiser_twice_is_tracking_it_once() -> None:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.SGD, lr=0.01)
    groups = len(optimizer.param_groups)
    host.track(optimizer)
    assert len(optimizer.param_groups) == groups
    host.germinate("2", "mlp", "immediate")
    train_epoch(host, optimizer)
    assert host.watch.steps == len(TRAIN[0]) // 16
    host.prune("2")
    host.pass_time()


def test_an_optimiser_made_when_seeds_exist_knows_their_rates() -> None:
    host = wrapped()
    host.germinate("2", "norm", "immediate")  # has a scalar gate, which learns faster
    optimizer = host.optimizer(torch.optim.SGD, lr=0.01)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.1])
    assert len(optimizer.param_groups[1]["params"]) == 1


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    def grown(parts: int) -> GrowingModel:
        host = wrapped(isolation="dual_pass")
        host.model[3].p = 0.0
        host.model[1].eval()
        optimizer = host.optimizer(torch.optim.SGD, lr=0.05)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            for x, y in zip(TRAIN[0].chunk(parts), TRAIN[1].chunk(parts), strict=True):
                (cross_entropy(host(x), y) / parts).backward()
                host.seed_step(lambda x=x, y=y: cross_entropy(host(x), y) / parts)
            optimizer.step()
            host.tick(GROWS, train_loss=1.0, evaluate=accuracy)
        return host

    whole, parts = grown(1), grown(4)
    assert [p.shape for p in whole.parameters()] == [p.shape for p in parts.parameters()]
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("isolation", ["straight_through", "dual_pass"])
def test_mixed_precision_with_a_gradient_scaler(isolation: str) -> None:
    host = wrapped(isolation=isolation)
    optimizer = host.optimizer(torch.optim.Adam, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(host(TRAIN[0]), TRAIN[1])

    def train() -> float:
        optimizer.zero_grad()
        value = loss()
        scaler.scale(value).backward()
        if isolation == "dual_pass":
            host.seed_step(loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        return value.item()

    _, stages = live(host, train)
    assert stages[-1] is SeedStage.FOSSILIZED
    assert 0.0 < float(host.memory.window.state_dict()["host_gradient"]) < 50.0  # unscaled
    assert all(p.dtype is torch.float32 and p.isfinite().all() for p in host.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["straight_through", "dual_pass"])
def test_a_compiled_host_grows_like_one_that_is_not(isolation: str) -> None:
    def grown(compiled: bool) -> GrowingModel:
        torch.manual_seed(0)
        host = wrapped(isolation=isolation)
        host.model[3].p = 0.0
        runs = torch.compile(host, backend="eager") if compiled else host
        optimizer = host.optimizer(torch.optim.SGD, lr=0.05)

        def train() -> float:
            optimizer.zero_grad()
            loss = cross_entropy(runs(TRAIN[0]), TRAIN[1])
            loss.backward()
            if host.has_isolated_seeds:
                host.seed_step(lambda: cross_entropy(runs(TRAIN[0]), TRAIN[1]))
            optimizer.step()
            return loss.item()

        live(host, train)
        return host

    require_same(states(grown(False)), states(grown(True)))


def test_data_parallel_is_made_anew_when_parameters_join_or_leave() -> None:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        host = wrapped()
        host.model[3].p = 0.0
        optimizer = host.optimizer(torch.optim.SGD, lr=0.05)
        parallel = DistributedDataParallel(host)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            cross_entropy(parallel(TRAIN[0]), TRAIN[1]).backward()
            optimizer.step()
            if host.tick(GROWS, train_loss=1.0, evaluate=accuracy).changed:
                parallel = DistributedDataParallel(host)
    finally:
        distributed.destroy_process_group()
    alone = wrapped()
    alone.model[3].p = 0.0
    optimizer = alone.optimizer(torch.optim.SGD, lr=0.05)

    def train() -> float:
        train_epoch(alone, optimizer, size=len(TRAIN[0]))
        return 1.0

    live(alone, train)
    for one, other in zip(host.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)
