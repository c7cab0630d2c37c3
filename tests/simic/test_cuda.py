"""The learner on a GPU: the numbers of the CPU, and nothing that waits for the GPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.leyline import DEFAULT_EPISODE_LENGTH, DEFAULT_LSTM_HIDDEN_DIM, AgreementError
from esper.leyline.constants import STORED_LOG_PROB_TOLERANCE, STORED_LOG_PROB_TOLERANCE_TF32
from esper.simic.agent import (
    NonFiniteError,
    PPOAgent,
    PPOConfig,
    RolloutError,
    collect,
    compute_per_head_advantages,
)
from esper.tamiyo import InvalidStateMachineError
from tests.simic.toys import Noise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_ENVS = 8
NUM_STEPS = DEFAULT_EPISODE_LENGTH
HIDDEN_DIM = DEFAULT_LSTM_HIDDEN_DIM // 2
CONFIG = PPOConfig(target_kl=None, lr=3e-3, strict=True)

BUFFER_TENSORS = (
    "states",
    "actions",
    "action_masks",
    "log_probs",
    "values",
    "rewards",
    "terminals",
    "truncations",
    "bootstrap_values",
    "episode_starts",
    "hidden_h",
    "hidden_c",
    "step_counts",
    "next_starts",
)


@pytest.fixture(params=[False, True], ids=["fp32", "tf32"])
def tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield from allow_tf32(request.param)


@pytest.fixture
def fp32() -> Iterator[bool]:
    yield from allow_tf32(False)


def allow_tf32(allowed: bool) -> Iterator[bool]:
    backends = torch.backends
    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = allowed
    yield allowed
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before


def make(device: str, config: PPOConfig = CONFIG) -> tuple[PPOAgent, Noise]:
    """Return an agent on a device, and its world, which is on the CPU."""
    world = Noise(NUM_ENVS, 0)
    agent = PPOAgent(
        world.action_space,
        state_dim=world.state_dim,
        num_envs=NUM_ENVS,
        max_steps_per_env=NUM_STEPS,
        config=config,
        lstm_hidden_dim=HIDDEN_DIM,
        device=device,
    )
    return agent, world


def roll_out(agent: PPOAgent, world: Noise) -> None:
    observations = world.reset()
    while agent.buffer.max_length < NUM_STEPS:
        decision = agent.act(observations, world.legal())
        outcome = world.step(decision.actions.cpu())
        agent.record(decision, outcome)
        observations = outcome.observations
    agent.bootstrap_and_compute_returns(observations)


def weights(agent: PPOAgent) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in agent.network.parameters()])


def test_cuda_update_reproduces_stored_log_probs(tf32: bool) -> None:
    agent, world = make("cuda")
    errors = []
    for _ in range(8):
        roll_out(agent, world)
        metrics = agent.update()
        errors.append(metrics["stored_log_prob_error"])
        assert metrics["peak_memory_bytes"] > 0
    tolerance = STORED_LOG_PROB_TOLERANCE_TF32 if tf32 else STORED_LOG_PROB_TOLERANCE
    assert metrics["stored_log_prob_tolerance"] == tolerance
    assert max(errors) < tolerance


@pytest.mark.usefixtures("fp32")
def test_cuda_and_cpu_make_the_same_update() -> None:
    cpu_agent, world = make("cpu")
    cuda_agent, _ = make("cuda")
    collect(cpu_agent, world, world.reset())
    for name in BUFFER_TENSORS:
        getattr(cuda_agent.buffer, name).copy_(getattr(cpu_agent.buffer, name))
    cuda_agent.buffer.max_length = cpu_agent.buffer.max_length
    for agent in (cpu_agent, cuda_agent):
        agent.buffer.compute_advantages_and_returns()
    before = weights(cpu_agent)
    cpu_metrics, cuda_metrics = cpu_agent.update(), cuda_agent.update()
    change = (weights(cpu_agent) - before).norm()
    assert float((weights(cuda_agent) - weights(cpu_agent)).norm() / change) < 0.02
    assert cpu_metrics["return_scale"] > 0
    for name in ("policy_loss", "value_loss", "entropy", "gradient_norm", "return_scale"):
        assert cuda_metrics[name] == pytest.approx(cpu_metrics[name], rel=1e-3, abs=1e-4), name


@pytest.mark.usefixtures("fp32")
def test_cuda_is_not_waited_for_while_acting_and_recording() -> None:
    agent, world = make("cuda", replace(CONFIG, strict=False))
    roll_out(agent, world)  # loads all kernels
    agent.update()
    states = world.reset()
    outcome = world.step(torch.zeros(NUM_ENVS, len(world.action_space), dtype=torch.int64))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(NUM_STEPS):
            decision = agent.act(states, world.legal())
            agent.record(decision, outcome)
        agent.bootstrap_and_compute_returns(states)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert agent.update()["valid_steps"] == NUM_ENVS * NUM_STEPS


def test_rollout_reaches_cuda_in_one_pinned_transfer() -> None:
    agent, world = make("cpu")
    collect(agent, world, world.reset())
    expected = agent.buffer.get_batched_sequences("cpu")
    agent.buffer.get_batched_sequences("cuda")  # loads all kernels
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        batch = agent.buffer.get_batched_sequences("cuda")
        agent.buffer.states.zero_()  # the source may be overwritten at once
        torch.cuda.synchronize()
    copies = [event.name for event in profile.events() if event.name.startswith("Memcpy HtoD")]
    assert copies == ["Memcpy HtoD (Pinned -> Device)"]
    for name, tensor in vars(expected).items():
        device_type = "cpu" if name == "starts" else "cuda"
        assert getattr(batch, name).device.type == device_type, name
        assert torch.equal(getattr(batch, name).cpu(), tensor), name


def test_cuda_update_rejects_what_acting_did_not_check() -> None:
    agent, world = make("cuda")
    legality = world.legal()
    legality.masks["op"][3] = False
    decision = agent.act(world.reset(), legality)
    agent.record(decision, world.step(decision.actions.cpu()))
    agent.bootstrap_and_compute_returns(world.reset())
    with pytest.raises(InvalidStateMachineError, match=r"'op'.*row \[3, 0\]"):
        agent.update()
    agent.buffer.reset()
    decision = agent.act(world.reset(), world.legal())
    outcome = world.step(decision.actions.cpu())
    truncations = torch.arange(NUM_ENVS) == 2
    outcome = replace(
        outcome, truncations=truncations, terminals=~truncations, final_observations=None
    )
    agent.record(decision, outcome)
    agent.bootstrap_and_compute_returns(world.reset())
    with pytest.raises(RolloutError, match=r"environments \[2\]"):
        agent.update()


def test_cuda_agent_is_saved_and_continues(tmp_path_factory: pytest.TempPathFactory) -> None:
    agent, world = make("cuda", replace(CONFIG, strict=False))
    roll_out(agent, world)
    agent.update()
    path = agent.save(tmp_path_factory.mktemp("cuda") / "agent")
    for device in ("cuda", "cpu"):
        loaded = PPOAgent.load(path, device=device)
        assert loaded.device.type == device
        assert torch.equal(weights(loaded), weights(agent))
        roll_out(loaded, world)
        loaded.update()


def test_cuda_peak_memory_is_that_of_the_update() -> None:
    agent, world = make("cuda", replace(CONFIG, strict=False))
    roll_out(agent, world)
    allocated = torch.cuda.memory_allocated()  # by everything else in this process
    earlier_peak = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del earlier_peak
    assert 0 < agent.update()["peak_memory_bytes"] - allocated < 2**28


def test_cuda_update_takes_no_step_into_nonfinite_numbers() -> None:
    agent, world = make("cuda", replace(CONFIG, strict=False))
    roll_out(agent, world)
    agent.update()
    roll_out(agent, world)
    agent.buffer.rewards[3, 5] = torch.nan
    agent.bootstrap_and_compute_returns(world.reset())
    before = weights(agent)
    with pytest.raises(NonFiniteError, match="rewards of environment 3, step 5"):
        agent.update()
    assert torch.equal(weights(agent), before)
    diverging, world = make("cuda", replace(CONFIG, strict=False, lr=1e30))
    roll_out(diverging, world)
    with pytest.raises(NonFiniteError, match="optimiser step 2"):
        diverging.update()
    assert bool(weights(diverging).isfinite().all())
    steps = {float(state["step"]) for state in diverging.optimizer.state.values()}
    assert steps == {1.0}


def test_bf16_on_cuda_stays_within_its_tolerance() -> None:
    agent, world = make("cuda", replace(CONFIG, bf16=True))
    for _ in range(8):
        roll_out(agent, world)  # a strict update raises an error outside the tolerance
        assert agent.update()["optimizer_steps"] == CONFIG.epochs


def test_per_head_advantages_on_two_devices_raise_torchs_error() -> None:
    """The function moves no tensor, since a transfer would wait for the GPU unnoticed."""
    ops = torch.zeros(3, dtype=torch.int64, device="cuda")
    with pytest.raises(RuntimeError) as error:
        compute_per_head_advantages(torch.zeros(3), ops)
    assert not isinstance(error.value, AgreementError)


@pytest.mark.parametrize("backend", ["fused", "chip"])
def test_cuda_trains_a_run_to_its_best_agent(
    backend: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from esper.simic.training import Trainer
    from tests.simic.training.tiny import tiny_run

    run = tiny_run(tmp_path_factory.mktemp("cuda") / "run", device="cuda", backend=backend)
    with Trainer(run) as trainer:
        assert trainer.begin()
        assert trainer.train()
        assert trainer.agent.device.type == trainer.garden.population.device.type == "cuda"
        assert trainer.best is not None
        assert not trainer.undone
