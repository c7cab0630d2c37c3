"""Bit for bit: what was pruned before it blended never was, and what is saved comes back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from esper.api import GrowingModel, wrap
from esper.kasmina.gates import GateRules
from esper.leyline.errors import EsperError
from esper.leyline.stages import SeedStage
from tests.api.tables import (
    INPUTS,
    Script,
    accuracy,
    mlp,
    require_same,
    states,
    train_epoch,
    wrapped,
)

# A life of every kind: kept at "2", pruned out of blending at "5" and planted there again.
LIVES = {
    1: ("plant", "2", "mlp", "ramp"),
    2: ("plant", "5", "norm", "gate"),
    3: ("blend in", "2"),
    4: ("blend in", "5"),
    6: ("keep", "2"),
    7: ("prune", "5"),
    12: ("plant", "5", "lowrank", "immediate"),
}
EPOCHS = 14


def grow(host: GrowingModel, optimizer: torch.optim.Optimizer, epochs: range) -> list[object]:
    seen: list[object] = []
    script = Script(LIVES)
    for epoch in epochs:
        torch.manual_seed(epoch)
        loss = train_epoch(host, optimizer)
        seen.append(host.tick(script, train_loss=loss, evaluate=accuracy))
    return seen


@pytest.mark.parametrize("isolation", ["straight_through", "dual_pass"])
@pytest.mark.parametrize("blueprint", ["mlp", "norm"])
def test_a_model_whose_seeds_were_pruned_before_blending_never_grew(
    isolation: str, blueprint: str
) -> None:
    torch.manual_seed(9)
    alone = mlp()
    its_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for _ in range(6):
        train_epoch(alone, its_optimizer)
    drawn = torch.get_rng_state()

    torch.manual_seed(9)
    host = wrapped(isolation=isolation)
    optimizer = host.optimizer(torch.optim.AdamW, lr=0.01)
    lines = Script({1: ("plant", "2", blueprint, "ramp"), 2: ("plant", "5", blueprint, "gate"),
                    4: ("prune", "2"), 5: ("prune", "5")})  # fmt: skip
    for _ in range(6):
        loss = train_epoch(host, optimizer)
        host.tick(lines, train_loss=loss, evaluate=accuracy)
    assert host.added == 0
    assert torch.equal(drawn, torch.get_rng_state())
    require_same(alone.state_dict(), host.model.state_dict())
    require_same(
        {f"{i} {name}": v for i, state in its_optimizer.state_dict()["state"].items()
         for name, v in state.items()},
        {f"{i} {name}": v for i, state in optimizer.state_dict()["state"].items()
         for name, v in state.items()},
    )  # fmt: skip
    assert torch.equal(alone.eval()(INPUTS), host.eval()(INPUTS))


def test_removing_a_seed_that_was_blended_out_changes_no_bit_of_the_output() -> None:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.AdamW, lr=0.01)
    lines = Script({1: ("plant", "2", "mlp", "ramp"), 2: ("blend in", "2"), 4: ("prune", "2")})
    faded = False
    for _ in range(7):
        loss = train_epoch(host, optimizer)
        host.eval()
        with host.without("2"):
            before = host(INPUTS)
        had = host.seed_slots["2"].seed is not None
        tick = host.tick(lines, train_loss=loss, evaluate=accuracy)
        if had and host.seed_slots["2"].seed is None:
            faded = True
            assert tick.changed
            assert torch.equal(before, host.eval()(INPUTS))
            assert not any(module._forward_hooks for module in host.model.modules())
    assert faded


@pytest.mark.slow
def test_a_host_goes_on_from_every_stage_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    host = wrapped(isolation="dual_pass", rules=GateRules(min_contribution=None))
    optimizer = host.optimizer(torch.optim.AdamW, lr=0.01)
    passed: set[SeedStage] = set()
    ticks = []
    for epoch in range(EPOCHS):
        ticks += grow(host, optimizer, range(epoch, epoch + 1))
        host.save(tmp_path / str(epoch))
        passed |= {slot.stage for slot in host.seed_slots.values()}
    assert passed >= set(SeedStage) - {SeedStage.GERMINATED}  # which passes within a tick
    wanted = states(host)
    for epoch in range(EPOCHS):
        again = wrapped(isolation="dual_pass", rules=GateRules(min_contribution=None))
        optimizer = again.optimizer(torch.optim.AdamW, lr=0.5)
        again.load(tmp_path / str(epoch))
        assert grow(again, optimizer, range(epoch + 1, EPOCHS)) == ticks[epoch + 1 :]
        require_same(wanted, states(again))


@pytest.mark.parametrize("controller", ["heuristic:patience=0,first=0", "race:epochs=2", "random"])
def test_rules_remember_across_a_save(tmp_path: Path, controller: str) -> None:
    def lived(host: GrowingModel, epochs: range) -> list[object]:
        (optimizer,) = host.optimizers
        seen = []
        for epoch in epochs:
            torch.manual_seed(epoch)
            loss = train_epoch(host, optimizer)
            seen.append(host.tick(controller, train_loss=loss, evaluate=accuracy))
        return seen

    host = wrapped()
    host.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    lived(host, range(5))
    host.save(tmp_path / "host")
    host.save(tmp_path / "host")  # over the first
    wanted = lived(host, range(5, 12))
    again = wrapped()
    again.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    again.load(tmp_path / "host")
    assert lived(again, range(5, 12)) == wanted
    require_same(states(host), states(again))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
        (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False, "amsgrad": True}),
        (torch.optim.Adagrad, {"lr": 0.01}),
        (torch.optim.NAdam, {"lr": 0.01}),
    ],
)
def test_any_optimiser_is_saved_whole(tmp_path: Path, kind: Any, settings: dict[str, Any]) -> None:
    host = wrapped(isolation="dual_pass")
    optimizer = host.optimizer(kind, **settings)
    grow(host, optimizer, range(5))
    host.save(tmp_path / "host")
    wanted = grow(host, optimizer, range(5, 8))
    again = wrapped(isolation="dual_pass")
    optimizer = again.optimizer(kind, **settings)
    again.load(tmp_path / "host")
    assert grow(again, optimizer, range(5, 8)) == wanted
    require_same(states(host), states(again))


def test_a_scheduler_made_before_loading_goes_on(tmp_path: Path) -> None:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.SGD, lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train_epoch(host, optimizer)
    schedule.step()
    host.tick("never", train_loss=1.0, val_score=50.0)
    host.save(tmp_path / "host")
    again = wrapped()
    optimizer = again.optimizer(torch.optim.SGD, lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    again.load(tmp_path / "host")
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])


def test_what_grew_beyond_the_budget_is_not_loaded(tmp_path: Path) -> None:
    host = wrapped()
    host.optimizer(torch.optim.SGD, lr=0.1)
    host.germinate("2", "mlp", "immediate")
    host.save(tmp_path / "host")
    small = wrapped(budget=host.added - 1)
    small.optimizer(torch.optim.SGD, lr=0.1)
    before = states(small)
    with pytest.raises(EsperError, match=f"beyond the budget.*{host.added} parameters in seeds"):
        small.load(tmp_path / "host")
    require_same(before, states(small))
    enough = wrapped(budget=host.added)
    enough.optimizer(torch.optim.SGD, lr=0.1)
    enough.load(tmp_path / "host")
    assert enough.added == enough.room == host.added


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    host = wrapped()
    host.optimizer(torch.optim.SGD, lr=0.1)
    host.germinate("2", "mlp", "immediate")
    host.save(tmp_path / "host")
    other = wrapped(slots=["2"])
    other.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(EsperError, match="other slots"):
        other.load(tmp_path / "host")
    other = wrapped()
    other.optimizer(torch.optim.Adam, lr=0.1)
    before = states(other)
    with pytest.raises(EsperError, match="other optimisers"):
        other.load(tmp_path / "host")
    require_same(before, states(other))
    wide = mlp()
    wide[4], wide[6] = torch.nn.Linear(8, 9), torch.nn.Linear(9, 3)
    larger = wrap(wide, INPUTS[:4], slots=["2", "5"])
    larger.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(EsperError, match="another model"):
        larger.load(tmp_path / "host")
