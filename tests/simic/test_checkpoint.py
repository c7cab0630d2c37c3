"""Saved agents: complete, and refused with one sentence when anything does not fit."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.archive import ArchiveError, read_archive, write_archive
from esper.leyline import DEFAULT_LSTM_HIDDEN_DIM, AgreementError
from esper.simic.agent import NonFiniteError, PPOAgent, PPOConfig
from esper.simic.agent.ppo import KIND, VERSION
from tests.simic.toys import Noise, train
from tests.tamiyo.spaces import esper_space

ENVS, STEPS, HIDDEN, LAYERS = 3, 4, DEFAULT_LSTM_HIDDEN_DIM // 16, 2


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    world = Noise(ENVS, 0)
    agent = PPOAgent.build(
        world.space,
        world.state_dim,
        ENVS,
        STEPS,
        PPOConfig(target_kl=None),
        lstm_hidden_dim=HIDDEN,
        lstm_layers=LAYERS,
        seed=7,
    )
    train(agent, world, ENVS * STEPS)
    return agent.save(tmp_path / "agent")


def rewritten(path: Path, tensors: dict[str, torch.Tensor] | None = None, **notes: Any) -> Path:
    """The checkpoint with some tensors or notes replaced, sealed like a real one."""
    old = read_archive(path, kind=KIND, version=VERSION)
    return write_archive(
        path,
        kind=KIND,
        version=VERSION,
        tensors={**old.tensors, **(tensors or {})},
        notes={**old.notes, **notes},
    )


def test_every_shape_and_setting_comes_back(saved: Path) -> None:
    agent = PPOAgent.load(saved)
    assert agent.space == Noise(ENVS, 0).space
    assert (agent.buffer.envs, agent.buffer.steps, agent.seed) == (ENVS, STEPS, 7)
    assert agent.network.lstm_hidden_dim == agent.buffer.lstm_hidden_dim == HIDDEN
    assert agent.network.lstm_layers == LAYERS
    assert agent.config == PPOConfig(target_kl=None)
    assert float(agent.network.observation_norm.count) == ENVS * STEPS
    assert agent.optimizer.moments["steps"] > 0


def test_settings_that_a_saved_agent_does_not_know_are_the_defaults(saved: Path) -> None:
    config = dict(read_archive(saved, kind=KIND, version=VERSION).notes["config"])
    for name in ("compile_mode", "strict"):
        del config[name]
    assert PPOAgent.load(rewritten(saved, config=config)).config == PPOConfig(target_kl=None)


def test_an_agent_that_never_learned_can_be_saved(tmp_path: Path) -> None:
    fresh = PPOAgent.build(esper_space(), 5, ENVS, STEPS, lstm_hidden_dim=HIDDEN)
    again = PPOAgent.load(fresh.save(tmp_path / "agent"))
    assert not any(bool(moment.any()) for moment in again.optimizer.moments.values())


@pytest.mark.parametrize("part", ["weights", "moments"])
def test_an_agent_with_numbers_that_are_not_finite_is_not_saved(saved: Path, part: str) -> None:
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    agent = PPOAgent.load(saved)
    weight = agent.network.lstm.weight_hh_l0
    broken = weight.data if part == "weights" else agent.optimizer.moments["lstm.weight_hh_l0.mean"]
    broken[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"not saved.*lstm.weight_hh_l0"):
        agent.save(saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_a_checkpoint_for_another_world_is_refused_with_both_values(saved: Path) -> None:
    with pytest.raises(AgreementError, match="checkpoint and caller disagree on action heads"):
        PPOAgent.load(saved, space=esper_space(slots=5))
    with pytest.raises(AgreementError, match="checkpoint has 5, caller has 9"):
        PPOAgent.load(saved, state_dim=9)


def test_another_version_or_kind_is_refused(saved: Path) -> None:
    old = read_archive(saved, kind=KIND, version=VERSION)
    given = {"tensors": old.tensors, "notes": old.notes}
    write_archive(saved, kind=KIND, version=VERSION + 1, **given)
    with pytest.raises(ArchiveError, match=f"given: {KIND} version {VERSION + 1}"):
        PPOAgent.load(saved)
    write_archive(saved, kind="population", version=VERSION, **given)
    with pytest.raises(ArchiveError, match="given: population"):
        PPOAgent.load(saved)


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"surplus": 1}, "does not describe an agent; given: .*surplus"),
        ({"space": {}}, "does not describe an agent"),
        ({"config": {"gama": 0.9}}, "does not describe an agent; given: .*gama"),
        ({"config": {"gamma": 9.0}}, "'gamma' is out of range"),
        ({"lstm_hidden_dim": HIDDEN * 2}, "other tensors than its notes describe"),
        ({"lstm_layers": 1}, "other tensors than its notes describe"),
        ({"envs": ENVS + 1}, "other tensors than its notes describe"),
    ],
)
def test_notes_that_do_not_fit_are_refused(
    saved: Path, notes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArchiveError, match=message) as refusal:
        PPOAgent.load(rewritten(saved, **notes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("network.value_head.0.bias", torch.zeros(3)),
        ("network.surplus", torch.zeros(1)),
        ("hidden.h", torch.zeros(1, ENVS, HIDDEN)),
        ("optimizer.0.exp_avg", torch.zeros(3)),
        ("optimizer.99.exp_avg", torch.zeros(3)),
        ("random.sampler", torch.zeros(2)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(saved: Path, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ArchiveError, match=name):
        PPOAgent.load(rewritten(saved, {name: tensor}))


def test_an_agent_of_another_kind_of_device_is_loaded_and_draws_anew(saved: Path) -> None:
    elsewhere = torch.zeros(16, dtype=torch.uint8)  # a generator's state on a GPU
    loaded = PPOAgent.load(rewritten(saved, {"random.sampler": elsewhere}))
    assert len(loaded.sampler.get_state()) != len(elsewhere)


def test_random_damage_is_refused_with_one_sentence_or_changes_nothing(saved: Path) -> None:
    whole = {file: file.read_bytes() for file in saved.iterdir()}
    expected = PPOAgent.load(saved).network.state_dict()
    dice = random.Random(1)
    refused = 0
    for _ in range(100):
        file = dice.choice(list(whole))
        data = bytearray(whole[file])
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        file.write_bytes(data)
        try:
            found = PPOAgent.load(saved).network.state_dict()
        except ArchiveError as error:
            refused += "\n" not in str(error)
        else:
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        file.write_bytes(whole[file])
    assert refused > 80
