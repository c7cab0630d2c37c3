"""`host.state_dict()` and the optimiser's, in a file of one's own, go on to the bit."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

import esper
from esper.api import GrowingModel, GrowthLostWarning, Tick
from esper.leyline.errors import AgreementError, OptimizerMismatchError
from esper.simic.agent.ppo import PPOAgent
from esper.tamiyo.features import FeatureTable
from tests.api.tables import (
    Script,
    accuracy,
    mlp,
    require_same,
    states,
    train_epoch,
    wrapped,
)

EPOCHS = 9
LIFE = {1: ("plant", "2", "mlp", "gate"), 2: ("plant", "5", "norm", "ramp"), 3: ("blend in", "2")}
Made = tuple[GrowingModel, torch.optim.Optimizer]


def made(start: int = 1) -> Made:
    host = wrapped(budget=esper.Budget("+900%", epochs=EPOCHS))
    host.model.load_state_dict(mlp(start).state_dict())
    return host, host.optimizer(torch.optim.AdamW, lr=0.01)


def epoch(pair: Made, controller: Any, number: int) -> Tick:
    torch.manual_seed(number)  # dropout
    loss = train_epoch(*pair)
    return pair[0].tick(controller, train_loss=loss, evaluate=accuracy)


def through_a_file(pair: Made) -> Made:
    """Into a host that was wrapped anew, with other weights."""
    file = io.BytesIO()
    torch.save({"host": pair[0].state_dict(), "optimizer": pair[1].state_dict()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    again = made(start=9)
    again[0].load_state_dict(kept["host"])
    again[1].load_state_dict(kept["optimizer"])
    return again


@pytest.fixture
def learned(tmp_path: Path) -> Path:
    """A recurrent one that likes to do things."""
    host = made()[0]
    agent = PPOAgent(host.space, state_dim=FeatureTable.of(host.catalogue).size, seed=3)
    for op in (1, 2, 3):
        agent.network.bias_action_logit("op", op, 1.0)
    return agent.save(tmp_path / "agent")


CONTROLLERS: dict[str, Callable[[Path], Any]] = {
    "a script": lambda _: Script(LIFE),
    "a rule": lambda _: "heuristic:first=1,patience=0,probation=1,trial=2,margin=-100",
    "a race": lambda _: "race:epochs=2",
    "a recurrent network": str,
}


@pytest.mark.parametrize("kind", list(CONTROLLERS))
def test_a_checkpoint_of_ones_own_goes_on_to_the_bit(kind: str, learned: Path) -> None:
    whole, controller = made(), CONTROLLERS[kind](learned)
    ticks = [epoch(whole, controller, number) for number in range(EPOCHS)]
    assert any(tick.decision.changes_something for tick in ticks)
    pair, found = made(), []
    for number in range(EPOCHS):
        if number in (2, 4, 5):
            pair = through_a_file(pair)
        found.append(epoch(pair, CONTROLLERS[kind](learned), number))
    assert found == ticks
    require_same(states(whole[0]), states(pair[0]))


def test_one_in_the_middle_of_an_epoch_knows_the_gradients_before_it() -> None:
    def half(pair: Made) -> None:
        torch.manual_seed(7)
        train_epoch(*pair)

    whole, controller = made(), Script(LIFE)
    for number in range(3):
        epoch(whole, controller, number)
    half(whole)
    pair = through_a_file(whole)
    for each in (whole, pair):
        epoch(each, controller, 3)
    assert whole[0].lifecycle.gradient.any()
    require_same(states(whole[0]), states(pair[0]))


def test_the_state_is_nothing_but_tensors_on_any_device_and_in_any_file() -> None:
    pair = made()
    for number in range(3):
        epoch(pair, Script(LIFE), number)
    state = pair[0].state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    again = made(start=4)[0]
    again.load_state_dict(load(save({name: each.contiguous() for name, each in state.items()})))
    require_same(state, again.state_dict())
    assert all(map(torch.equal, state.values(), again.state_dict().values()))


def test_a_state_without_the_memory_of_a_controller_says_so() -> None:
    host = made()[0]
    without = {name: v for name, v in host.state_dict().items() if not name.startswith("memory.")}
    with pytest.warns(GrowthLostWarning, match="not hold what the controller remembers"):
        made()[0].load_state_dict(without)


def test_states_that_do_not_fit_are_refused_in_a_sentence_and_change_nothing() -> None:
    host, optimizer = made()
    host.germinate("2", "mlp")
    state, before = host.state_dict(), states(host)
    lacking = {name: value for name, value in state.items() if name != "model.0.weight"}
    cases = {
        r"of another model, or not all of it; given: Missing.*model\.0\.weight": lacking,
        r"Unexpected.*other\.weight": state | {"other.weight": torch.zeros(2)},
        r"size mismatch for model\.0\.weight": state | {"model.0.weight": torch.zeros(2, 2)},
        r"not the state of a model with slots.*host\.model\.load_state_dict": mlp().state_dict(),
    }
    for message, wrong in cases.items():
        with pytest.raises(AgreementError, match=message):
            host.load_state_dict(wrong)
    require_same(before, states(host))
    with pytest.raises(OptimizerMismatchError, match="load the host's state first"):
        made()[1].load_state_dict(optimizer.state_dict())
