"""Where the learner waits for its device, counted on a device that has no numbers at all.

Tensors on `meta` have shapes only: to look at one, to copy one out or to pick rows by a mask is an
error there, exactly where a GPU would have to be waited for. What is allowed to wait goes through
`fetched` and the buffer's look at counts and starts, which are counted here. Copies *to* the
device must not block either.
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
from tests.simic.toys import Noise

ENVS, TIME, HIDDEN = 6, DEFAULT_EPISODE_LENGTH // 5, DEFAULT_LSTM_HIDDEN_DIM // 8
META = torch.device("meta")


class Lists(TorchFunctionMode):
    """Notes tensors that are made on the device from numbers in Python: copies that block."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device == META:
            self.found.append("tensor")
        return result


class Blocking(TorchDispatchMode):
    """Notes copies from the CPU to the device that block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_to_copy":
            outward = args[0].device.type == "cpu" and result.device == META
            if outward and not kwargs.get("non_blocking"):
                self.found.append(name)
        elif name == "copy_":
            inward, source = args[0].device == META, args[1].device.type == "cpu"
            # A number without axes goes along with the kernel; it is no transfer.
            if inward and source and args[1].ndim and not (len(args) > 2 and args[2]):
                self.found.append(name)
        return result


@contextmanager
def blocking() -> Iterator[list[str]]:
    """The copies to the device that block while this is open."""
    with Blocking() as mode, Lists(mode.found):
        yield mode.found


def on_meta(config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> PPOAgent:
    """An agent whose tensors are all on the device without numbers, and without chance."""
    world = Noise(ENVS, 0)
    with monkeypatch.context() as patched:
        patched.setattr(ppo_module, "_stream", lambda *names: None)
        agent = PPOAgent.build(
            world.space, world.state_dim, ENVS, TIME, config, lstm_hidden_dim=HIDDEN, device=META
        )
    agent.shuffler = torch.Generator()
    return agent


def roll_out(agent: PPOAgent, *, cut: bool = False, idle: bool = False) -> None:
    """A whole rollout; the world is on the CPU, its actions are not looked at."""
    world = Noise(ENVS, 0)
    never = torch.zeros(ENVS, dtype=torch.bool)
    for _ in range(TIME):
        decision = agent.act(world.reset(), world.legal())
        assert decision.actions.device == META
        outcome = Outcome(
            observations=world.reset(),
            rewards=torch.zeros(ENVS),
            terminals=never,
            truncations=never,
            final_observations=world.reset() if cut else None,
            active=~never if idle else None,
        )
        agent.record(decision, outcome)
    agent.finish(world.reset())


@pytest.mark.parametrize("settings", [{}, {"cut": True}, {"idle": True}])
def test_acting_and_recording_never_wait(
    settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = on_meta(PPOConfig(), monkeypatch)
    roll_out(agent, **settings)  # tables are made once
    agent.buffer.reset()
    with blocking() as found:
        roll_out(agent, **settings)
    assert found == []


def test_what_waits_or_blocks_is_noticed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, world = on_meta(PPOConfig(), monkeypatch), Noise(ENVS, 0)
    with pytest.raises(RuntimeError, match="meta"):
        agent.act(world.reset(), world.legal(), validate=True)
    with pytest.raises(NotImplementedError, match="meta"):
        agent.buffer.counts.cpu()
    with blocking() as found:
        torch.tensor([1.0]).to(META)
        torch.empty(1, device=META).copy_(torch.ones(1))
        torch.tensor([1.0], device=META)
    assert found == ["_to_copy", "copy_", "tensor"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of every time the device is waited for in an update."""
    noted: list[str] = []

    def fetched(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
        noted.append("fetched")
        return {name: [0.0] * tensor.numel() for name, tensor in tensors.items()}

    def looked_up(buffer: TamiyoRolloutBuffer) -> tuple[Tensor, Tensor]:
        noted.append("looked up")
        starts = torch.zeros(ENVS, TIME, dtype=torch.bool)
        starts[:, 0] = starts[0, 2] = True
        return torch.full((ENVS,), TIME), starts

    monkeypatch.setattr(update_module, "fetched", fetched)
    monkeypatch.setattr(TamiyoRolloutBuffer, "_looked_up", looked_up)
    return noted


@pytest.mark.parametrize(("minibatches", "accumulation_steps"), [(1, 1), (2, 3)])
def test_an_update_waits_once_for_where_episodes_begin_and_once_for_its_metrics(
    waits: list[str],
    minibatches: int,
    accumulation_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = PPOConfig(target_kl=None, minibatches=minibatches, epochs=2)
    agent = on_meta(config, monkeypatch)
    roll_out(agent)
    with blocking() as found:
        agent.update(accumulation_steps=accumulation_steps)
    assert waits == ["looked up", "fetched"]
    assert found == []

    waits.clear()
    agent.config = replace(config, target_kl=1.0, strict=True)
    roll_out(agent)
    agent.update(accumulation_steps=accumulation_steps)
    steps = config.epochs * minibatches  # a limit adds one wait to every optimiser step
    assert waits == ["looked up", "fetched", *["fetched"] * steps, "fetched"]


def test_on_a_gpu_a_head_without_a_choice_is_found_by_the_update() -> None:
    # Without the check at once, on a device whose numbers can be seen.
    world = Noise(ENVS, 0)
    agent = PPOAgent.build(world.space, world.state_dim, ENVS, TIME, lstm_hidden_dim=HIDDEN)
    closed = {"op": torch.ones(ENVS, world.space.size("op"), dtype=torch.bool)}
    closed["op"][4] = False
    legality = Legality(world.space, ENVS, closed)
    decision = agent.act(world.reset(), legality, validate=False)
    agent.record(decision, world.step(decision.actions))
    agent.finish(world.reset())
    with pytest.raises(Exception, match=r"Head 'op' has no legal action; given: row \[4, 0\]"):
        agent.update()
