"""Saved agents: complete, rejected in one sentence if something does not fit, readable from 0.1."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from esper.archive import ArchiveError, read_archive, write_archive
from esper.leyline import DEFAULT_LSTM_HIDDEN_DIM, AgreementError
from esper.simic.agent import CHECKPOINT_VERSION, NonFiniteError, PPOAgent, PPOConfig, collect
from esper.simic.agent.saved_agents import KIND
from tests.simic.toys import Noise, train
from tests.tamiyo.spaces import esper_space

NUM_ENVS = 3
NUM_STEPS = 4
HIDDEN_DIM = DEFAULT_LSTM_HIDDEN_DIM // 16
LAYERS = 2
AGENT_V3 = Path(__file__).parent / "data" / "agent-v3"  # written by Esper 0.1
EXPECTED_V3 = "expected.safetensors"  # outputs of that agent in Esper 0.1


def build_agent(seed: int = 7, **settings: Any) -> tuple[PPOAgent, Noise]:
    world = Noise(NUM_ENVS, 0)
    agent = PPOAgent(
        world.action_space,
        state_dim=world.state_dim,
        num_envs=NUM_ENVS,
        max_steps_per_env=NUM_STEPS,
        config=PPOConfig(**settings),
        lstm_hidden_dim=HIDDEN_DIM,
        lstm_layers=LAYERS,
        seed=seed,
    )
    return agent, world


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An agent that was saved after one update."""
    agent, world = build_agent(target_kl=None)
    train(agent, world, NUM_ENVS * NUM_STEPS)
    return agent.save(tmp_path / "agent")


def rewrite(
    path: Path, tensors: dict[str, Tensor] | None = None, version: int = 4, **notes: Any
) -> Path:
    """Replace some tensors or notes of a saved agent and seal it again."""
    archive = read_archive(path, kind=KIND, version=version)
    return write_archive(
        path,
        kind=KIND,
        version=version,
        tensors={**archive.tensors, **(tensors or {})},
        notes={**archive.notes, **notes},
    )


# --- complete -----------------------------------------------------------------------------------


def test_loaded_agent_has_every_size_and_setting(saved: Path) -> None:
    agent = PPOAgent.load(saved)
    assert agent.action_space == Noise(NUM_ENVS, 0).action_space
    assert agent.buffer.num_envs == NUM_ENVS
    assert agent.buffer.max_steps_per_env == NUM_STEPS
    assert agent.seed == 7
    assert agent.network.lstm_hidden_dim == agent.buffer.lstm_hidden_dim == HIDDEN_DIM
    assert agent.network.lstm_layers == LAYERS
    assert agent.config == PPOConfig(target_kl=None)
    assert float(agent.network.observation_norm.count) == NUM_ENVS * NUM_STEPS
    assert all(float(state["step"]) > 0 for state in agent.optimizer.state.values())


def test_settings_missing_from_a_checkpoint_have_their_defaults(saved: Path) -> None:
    archive = read_archive(saved, kind=KIND, version=CHECKPOINT_VERSION)
    config = dict(archive.notes["config"])
    for name in ("compile_mode", "accumulation_steps", "strict"):
        del config[name]
    assert PPOAgent.load(rewrite(saved, config=config)).config == PPOConfig(target_kl=None)


def test_agent_that_never_learned_can_be_saved(tmp_path: Path) -> None:
    agent, _ = build_agent()
    loaded = PPOAgent.load(agent.save(tmp_path / "agent"))
    for state in loaded.optimizer.state.values():
        assert not any(bool(tensor.any()) for tensor in state.values())


def test_saved_settings_contain_accumulation_steps(tmp_path: Path) -> None:
    agent, _ = build_agent(accumulation_steps=3)
    assert PPOAgent.load(agent.save(tmp_path / "agent")).config.accumulation_steps == 3


@pytest.mark.parametrize("part", ["weights", "moments"])
def test_nonfinite_agent_is_not_saved(saved: Path, part: str) -> None:
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
    agent = PPOAgent.load(saved)
    weight = agent.network.lstm.weight_hh_l0
    tensor = weight.data if part == "weights" else agent.optimizer.state[weight]["exp_avg"]
    tensor[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"not saved.*lstm.weight_hh_l0"):
        agent.save(saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == files


# --- rejected -----------------------------------------------------------------------------------


def test_checkpoint_for_another_world_raises_with_both_values(saved: Path) -> None:
    with pytest.raises(AgreementError, match="checkpoint and caller disagree on action heads"):
        PPOAgent.load(saved, action_space=esper_space(slots=5))
    with pytest.raises(AgreementError, match="checkpoint has 5, caller has 9"):
        PPOAgent.load(saved, state_dim=9)


@pytest.mark.parametrize("version", [1, 2, CHECKPOINT_VERSION + 1])
def test_another_version_raises_and_is_not_changed(saved: Path, version: int) -> None:
    archive = read_archive(saved, kind=KIND, version=CHECKPOINT_VERSION)
    contents = {"tensors": archive.tensors, "notes": archive.notes}
    write_archive(saved, kind=KIND, version=version, **contents)
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(ArchiveError, match=f"given: {KIND} version {version}"):
        PPOAgent.load(saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == files


def test_another_kind_of_archive_raises(saved: Path) -> None:
    archive = read_archive(saved, kind=KIND, version=CHECKPOINT_VERSION)
    contents = {"tensors": archive.tensors, "notes": archive.notes}
    write_archive(saved, kind="population", version=CHECKPOINT_VERSION, **contents)
    with pytest.raises(ArchiveError, match="given: population"):
        PPOAgent.load(saved)


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"surplus": 1}, "does not describe an agent; given: .*surplus"),
        ({"action_space": {}}, "does not describe an agent"),
        ({"network": "other"}, "does not describe an agent; given: .*'other'"),
        ({"network": "tokens"}, "does not describe an agent; given: .*layout"),
        ({"config": {"gama": 0.9}}, "does not describe an agent; given: .*gama"),
        ({"config": {"gamma": 9.0}}, "'gamma' is out of range"),
        ({"lstm_hidden_dim": HIDDEN_DIM * 2}, "other tensors than its notes describe"),
        ({"lstm_layers": 1}, "other tensors than its notes describe"),
        ({"num_envs": NUM_ENVS + 1}, "other tensors than its notes describe"),
        ({"network": "skip"}, "other tensors than its notes describe"),
    ],
)
def test_wrong_notes_raise_one_sentence(saved: Path, notes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchiveError, match=message) as error:
        PPOAgent.load(rewrite(saved, **notes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("network.value_head.0.bias", torch.zeros(3)),
        ("network.surplus", torch.zeros(1)),
        ("hidden.h", torch.zeros(1, NUM_ENVS, HIDDEN_DIM)),
        ("optimizer.lstm.weight_hh_l0.exp_avg", torch.zeros(3)),
        ("optimizer.lstm.weight_hh_l0.surplus", torch.zeros(3)),
        ("optimizer.99.exp_avg", torch.zeros(3)),
        ("random.sampler", torch.zeros(2)),
    ],
)
def test_wrong_tensors_raise_by_name(saved: Path, name: str, tensor: Tensor) -> None:
    with pytest.raises(ArchiveError, match=name):
        PPOAgent.load(rewrite(saved, {name: tensor}))


def test_agent_from_another_kind_of_device_is_loaded(saved: Path) -> None:
    """A random generator on a GPU has a state of 16 bytes; the generator here starts anew."""
    gpu_state = torch.zeros(16, dtype=torch.uint8)
    loaded = PPOAgent.load(rewrite(saved, {"random.sampler": gpu_state}))
    assert len(loaded.sampler.get_state()) != len(gpu_state)


def test_random_damage_raises_or_changes_nothing(saved: Path) -> None:
    contents = {file: file.read_bytes() for file in saved.iterdir()}
    expected = PPOAgent.load(saved).network.state_dict()
    generator = random.Random(1)
    num_rejected = 0
    for _ in range(100):
        file = generator.choice(list(contents))
        damaged = bytearray(contents[file])
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        file.write_bytes(damaged)
        try:
            state = PPOAgent.load(saved).network.state_dict()
        except ArchiveError as error:
            num_rejected += "\n" not in str(error)
        else:
            assert all(torch.equal(state[name], expected[name]) for name in expected)
        file.write_bytes(contents[file])
    assert num_rejected > 80


# --- agents of Esper 0.1 ------------------------------------------------------------------------


@pytest.fixture
def agent_v3(tmp_path: Path) -> Path:
    """A copy of the agent that Esper 0.1 wrote after three updates."""
    path = tmp_path / "agent-v3"
    shutil.copytree(AGENT_V3, path, ignore=shutil.ignore_patterns(EXPECTED_V3))
    return path


def test_version_3_agent_has_the_same_outputs(agent_v3: Path) -> None:
    agent = PPOAgent.load(agent_v3)
    expected = load_file(AGENT_V3 / EXPECTED_V3)
    with torch.no_grad():
        output = agent.network(expected["states"], agent.hidden, expected["starts"])
    for name, logits in output.logits.items():
        torch.testing.assert_close(logits, expected[f"logits.{name}"], rtol=0, atol=1e-6)
    torch.testing.assert_close(output.values, expected["values"], rtol=1e-6, atol=1e-6)


def test_version_3_agent_has_its_settings_and_moments(agent_v3: Path) -> None:
    agent = PPOAgent.load(agent_v3)
    expected = load_file(AGENT_V3 / EXPECTED_V3)
    assert agent.config == PPOConfig(
        target_kl=None,
        epochs=2,
        minibatches=2,
        sequence_length=2,
        lr=1e-3,
        entropy_targets={"op": 0.5},
    )
    assert (agent.buffer.num_envs, agent.buffer.max_steps_per_env, agent.seed) == (2, 4, 11)
    moments = agent.optimizer.state
    for state in moments.values():
        assert torch.equal(state["step"], expected["steps"])
    value_weight = agent.network.value_head[0].weight
    op_weight = agent.network.heads["op"][0].weight
    assert torch.equal(moments[value_weight]["exp_avg_sq"], expected["value_head_moment"])
    assert torch.equal(moments[op_weight]["exp_avg"], expected["op_head_moment"])
    assert float(agent.network.observation_norm.floor) == 1e-2


def test_version_3_agent_continues_and_is_saved_as_current(agent_v3: Path) -> None:
    agent = PPOAgent.load(agent_v3)
    world = Noise(2, 0, action_space=esper_space(2, 2))
    observations = world.reset()
    for _ in range(2):
        observations = collect(agent, world, observations)
        metrics = agent.update()
        assert metrics["optimizer_steps"] == 4
        assert metrics["stored_log_prob_error"] < metrics["stored_log_prob_tolerance"]
    agent.save(agent_v3)
    manifest = json.loads((agent_v3 / "manifest.json").read_text())
    assert manifest["body"]["version"] == CHECKPOINT_VERSION
    loaded = PPOAgent.load(agent_v3)
    for name, tensor in agent.network.state_dict().items():
        assert torch.equal(loaded.network.state_dict()[name], tensor), name


def test_version_3_compile_backend_becomes_two_settings(agent_v3: Path) -> None:
    config = dict(read_archive(agent_v3, kind=KIND, version=3).notes["config"])
    config["compile_backend"] = "eager"
    agent = PPOAgent.load(rewrite(agent_v3, version=3, config=config))
    assert agent.config.compile_network
    assert agent.config.compile_backend == "eager"
    del config["compile_backend"]
    agent = PPOAgent.load(rewrite(agent_v3, version=3, config=config))
    assert not agent.config.compile_network
    assert agent.config.compile_backend == "inductor"


def test_version_3_gymnasium_agent_raises_one_sentence(agent_v3: Path) -> None:
    """In Esper 0.1, networks for Gymnasium environments had no norm after the LSTM."""
    archive = read_archive(agent_v3, kind=KIND, version=3)
    tensors = {name: t for name, t in archive.tensors.items() if "memory_norm" not in name}
    write_archive(agent_v3, kind=KIND, version=3, tensors=tensors, notes=archive.notes)
    message = "holds an agent for Gymnasium environments from Esper 0.1"
    with pytest.raises(ArchiveError, match=message) as error:
        PPOAgent.load(agent_v3)
    assert "\n" not in str(error.value)


def test_version_3_agent_with_wrong_tensors_raises(agent_v3: Path) -> None:
    rewrite(agent_v3, {"network.surplus": torch.zeros(1)}, version=3)
    with pytest.raises(ArchiveError, match=r"network\.surplus"):
        PPOAgent.load(agent_v3)
    rewrite(agent_v3, {"optimizer.lstm.weight_hh_l0.other": torch.zeros(1)}, version=3)
    with pytest.raises(ArchiveError, match="does not describe an agent"):
        PPOAgent.load(agent_v3)
