"""The learner against its alternatives: advantages, training throughput, the update's floor.

    python benchmarks/learner.py                 # CPU, one thread
    python benchmarks/learner.py --device cuda   # adds the update of 1024 x 150 steps on a GPU
    python benchmarks/learner.py --json FILE

The comparison with sb3-contrib runs where that package can be imported:
`pip install sb3-contrib gymnasium`. Both sides do the same work in the same run; ratios are what
counts, absolute times depend on the machine and its neighbours.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from esper.leyline import DEFAULT_GAE_LAMBDA, DEFAULT_GAMMA, DEFAULT_LSTM_HIDDEN_DIM, Legality
from esper.simic.agent import Outcome, PPOAgent, PPOConfig, collect, generalised_advantages
from esper.tamiyo import independent_heads

SIZES = ((64, 150), (1024, 150))  # environments x steps
HEADS, STATE = (5, 3, 9, 3), 32  # as many actions as Esper's heads have with three slots
EPOCHS = 4
SB3_ENVS, SB3_STEPS, SB3_BATCH, SB3_EPOCHS, SB3_ROLLOUTS = 8, 128, 128, 10, 3
Figures = dict[str, float]


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


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
            return generalised_advantages(
                *given, gamma=DEFAULT_GAMMA, gae_lambda=DEFAULT_GAE_LAMBDA
            )

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


def filled_agent(envs: int, steps: int, device: str) -> PPOAgent:
    """An agent with a full rollout, aligned with its episodes."""
    config = PPOConfig(epochs=EPOCHS, target_kl=None)
    space = independent_heads(HEADS)
    agent = PPOAgent.build(space, STATE, envs, steps, config, device=device)
    never = torch.zeros(envs, dtype=torch.bool, device=device)
    for step in range(steps):
        states = torch.randn(envs, STATE, device=device)
        decision = agent.act(states, Legality(space, envs, {}))
        ended = torch.full((envs,), step == steps - 1, device=device)
        rewards = torch.randn(envs, device=device)
        agent.record(decision, Outcome(states, rewards, ended, never))
    agent.finish(states)
    return agent


def measure_update(envs: int, steps: int, device: str) -> Figures:
    """An update, and as its floor a bare LSTM forward and backward as often."""
    agent = filled_agent(envs, steps, device)
    lstm = nn.LSTM(DEFAULT_LSTM_HIDDEN_DIM, DEFAULT_LSTM_HIDDEN_DIM, batch_first=True).to(device)
    inputs = torch.randn(envs, steps, DEFAULT_LSTM_HIDDEN_DIM, device=device)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def floor() -> None:
        for _ in range(EPOCHS):
            lstm.zero_grad()
            lstm(inputs)[0].sum().backward()
        wait()

    def update() -> None:
        agent.update(clear_buffer=False)
        wait()

    floor_s, update_s = fastest(floor, 3), fastest(update, 3)
    figures = {"update_vs_lstm_floor": update_s / floor_s, "update_ms": 1e3 * update_s}
    if device == "cuda":
        figures["peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return figures


def esper_steps_per_second() -> float:
    from esper.simic.gym import make_gym

    world = make_gym("CartPole-v1", SB3_ENVS)
    config = PPOConfig(
        epochs=SB3_EPOCHS, minibatches=SB3_ENVS * SB3_STEPS // SB3_BATCH, target_kl=None
    )
    agent = PPOAgent.build(world.space, world.state_dim, SB3_ENVS, SB3_STEPS, config)
    observations = collect(agent, world, world.reset())
    agent.update()
    start = time.perf_counter()
    for _ in range(SB3_ROLLOUTS):
        observations = collect(agent, world, observations)
        agent.update()
    return SB3_ROLLOUTS * SB3_ENVS * SB3_STEPS / (time.perf_counter() - start)


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
    start = time.perf_counter()
    model.learn(SB3_ROLLOUTS * rollout, reset_num_timesteps=False)
    return SB3_ROLLOUTS * rollout / (time.perf_counter() - start)


def measure_throughput() -> Figures:
    ours = esper_steps_per_second()
    default, shared = sb3_steps_per_second(False), sb3_steps_per_second(True)
    return {
        "steps_per_second": ours,
        "sb3_default_steps_per_second": default,
        "sb3_shared_steps_per_second": shared,
        "throughput_vs_sb3_default": ours / default,
        "throughput_vs_sb3_shared": ours / shared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure_advantages() | measure_update(*SIZES[0], "cpu")
    if options.device == "cuda":
        large = measure_update(*SIZES[1], "cuda")
        figures |= {f"cuda_1024x150_{name}": value for name, value in large.items()}
    console = Console()
    if importlib.util.find_spec("sb3_contrib") and importlib.util.find_spec("gymnasium"):
        figures |= measure_throughput()
    else:
        console.print("sb3-contrib is not installed: its comparison is left out.")
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
