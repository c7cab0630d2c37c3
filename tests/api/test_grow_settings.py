"""Settings have one home; budgets are read as people write them, and are never exceeded."""

import json
import math
from dataclasses import asdict, fields
from inspect import signature

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esper
from esper.api import GrowSettings
from esper.karn.commands import BudgetOptions, Grow
from esper.leyline.errors import EsperError
from tests.api.tables import accuracy, train_epoch, wrapped


@pytest.mark.parametrize(
    ("params", "allowed"),
    [("+15%", 150), ("15%", 150), ("0.1%", 1), ("+33.3%", 333), (20, 20), ("+2,000", 2000),
     ("1_000", 1000), (0, 0), (None, None)],
)  # fmt: skip
def test_a_budget_is_a_share_or_a_number(params: str | int | None, allowed: int | None) -> None:
    assert esper.Budget(params).allowed(1000) == allowed


@given(share=st.integers(0, 5000), host=st.integers(0, 10**9))
def test_a_share_is_never_rounded_up(share: int, host: int) -> None:
    allowed = esper.Budget(f"+{share}%").allowed(host)
    assert allowed is not None
    assert allowed * 100 <= share * host < (allowed + 1) * 100


@pytest.mark.parametrize("params", [0.15, -1, "15 percent", "", "-5%", True, [1], "1e3", "%"])
def test_other_budgets_are_refused_with_what_is_valid(params: object) -> None:
    with pytest.raises(EsperError, match=r"valid: .*15%"):
        esper.Budget(params)  # type: ignore[arg-type]


def test_a_fraction_is_told_how_to_be_written() -> None:
    with pytest.raises(EsperError, match=r"write '\+15%'"):
        esper.Budget(0.15)  # type: ignore[arg-type]


@pytest.mark.parametrize("epochs", [0, -3, 2.5, "ten"])
def test_epochs_are_a_whole_number(epochs: object) -> None:
    with pytest.raises(EsperError, match="whole number from 1"):
        esper.Budget(epochs=epochs)  # type: ignore[arg-type]


@settings(max_examples=8, deadline=None)
@given(room=st.integers(17, 400), seed=st.integers(0, 10**6), dual=st.booleans())
def test_no_controller_exceeds_the_budget_at_any_time(room: int, seed: int, dual: bool) -> None:
    isolation = "dual_pass" if dual else "straight_through"
    host = wrapped(budget=room, seed=seed, isolation=isolation)
    before = sum(p.numel() for p in host.model.parameters())
    optimizer = host.optimizer(torch.optim.SGD, lr=0.01)
    planted = 0
    for _ in range(12):
        loss = train_epoch(host, optimizer, size=64)
        done = host.tick("random", train_loss=loss, evaluate=accuracy)
        exists = sum(p.numel() for p in host.slots.parameters())
        held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        assert exists == host.added == done.added <= room
        assert held == before + exists
        planted += str(done.decision).startswith("plant")
    assert planted > 0


def test_settings_come_back_from_json() -> None:
    asked = GrowSettings(budget="+15%", loss="mse", epochs=7, blueprints=("mlp", "norm"),
                         slots=({"path": "2", "part": None, "layout": None, "name": None},),
                         data={"train": {"batches": 3, "first": "ab"}}, lr=0.5)  # fmt: skip
    assert GrowSettings.of(json.loads(json.dumps(asdict(asked)))) == asked
    assert asked.limits == esper.Budget("+15%", epochs=7)


def test_the_call_and_the_command_line_have_the_defaults_of_the_settings() -> None:
    called = signature(esper.grow).parameters
    typed = {each.name: each.default for each in fields(Grow)}
    same = ("optimizer", "lr", "batch_size", "seed", "controller", "weight_decay", "precision")
    for name in same:
        assert called[name].default == typed[name] == getattr(GrowSettings, name)
    assert BudgetOptions().epochs == GrowSettings.epochs
    assert called["epochs"].default is None, "they may stand in the budget"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("lr", math.inf),
        ("weight_decay", -0.1),
        ("epochs", 0),
        ("batch_size", 2.5),
        ("seed", -1),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(EsperError, match=f"'{name}' is out of range; given: .*; valid: a "):
        GrowSettings(**{"budget": None, "loss": "mse", name: value})  # type: ignore[arg-type]


def test_a_run_kept_before_a_setting_existed_has_its_default() -> None:
    note = asdict(GrowSettings(budget=None, loss="mse", epochs=3))
    for name in ("weight_decay", "precision", "device", "score"):
        del note[name]
    assert GrowSettings.of(note) == GrowSettings(budget=None, loss="mse", epochs=3)


def test_the_same_epochs_are_trained_by_default_from_a_program_and_from_the_command_line() -> None:
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    run = esper.grow(net, (x, y), (x, y), loss="cross_entropy", budget=0, controller="never")
    assert len(run.history) == run.settings.epochs == BudgetOptions().epochs
