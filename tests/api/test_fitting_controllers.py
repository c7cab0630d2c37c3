"""Trained controllers on models of one's own: they fit and remember, or are refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.api import wrap
from esper.api.growing_model import GrowingModel
from esper.kasmina import build_host
from esper.leyline.errors import EsperError
from esper.simic.agent.ppo import PPOAgent
from esper.tamiyo.features import FeatureTable
from tests.api.tables import (
    TRAIN,
    VAL,
    accuracy,
    mlp,
    require_same,
    states,
    train_epoch,
    wrapped,
)

SETTINGS: dict[str, Any] = {
    "loss": "cross_entropy",
    "budget": esper.Budget("+500%", epochs=10),
    "slots": ["2", "5"],
    "batch_size": 16,
}


def sequence_host(**options: Any) -> GrowingModel:
    """A wrapped model of convolutions along a sequence, with three slots."""
    blocks = [
        nn.Sequential(nn.Conv1d(channels, 4, 3, padding=1), nn.ReLU()) for channels in (1, 4, 4)
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(40, 3))
    budget = esper.Budget(epochs=9)
    return wrap(model, torch.randn(3, 1, 10), slots=["0", "1", "2"], budget=budget, **options)


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """An agent for two dense slots that likes to do things."""
    host = wrapped()
    trained = PPOAgent(host.space, state_dim=FeatureTable.of(host.catalogue).size, seed=3)
    for op in (1, 2, 3):
        trained.network.bias_action_logit("op", op, 1.0)
    return trained.save(tmp_path / "agent")


def test_a_trained_controller_grows_and_is_remembered(agent: Path, tmp_path: Path) -> None:
    def copy(record: dict[str, Any]) -> None:
        if record["epoch"] == 5:
            shutil.copytree(tmp_path / "run", tmp_path / "copy")

    run = esper.grow(mlp(), TRAIN, VAL, controller=agent, out=tmp_path / "run", on_epoch=copy,
                     **SETTINGS)  # fmt: skip
    assert any(record["decision"]["op"] == "GERMINATE" for record in run.history)
    again = esper.resume(tmp_path / "copy", mlp(7), TRAIN, VAL)
    assert again.history == run.history
    require_same(states(run.host), states(again.host))
    memory = run.host.memory.controller.memory()  # type: ignore[union-attr]
    require_same(memory, again.host.memory.controller.memory())  # type: ignore[union-attr]
    assert memory["h"].any()


def test_a_run_goes_on_with_the_controller_that_it_began_with(agent: Path, tmp_path: Path) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        if record["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        esper.grow(mlp(), TRAIN, VAL, controller=agent, out=tmp_path / "run", on_epoch=interrupt,
                   **SETTINGS)  # fmt: skip
    with pytest.raises(EsperError, match="led by another controller"):
        esper.resume(tmp_path / "run", mlp(), TRAIN, VAL, controller="heuristic")
    shutil.rmtree(agent)
    host = wrapped()
    PPOAgent(host.space, state_dim=FeatureTable.of(host.catalogue).size, seed=4).save(agent)
    with pytest.raises(EsperError, match="led by another controller"):
        esper.resume(tmp_path / "run", mlp(), TRAIN, VAL)


def test_it_is_refused_for_hosts_that_it_does_not_know(agent: Path) -> None:
    with pytest.raises(
        EsperError, match=r"trained for other hosts; given: 1 slots .* valid: 2 slo"
    ):
        esper.grow(mlp(), TRAIN, VAL, controller=agent, **{**SETTINGS, "slots": ["2"]})
    images = wrap(build_host("conv2d"), torch.randn(2, 3, 32, 32), budget=esper.Budget(epochs=9))
    with pytest.raises(EsperError, match=r"given: 3 slots with .* valid: 2 slots; name 2 places"):
        images.require_controller(agent)


def test_refusal_names_blueprints_if_one_family_has_that_many(tmp_path: Path) -> None:
    sequences = sequence_host()
    agent = PPOAgent(sequences.space, state_dim=FeatureTable.of(sequences.catalogue).size)
    folder = agent.save(tmp_path / "agent")
    images = wrap(build_host("conv2d"), torch.randn(2, 3, 32, 32), budget=esper.Budget(epochs=9))
    names = "norm, squeeze, pointwise, depthwise, conv, token_mix, attention, block"
    with pytest.raises(EsperError, match=f"valid: 3 slots with the blueprints {names};"):
        images.require_controller(folder)
    assert sequences.require_controller(folder).name == str(folder)


def test_it_has_to_know_how_long_it_goes_on(agent: Path) -> None:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.SGD, lr=0.1)
    train_epoch(host, optimizer)
    with pytest.raises(EsperError, match=r"Budget\(params='\+15%', epochs=20\)"):
        host.tick(agent, train_loss=1.0, evaluate=accuracy)


def test_it_needs_contributions(agent: Path) -> None:
    host = wrapped(budget=esper.Budget(epochs=9))
    optimizer = host.optimizer(torch.optim.SGD, lr=0.1)
    train_epoch(host, optimizer)
    with pytest.raises(EsperError, match="pass evaluate="):
        host.tick(agent, train_loss=1.0, val_score=50.0)


def test_the_specialist_decides_for_hosts_like_those_it_was_trained_on() -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(48, 40), torch.randint(10, (48,))
    data = (inputs, labels)
    host = build_host("conv1d")
    slots = [spec.name for spec in host.slot_specs()]
    assert len(slots) == 3
    run = esper.grow(
        host, data, data, loss="cross_entropy", budget=esper.Budget("+200%", epochs=6),
        controller="specialist", batch_size=24, slots=["segments.0", "segments.1", "segments.2"],
    )  # fmt: skip
    assert run.report().controller == "specialist"
    assert len(run.history) == 6


def test_the_specialist_says_for_which_hosts_it_was_trained() -> None:
    with pytest.raises(EsperError, match=r"trained for other hosts; .* valid: 3 slots with"):
        wrapped(budget=esper.Budget(epochs=9)).require_controller("specialist")


def test_refusal_of_the_specialist_names_blueprints_that_fit() -> None:
    with pytest.raises(EsperError, match=r"give blueprints=\['norm', 'squeeze', ") as refusal:
        sequence_host().require_controller("specialist")
    advised_list = str(refusal.value).partition("blueprints=[")[2].partition("]")[0]
    blueprints = [name.strip("' ") for name in advised_list.split(",")]
    host = sequence_host(blueprints=blueprints)
    assert host.require_controller("specialist").name == "specialist"
