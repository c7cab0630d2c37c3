"""A group for gates in an optimiser that has schedulers already; what is missing is said."""

import sys
from collections.abc import Callable
from importlib import import_module, reload
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers

from esper.integrations.attached import (
    AttachedHost,
    Attachment,
    CallbackSettings,
    attach,
    grown,
)
from esper.leyline.errors import EsperError
from tests.integrations.processes import require_same

X = torch.randn(8, 6)
MADE: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 20),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, min_lr=1e-4),
    "in sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.parametrize("name", MADE)
def test_gates_keep_ten_times_the_rate_under_every_scheduler(name: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = MADE[name](optimizer)
    host = AttachedHost(model, model, X, slots=["1"])
    host.join(optimizer, [scheduler])
    host.germinate("1", "norm")
    for _ in range(12):
        model(X).sum().backward()
        optimizer.step()
        scheduler.step(*([1.0] if name == "plateau" else []))
        first, gates = (group["lr"] for group in optimizer.param_groups)
        assert gates == pytest.approx(10 * first)


def test_an_optimiser_saves_the_models_own_and_the_model_the_rest() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.05)
    fresh = optimizer.state_dict()["param_groups"][0]["params"]
    host = AttachedHost(model, model, X, slots=["1"])
    host.join(optimizer, [])
    host.germinate("1", "norm")
    for _ in range(3):
        model(X).sum().backward()
        optimizer.step()
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["params"] == fresh
    assert group["param_names"] == [name for name, _ in net().named_parameters()]

    other = net()
    its = torch.optim.AdamW(other.parameters(), lr=0.05)
    its.load_state_dict(optimizer.state_dict())
    attach(other).waiting = {}
    other.load_state_dict(model.state_dict())
    again = AttachedHost(other, other, X, slots=["1"])
    again.join(its, [])
    other.esper.recover()
    for one, two in zip(host.slots.parameters(), again.slots.parameters(), strict=True):
        assert torch.equal(one, two)
        moments, back = optimizer.state[one], its.state[two]
        assert moments.keys() == back.keys()
        assert all(torch.equal(moments[key], back[key]) for key in moments)


def test_a_gradient_scaler_takes_seeds_and_their_gates_along() -> None:
    """Scaled by a power of two, training is the same to the bit; what overflows skips the step."""
    ends = []
    for scale in (None, 1024.0):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.05)
        host = AttachedHost(model, model, X, slots=["1"])
        host.join(optimizer, [])
        host.germinate("1", "norm")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(X).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        ends.append([parameter.clone() for parameter in model.parameters()])
        if scale is not None:
            next(host.slots.parameters()).grad = torch.full((5,), torch.inf)
            scaler.step(optimizer)
            assert all(map(torch.equal, ends[-1], model.parameters()))
    assert all(map(torch.equal, *ends))


def test_what_waits_to_be_put_back_is_not_lost_by_saving() -> None:
    model = net()
    host = AttachedHost(model, model, X, slots=["1"])
    host.germinate("1", "norm")
    state = model.state_dict()
    other = net()
    attach(other)
    other.load_state_dict(state)
    require_same(other.state_dict(), state)


def test_whether_lower_is_better_follows_from_the_name() -> None:
    lower = ["val_loss", "eval_loss", "valLoss", "val/rmse", "eval_wer", "nll", "error_rate"]
    higher = ["val_acc", "answer_f1", "eval_cancer_auc", "accuracy"]
    assert all(CallbackSettings(name).lower_is_better for name in lower)
    assert not any(CallbackSettings(name).lower_is_better for name in higher)
    assert CallbackSettings("fid", mode="min").lower_is_better
    with pytest.raises(EsperError, match=r"mode; given: 'lower'; valid: min, max"):
        CallbackSettings("fid", mode="lower")  # type: ignore[arg-type]


def test_a_model_can_be_saved_after_a_step_that_failed() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    AttachedHost(model, model, X, slots=["1"]).join(optimizer, [])

    def fails() -> float:
        raise MemoryError

    with pytest.raises(MemoryError):
        optimizer.step(fails)
    assert "esper.notes" in model.state_dict()


def test_an_optimiser_made_of_a_grown_model_is_put_in_order() -> None:
    model = net()
    host = AttachedHost(model, model, X, slots=["1"])
    host.germinate("1", "norm")
    optimizer = SGD(model.parameters(), lr=0.1)
    host.join(optimizer, [])
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 1]


def test_states_without_growth_and_names_that_are_taken_are_refused() -> None:
    with pytest.raises(EsperError, match="holds nothing that grew"):
        grown(net(), net().state_dict(), X)
    model = net()
    model.add_module("esper", nn.Linear(2, 2))
    with pytest.raises(EsperError, match="'esper'; given: Linear; rename it"):
        attach(model)
    assert isinstance(attach(net()), Attachment)


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_library_that_is_missing_is_named_with_its_install_line(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(f"esper.integrations.{library}")
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EsperError, match=rf"pip install '\.\[{library}\]'"):
        reload(module)
