"""The learner on a GPU: the same numbers as on a CPU, and nothing that waits for it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.leyline import DEFAULT_EPISODE_LENGTH, DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.constants import STORED_LOG_PROB_TOLERANCE, STORED_LOG_PROB_TOLERANCE_TF32
from esper.simic.agent import NonFiniteError, PPOAgent, PPOConfig, RolloutError, collect
from esper.simic.training import Trainer
from esper.tamiyo import InvalidStateMachineError
from tests.simic.toys import Noise
from tests.simic.training.tiny import tiny_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ENVS, TIME, HIDDEN = 8, DEFAULT_EPISODE_LENGTH, DEFAULT_LSTM_HIDDEN_DIM // 2
CONFIG = PPOConfig(target_kl=None, learning_rate=3e-3, strict=True)


@pytest.fixture(params=[False, True], ids=["fp32", "tf32"])
def tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield from allowing(request.param)


@pytest.fixture
def fp32() -> Iterator[bool]:
    yield from allowing(False)


def allowing(tf32: bool) -> Iterator[bool]:
    backends = torch.backends
    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = tf32
    yield tf32
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before


def make(device: str, config: PPOConfig = CONFIG) -> tuple[PPOAgent, Noise]:
    """The world lives on the CPU, wherever the agent does."""
    world = Noise(ENVS, 0)
    agent = PPOAgent.build(
        world.space, world.state_dim, ENVS, TIME, config, lstm_hidden_dim=HIDDEN, device=device
    )
    return agent, world


def roll_out(agent: PPOAgent, world: Noise) -> None:
    observations = world.reset()
    while agent.buffer.longest < TIME:
        decision = agent.act(observations, world.legal())
        outcome = world.step(decision.actions.cpu())
        agent.record(decision, outcome)
        observations = outcome.observations
    agent.finish(observations)


def weights(agent: PPOAgent) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in agent.network.parameters()])


def test_cuda_finds_the_stored_log_probs_again(tf32: bool) -> None:
    agent, world = make("cuda")
    errors = []
    for _ in range(8):
        roll_out(agent, world)
        metrics = agent.update()
        errors.append(metrics["stored_log_prob_error"])
        assert metrics["peak_memory_bytes"] > 0
    limit = STORED_LOG_PROB_TOLERANCE_TF32 if tf32 else STORED_LOG_PROB_TOLERANCE
    assert metrics["stored_log_prob_tolerance"] == limit
    assert max(errors) < limit


@pytest.mark.usefixtures("fp32")
def test_cuda_and_cpu_make_the_same_update() -> None:
    here, world = make("cpu")
    there, _ = make("cuda")
    collect(here, world, world.reset())
    for name, data in here.buffer._data.items():
        there.buffer[name].copy_(data)
    there.buffer.counts.copy_(here.buffer.counts)
    there.buffer.longest = here.buffer.longest
    for agent in (here, there):
        agent.buffer.compute_advantages_and_returns(torch.zeros(ENVS, device=agent.device))
    before = weights(here)
    cpu, cuda = here.update(), there.update()
    change = (weights(here) - before).norm()
    assert float((weights(there) - weights(here)).norm() / change) < 0.02
    for name in ("policy_loss", "value_loss", "entropy", "gradient_norm", "return_scale"):
        assert cuda[name] == pytest.approx(cpu[name], rel=1e-3, abs=1e-4), name


@pytest.mark.usefixtures("fp32")
def test_cuda_is_not_waited_for_while_acting_and_recording() -> None:
    agent, world = make("cuda", replace(CONFIG, strict=False))
    roll_out(agent, world)  # everything is loaded
    agent.update()
    states = world.reset()
    outcome = world.step(torch.zeros(ENVS, len(world.space), dtype=torch.int64))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(TIME):
            decision = agent.act(states, world.legal())
            agent.record(decision, outcome)
        agent.finish(states)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert agent.update()["valid_steps"] == ENVS * TIME


def test_cuda_gets_a_rollout_from_the_cpu_in_one_pinned_transfer() -> None:
    agent, world = make("cpu")
    collect(agent, world, world.reset())
    expected = agent.buffer.get_batched_sequences("cpu")
    agent.buffer.get_batched_sequences("cuda")  # everything is loaded
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        found = agent.buffer.get_batched_sequences("cuda")
        agent.buffer["states"].zero_()  # the source may be overwritten at once
        torch.cuda.synchronize()
    copies = [event.name for event in profile.events() if event.name.startswith("Memcpy HtoD")]
    assert copies == ["Memcpy HtoD (Pinned -> Device)"]
    for name in ("states", "actions", "masks", "log_probs", "advantages", "valid", "matters"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def test_cuda_update_refuses_what_acting_did_not_look_at() -> None:
    agent, world = make("cuda")
    legality = world.legal()
    legality.masks["op"][3] = False
    decision = agent.act(world.reset(), legality)
    agent.record(decision, world.step(decision.actions.cpu()))
    agent.finish(world.reset())
    with pytest.raises(InvalidStateMachineError, match=r"'op'.*row \[3, 0\]"):
        agent.update()
    agent.buffer.reset()
    decision = agent.act(world.reset(), world.legal())
    outcome = world.step(decision.actions.cpu())
    cut = torch.arange(ENVS) == 2
    agent.record(
        decision, replace(outcome, truncations=cut, terminals=~cut, final_observations=None)
    )
    agent.finish(world.reset())
    with pytest.raises(RolloutError, match=r"environments \[2\]"):
        agent.update()


def test_cuda_agents_are_saved_and_go_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    agent, world = make("cuda", replace(CONFIG, strict=False))
    roll_out(agent, world)
    agent.update()
    path = agent.save(tmp_path_factory.mktemp("cuda") / "agent")
    for device in ("cuda", "cpu"):
        again = PPOAgent.load(path, device=device)
        assert again.device.type == device
        assert torch.equal(weights(again), weights(agent))
        roll_out(again, world)
        again.update()


def test_cuda_reports_the_peak_memory_of_the_update_alone() -> None:
    agent, world = make("cuda", replace(CONFIG, strict=False))
    roll_out(agent, world)
    held = torch.cuda.memory_allocated()  # by whatever else lives in this process
    before = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del before
    assert 0 < agent.update()["peak_memory_bytes"] - held < 2**28


def test_cuda_update_refuses_what_is_not_finite_and_takes_no_step_into_it() -> None:
    agent, world = make("cuda", replace(CONFIG, strict=False))
    roll_out(agent, world)
    agent.update()
    roll_out(agent, world)
    agent.buffer["rewards"][3, 5] = torch.nan
    agent.finish(world.reset())
    before = weights(agent)
    with pytest.raises(NonFiniteError, match="rewards of environment 3, step 5"):
        agent.update()
    assert torch.equal(weights(agent), before)
    wild, other = make("cuda", replace(CONFIG, strict=False, learning_rate=1e30))
    roll_out(wild, other)
    with pytest.raises(NonFiniteError, match="optimiser step 2"):
        wild.update()
    assert bool(weights(wild).isfinite().all())
    assert float(wild.optimizer.moments["steps"]) == 1.0


def test_bf16_on_cuda_stays_within_its_tolerance() -> None:
    agent, world = make("cuda", replace(CONFIG, bf16=True))
    for _ in range(8):
        roll_out(agent, world)
        assert agent.update()["optimizer_steps"] == CONFIG.epochs  # strict: it has agreed


@pytest.mark.parametrize("backend", ["fused", "chip"])
def test_cuda_trains_a_run_from_its_controls_to_its_best_agent(
    backend: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tiny_run(tmp_path_factory.mktemp("cuda") / "run", device="cuda", backend=backend)
    with Trainer(run) as trainer:
        assert trainer.begin()
        assert trainer.train()
        assert trainer.agent.device.type == trainer.garden.population.device.type == "cuda"
        assert trainer.best is not None
        assert not trainer.undone
