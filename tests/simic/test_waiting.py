"""Where the learner waits for its device, counted on a device whose tensors have no values.

Tensors on `meta` have shapes only. Reading a value, copying to the CPU, or selecting rows by a mask
is an error there, exactly where a GPU would have to be waited for. Only `_to_host` of the update
and the buffer's `_validate_and_sync` may wait. Their calls are counted here. Copies *to* the device
must not block either.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline import DEFAULT_EPISODE_LENGTH, DEFAULT_LSTM_HIDDEN_DIM, Legality
from esper.simic.agent import Outcome, PPOAgent, PPOConfig, TamiyoRolloutBuffer
from esper.simic.agent import ppo as ppo_module
from esper.simic.agent import update as update_module
from esper.tamiyo import InvalidStateMachineError
from tests.simic.toys import Noise

NUM_ENVS = 6
NUM_STEPS = DEFAULT_EPISODE_LENGTH // 5
HIDDEN_DIM = DEFAULT_LSTM_HIDDEN_DIM // 8
META = torch.device("meta")


class TensorCreations(TorchFunctionMode):
    """Records tensors that are created on the device from Python numbers: copies that block."""

    def __init__(self, blocking_calls: list[str]) -> None:
        super().__init__()
        self.blocking_calls = blocking_calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device == META:
            self.blocking_calls.append("tensor")
        return result


class BlockingCopies(TorchDispatchMode):
    """Records copies from the CPU to the device that block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking_calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_to_copy":
            is_to_device = args[0].device.type == "cpu" and result.device == META
            if is_to_device and not kwargs.get("non_blocking"):
                self.blocking_calls.append(name)
        elif name == "copy_":
            is_to_device = args[0].device == META and args[1].device.type == "cpu"
            is_non_blocking = len(args) > 2 and args[2]
            # A tensor without dimensions is passed to the kernel as a number: no transfer.
            if is_to_device and args[1].ndim and not is_non_blocking:
                self.blocking_calls.append(name)
        return result


@contextmanager
def record_blocking_calls() -> Iterator[list[str]]:
    """Record the copies to the device that block."""
    with BlockingCopies() as mode, TensorCreations(mode.blocking_calls):
        yield mode.blocking_calls


def make_meta_agent(config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> PPOAgent:
    """Return an agent on the meta device, which has no random generators."""
    world = Noise(NUM_ENVS, 0)

    def no_generator(*names: object) -> None:
        return None

    with monkeypatch.context() as patched:
        patched.setattr(ppo_module, "_generator", no_generator)
        agent = PPOAgent(
            world.action_space,
            state_dim=world.state_dim,
            num_envs=NUM_ENVS,
            max_steps_per_env=NUM_STEPS,
            config=config,
            lstm_hidden_dim=HIDDEN_DIM,
            device=META,
        )
    agent.shuffler = torch.Generator()
    return agent


def roll_out(agent: PPOAgent, *, truncated: bool = False, inactive: bool = False) -> None:
    """Fill the agent's buffer; the world is on the CPU and ignores the actions."""
    world = Noise(NUM_ENVS, 0)
    no_ends = torch.zeros(NUM_ENVS, dtype=torch.bool)
    for _ in range(NUM_STEPS):
        decision = agent.act(world.reset(), world.legal())
        assert decision.actions.device == META
        outcome = Outcome(
            observations=world.reset(),
            rewards=torch.zeros(NUM_ENVS),
            terminals=no_ends,
            truncations=no_ends,
            final_observations=world.reset() if truncated else None,
            active=~no_ends if inactive else None,
        )
        agent.record(decision, outcome)
    agent.bootstrap_and_compute_returns(world.reset())


@pytest.mark.parametrize("options", [{}, {"truncated": True}, {"inactive": True}])
def test_acting_and_recording_never_wait(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_meta_agent(PPOConfig(), monkeypatch)
    roll_out(agent, **options)  # cached tables are created once
    agent.buffer.reset()
    with record_blocking_calls() as blocking_calls:
        roll_out(agent, **options)
    assert blocking_calls == []


def test_waiting_and_blocking_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, world = make_meta_agent(PPOConfig(), monkeypatch), Noise(NUM_ENVS, 0)
    with pytest.raises(RuntimeError, match="meta"):
        agent.act(world.reset(), world.legal(), validate=True)
    with pytest.raises(NotImplementedError, match="meta"):
        agent.buffer.step_counts.cpu()
    with record_blocking_calls() as blocking_calls:
        torch.tensor([1.0]).to(META)
        torch.empty(1, device=META).copy_(torch.ones(1))
        torch.tensor([1.0], device=META)
    assert blocking_calls == ["_to_copy", "copy_", "tensor"]


TO_HOST = "to host"
VALIDATE = "validate"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The times that an update waits for the device, in order."""
    calls: list[str] = []

    def to_host(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
        calls.append(TO_HOST)
        return {name: [0.0] * tensor.numel() for name, tensor in tensors.items()}

    def validate_and_sync(buffer: TamiyoRolloutBuffer) -> tuple[Tensor, Tensor]:
        calls.append(VALIDATE)
        starts = torch.zeros(NUM_ENVS, NUM_STEPS, dtype=torch.bool)
        starts[:, 0] = True
        starts[0, 2] = True
        return torch.full((NUM_ENVS,), NUM_STEPS), starts

    monkeypatch.setattr(update_module, "_to_host", to_host)
    monkeypatch.setattr(TamiyoRolloutBuffer, "_validate_and_sync", validate_and_sync)
    return calls


@pytest.mark.parametrize("inactive", [False, True])
@pytest.mark.parametrize(("minibatches", "accumulation_steps"), [(1, 1), (2, 3)])
def test_update_waits_for_validation_and_metrics_only(
    waits: list[str],
    minibatches: int,
    accumulation_steps: int,
    inactive: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = PPOConfig(target_kl=None, minibatches=minibatches, epochs=2)
    agent = make_meta_agent(config, monkeypatch)
    roll_out(agent, inactive=inactive)
    with record_blocking_calls() as blocking_calls:
        agent.update(accumulation_steps=accumulation_steps)
    assert waits == [VALIDATE, TO_HOST]
    assert blocking_calls == []

    # A KL limit waits once in every optimiser step, a strict update once before the first.
    waits.clear()
    agent.config = replace(config, target_kl=1.0, strict=True)
    roll_out(agent, inactive=inactive)
    agent.update(accumulation_steps=accumulation_steps)
    num_optimizer_steps = config.epochs * minibatches
    assert waits == [VALIDATE, TO_HOST, *[TO_HOST] * num_optimizer_steps, TO_HOST]


def test_update_finds_heads_without_legal_action() -> None:
    """On a GPU, acting does not check masks; here the check is turned off."""
    world = Noise(NUM_ENVS, 0)
    agent = PPOAgent(
        world.action_space,
        state_dim=world.state_dim,
        num_envs=NUM_ENVS,
        max_steps_per_env=NUM_STEPS,
        lstm_hidden_dim=HIDDEN_DIM,
    )
    op_mask = torch.ones(NUM_ENVS, world.action_space.size("op"), dtype=torch.bool)
    op_mask[4] = False
    legality = Legality(world.action_space, NUM_ENVS, {"op": op_mask})
    decision = agent.act(world.reset(), legality, validate=False)
    agent.record(decision, world.step(decision.actions))
    agent.bootstrap_and_compute_returns(world.reset())
    message = r"Head 'op' has no legal action; given: row \[4, 0\]"
    with pytest.raises(InvalidStateMachineError, match=message):
        agent.update()
