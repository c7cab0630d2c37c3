"""The learner against its alternatives: advantages, training throughput, the update's floor.

    python benchmarks/learner.py                 # CPU, one thread
    python benchmarks/learner.py --device cuda   # updates on a GPU, after it was checked there
    python benchmarks/learner.py --json FILE     # the figures, flat
    python benchmarks/learner.py --write         # its table in docs/performance.md

The comparison with sb3-contrib runs where that package can be imported:
`pip install sb3-contrib gymnasium`. Both sides do the same work in the same run, in turns; ratios
are what counts. On the CPU everything runs in one thread and its processor time is taken: that is
the time on the clock of an idle machine, and a busy neighbour does not count.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _report import write_json, write_section
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from esper.leyline import (
    DEFAULT_EPISODE_LENGTH,
    DEFAULT_GAE_LAMBDA,
    DEFAULT_GAMMA,
    DEFAULT_LSTM_HIDDEN_DIM,
    Legality,
)
from esper.leyline.constants import (
    STORED_LOG_PROB_TOLERANCE,
    STORED_LOG_PROB_TOLERANCE_BF16,
    STORED_LOG_PROB_TOLERANCE_TF32,
)
from esper.simic.agent import (
    Outcome,
    PPOAgent,
    PPOConfig,
    TamiyoRolloutBuffer,
    collect,
    compute_gae,
    initial_weights,
)
from esper.tamiyo import SkipActorCritic, independent_heads

SIZES = ((64, 150), (1024, 150))  # environments x steps
HEADS, STATE = (5, 3, 9, 3), 32  # as many actions as Esper's heads have with three slots
EPOCHS = 4
OURS = (1024, DEFAULT_EPISODE_LENGTH)  # environments x steps of a large garden
SB3_ENVS, SB3_STEPS, SB3_BATCH, SB3_EPOCHS, SB3_ROLLOUTS = 8, 128, 128, 10, 2
SB3_REPEATS = 3  # taken in turns; the fastest of each counts
DRIFT = 0.02  # of the weights' change: how far updates on CPU and GPU may be apart
HEADER = ("figure", "value")
# Fields of a step in a rollout buffer, without the hidden state.
STEP_FIELDS = (
    *("states", "actions", "action_masks", "log_probs", "values", "rewards"),
    *("terminals", "truncations", "bootstrap_values"),
)
Figures = dict[str, float]


def fastest(
    work: Callable[[], object],
    repeats: int,
    device: str = "cpu",
    before: Callable[[], object] = lambda: None,
) -> float:
    """Seconds of the fastest of several runs, after one to warm up; `before` each is not timed."""
    times = []
    for _ in range(repeats + 1):
        before()
        start = clock(device)
        work()
        times.append(clock(device) - start)
    return min(times[1:])


def clock(device: str) -> float:
    """Seconds: the processor's own on a CPU, those on the wall for a GPU, after it is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def env_loop(rewards: Tensor, values: Tensor, terminals: Tensor, last: Tensor) -> Tensor:
    """One environment after the other, one step after the other."""
    result = torch.zeros_like(rewards)
    for env in range(len(rewards)):
        ahead, running = last[env], torch.tensor(0.0)
        for step in reversed(range(rewards.shape[1])):
            goes_on = 1.0 - terminals[env, step].float()
            delta = rewards[env, step] + DEFAULT_GAMMA * ahead * goes_on - values[env, step]
            running = delta + DEFAULT_GAMMA * DEFAULT_GAE_LAMBDA * goes_on * running
            result[env, step] = running
            ahead = values[env, step]
    return result


def time_loop(rewards: Tensor, values: Tensor, terminals: Tensor, last: Tensor) -> Tensor:
    """All environments together, one step after the other."""
    result = torch.zeros_like(rewards)
    ahead, running = last, torch.zeros_like(last)
    for step in reversed(range(rewards.shape[1])):
        goes_on = 1.0 - terminals[:, step].float()
        delta = rewards[:, step] + DEFAULT_GAMMA * ahead * goes_on - values[:, step]
        running = delta + DEFAULT_GAMMA * DEFAULT_GAE_LAMBDA * goes_on * running
        result[:, step] = running
        ahead = values[:, step]
    return result


def numpy_loop(rewards: Tensor, values: Tensor, terminals: Tensor, last: Tensor) -> Tensor:
    """As `time_loop`, in numpy."""
    r, v, d = (part.T.numpy() for part in (rewards, values, terminals))
    result = np.zeros_like(r)
    ahead, running = last.numpy(), np.zeros_like(last.numpy())
    for step in reversed(range(len(r))):
        goes_on = 1.0 - d[step].astype(np.float32)
        delta = r[step] + DEFAULT_GAMMA * ahead * goes_on - v[step]
        running = delta + DEFAULT_GAMMA * DEFAULT_GAE_LAMBDA * goes_on * running
        result[step] = running
        ahead = v[step]
    return torch.from_numpy(result.T)


def measure_advantages() -> Figures:
    figures: Figures = {}
    for envs, steps in SIZES:
        rewards, values = torch.randn(envs, steps), torch.randn(envs, steps)
        terminals, last = torch.rand(envs, steps) < 0.02, torch.randn(envs)
        never, counts = torch.zeros_like(terminals), torch.full((envs,), steps)

        def ours(
            given: tuple[Tensor, ...] = (rewards, values, terminals, never, rewards, last, counts),
        ) -> Tensor:
            return compute_gae(*given, gamma=DEFAULT_GAMMA, gae_lambda=DEFAULT_GAE_LAMBDA)

        seconds = fastest(ours, 50)
        for name, loop in (
            ("env_loop", env_loop),
            ("time_loop", time_loop),
            ("numpy_loop", numpy_loop),
        ):
            given = (rewards, values, terminals, last)
            torch.testing.assert_close(loop(*given), ours(), atol=1e-4, rtol=1e-4)
            other = fastest(lambda loop=loop, given=given: loop(*given), 2 if "env" in name else 10)
            figures[f"gae_{envs}x{steps}_vs_{name}"] = other / seconds
        figures[f"gae_{envs}x{steps}_ms"] = 1e3 * seconds
    return figures


def make_agent(envs: int, steps: int, device: str, config: PPOConfig) -> PPOAgent:
    return PPOAgent(
        independent_heads(HEADS),
        state_dim=STATE,
        num_envs=envs,
        max_steps_per_env=steps,
        config=config,
        device=device,
    )


def fill(agent: PPOAgent, end_rate: float = 0.0) -> float:
    """Fill the agent's rollout; returns seconds per step of acting and recording.

    Without an end rate the rollout is aligned with its episodes.
    """
    buffer, device = agent.buffer, agent.device
    envs, steps = buffer.num_envs, buffer.max_steps_per_env
    draw = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    never = torch.zeros(envs, dtype=torch.bool, device=device)
    legality = Legality(agent.action_space, envs, {})
    states = numbers(steps, envs, STATE)
    ends = torch.rand(steps, envs, device=device, generator=draw) < end_rate
    ends[-1] |= end_rate == 0.0
    rewards = numbers(steps, envs)
    start = clock(device.type)
    for step in range(steps):
        decision = agent.act(states[step], legality)
        agent.record(decision, Outcome(states[step], rewards[step], ends[step], never))
    spent = clock(device.type) - start
    agent.bootstrap_and_compute_returns(states[-1])
    return spent / steps


def measure_update(envs: int, steps: int, device: str) -> Figures:
    """An update, and as its floor a bare LSTM forward and backward as often."""
    agent = make_agent(envs, steps, device, PPOConfig(epochs=EPOCHS, target_kl=None))
    fill(agent)
    agent.buffer.reset()
    step_s = fill(agent)
    agent.buffer.reset()
    lstm = nn.LSTM(DEFAULT_LSTM_HIDDEN_DIM, DEFAULT_LSTM_HIDDEN_DIM, batch_first=True).to(device)
    inputs = torch.randn(envs, steps, DEFAULT_LSTM_HIDDEN_DIM, device=device)

    def floor() -> None:
        for _ in range(EPOCHS):
            lstm.zero_grad()
            lstm(inputs)[0].sum().backward()

    turns = [
        (fastest(floor, 2, device), fastest(agent.update, 2, device, lambda: fill(agent)))
        for _ in range(3)
    ]
    floors, updates = zip(*turns, strict=True)
    figures = {
        "update_vs_lstm_floor": min(updates) / min(floors),
        "update_ms": 1e3 * min(updates),
        "act_and_record_ms": 1e3 * step_s,
    }
    if device == "cuda":
        fill(agent)
        figures["peak_mb"] = agent.update()["peak_memory_bytes"] / 2**20
    return figures


def check_cuda() -> Figures:
    """Is what runs on the GPU right? Ends the script with a sentence where it is not."""
    figures: Figures = {}
    tolerances = {
        "fp32": STORED_LOG_PROB_TOLERANCE,
        "tf32": STORED_LOG_PROB_TOLERANCE_TF32,
        "bf16": STORED_LOG_PROB_TOLERANCE_BF16,
    }
    for precision, tolerance in tolerances.items():
        allow_tf32(precision == "tf32")
        config = PPOConfig(epochs=EPOCHS, lr=3e-3, bf16=precision == "bf16")
        agent = make_agent(64, 50, "cuda", config)
        worst = 0.0
        for _ in range(10):  # the policy must not stay uniform: then nothing could differ
            fill(agent, end_rate=0.1)
            worst = max(worst, agent.update()["stored_log_prob_error"])
        figures[f"cuda_stored_log_prob_error_{precision}"] = worst
        require(worst < tolerance, f"stored log-probs are off by {worst:.2g} in {precision}")
    allow_tf32(False)
    figures["cuda_vs_cpu_drift"] = drift = cuda_drift()
    require(drift < DRIFT, f"updates on CPU and GPU differ by {drift:.2g} of their change")
    agent = make_agent(8, 8, "cuda", PPOConfig())
    fill(agent)
    require(agent.update()["peak_memory_bytes"] > 0, "the peak memory is not measured")
    kinds = transfers_to_cuda()
    require(
        kinds == ["Memcpy HtoD (Pinned -> Device)"],
        f"a rollout on the CPU goes to the GPU as {kinds}, not as one pinned transfer",
    )
    return figures


def cuda_drift() -> float:
    """How far the same update ends apart on CPU and GPU, as a share of what it changes."""
    config = PPOConfig(epochs=EPOCHS, target_kl=None, normalize_observations=False)
    here, there = (make_agent(64, 50, device, config) for device in ("cpu", "cuda"))
    fill(here, end_rate=0.1)
    copy_rollout(here.buffer, there.buffer)
    here.buffer.compute_advantages_and_returns()
    there.buffer.compute_advantages_and_returns()
    before = weights(here)
    here.update()
    there.update()
    return float((weights(there) - weights(here)).norm() / (weights(here) - before).norm())


def copy_rollout(source: TamiyoRolloutBuffer, target: TamiyoRolloutBuffer) -> None:
    """Copy a full rollout to an empty buffer, which may be on another device."""
    device = target.device
    for step in range(source.max_steps_per_env):
        fields = {name: getattr(source, name)[:, step].to(device) for name in STEP_FIELDS}
        # Stored as [E, T, L, D]; `add_batch` takes [L, E, D].
        h = source.hidden_h[:, step].transpose(0, 1).to(device)
        c = source.hidden_c[:, step].transpose(0, 1).to(device)
        target.add_batch(hidden=(h, c), **fields)


def transfers_to_cuda() -> list[str]:
    """The copies that a rollout on the CPU makes on its way to the GPU."""
    agent = make_agent(64, 50, "cpu", PPOConfig())
    fill(agent, end_rate=0.1)
    agent.buffer.get_batched_sequences("cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        agent.buffer.get_batched_sequences("cuda")
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.name.startswith("Memcpy HtoD")]


def weights(agent: PPOAgent) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in agent.network.parameters()])


def allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise SystemExit(f"The learner is not right on this GPU: {sentence}.")


def esper_steps_per_second() -> float:
    """Return environment steps per processor second, with the network of `esper.rl`."""
    from esper.rl import make_gym

    world = make_gym("CartPole-v1", SB3_ENVS)
    config = PPOConfig(
        epochs=SB3_EPOCHS, minibatches=SB3_ENVS * SB3_STEPS // SB3_BATCH, target_kl=None
    )
    with initial_weights(0):
        network = SkipActorCritic(world.action_space, state_dim=world.state_dim)
    agent = PPOAgent(network=network, num_envs=SB3_ENVS, max_steps_per_env=SB3_STEPS, config=config)
    observations = collect(agent, world, world.reset())
    agent.update()
    start = clock("cpu")
    for _ in range(SB3_ROLLOUTS):
        observations = collect(agent, world, observations)
        agent.update()
    return SB3_ROLLOUTS * SB3_ENVS * SB3_STEPS / (clock("cpu") - start)


def sb3_steps_per_second(shared: bool) -> float:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    policy = {
        "lstm_hidden_size": DEFAULT_LSTM_HIDDEN_DIM,
        "shared_lstm": shared,
        "enable_critic_lstm": not shared,
    }
    model = RecurrentPPO(
        "MlpLstmPolicy",
        make_vec_env("CartPole-v1", SB3_ENVS),
        n_steps=SB3_STEPS,
        batch_size=SB3_BATCH,
        n_epochs=SB3_EPOCHS,
        policy_kwargs=policy,
        device="cpu",
    )
    rollout = SB3_ENVS * SB3_STEPS
    model.learn(rollout)
    start = clock("cpu")
    model.learn(SB3_ROLLOUTS * rollout, reset_num_timesteps=False)
    return SB3_ROLLOUTS * rollout / (clock("cpu") - start)


def measure_throughput() -> Figures:
    turns = [
        (esper_steps_per_second(), sb3_steps_per_second(False), sb3_steps_per_second(True))
        for _ in range(SB3_REPEATS)
    ]
    ours, default, shared = (max(rates) for rates in zip(*turns, strict=True))
    return {
        "steps_per_second": ours,
        "sb3_default_steps_per_second": default,
        "sb3_shared_steps_per_second": shared,
        "throughput_vs_sb3_default": ours / default,
        "throughput_vs_sb3_shared": ours / shared,
    }


def measure_cpu(console: Console) -> Figures:
    figures = measure_advantages() | measure_update(*SIZES[0], "cpu")
    missing = [name for name in ("gymnasium", "sb3_contrib") if not importlib.util.find_spec(name)]
    if missing:
        console.print(f"Without {' and '.join(missing)}: no comparison with sb3-contrib.")
        return figures
    return figures | measure_throughput()


def measure_cuda(console: Console) -> Figures:
    figures = check_cuda()
    console.print("The learner is right on this GPU; now its speed, in TF32.")
    allow_tf32(True)
    for envs, steps in (*SIZES, OURS):
        sized = measure_update(envs, steps, "cuda")
        figures |= {f"cuda_{envs}x{steps}_{name}": value for name, value in sized.items()}
    console.print("The comparison with sb3-contrib is one of the CPU's figures: left out here.")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="write the figures flat to this file")
    parser.add_argument("--write", action="store_true", help="update docs/performance.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    measure = measure_cuda if options.device == "cuda" else measure_cpu
    figures = measure(console)
    rows = [[name, shown(value)] for name, value in figures.items()]
    table = Table(*HEADER, title=f"the learner, {options.device}")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    write_json(options.json, figures)
    if options.write:
        command = f"python benchmarks/learner.py --device {options.device} --write"
        write_section("learner", options.device, command, HEADER, rows)


def shown(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


if __name__ == "__main__":
    main()
