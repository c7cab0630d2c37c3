"""Training in Gymnasium environments, evaluation, and acting with a trained agent.

A training consists of at most ten parts. Each part begins with a reset of the world, with seeds of
its own, and ends with a checkpoint. A training that was interrupted therefore continues bit for bit
if the world follows its seed, without a copy of the world's state.

A part lasts until every environment has ended several episodes. Otherwise the late steps of long
episodes would never be seen.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from esper.archive import RunKind
from esper.leyline import AgreementError, Legality
from esper.leyline.errors import require_known
from esper.nissa import Hub, RunLayout, RunStarted, RunStore, UpdateMetrics, flatten
from esper.simic.agent import Decision, Outcome, PPOAgent, PPOConfig, collect, initial_weights
from esper.simic.contracts import VectorWorld
from esper.simic.gym.worlds import SAME_STEP, GymWorld, SyncVectorEnv, make_gym
from esper.simic.training import RunFolder
from esper.tamiyo import LearnedController, SkipActorCritic

# Called after each update with the agent and the metrics; returns True to end the training.
AfterUpdate = Callable[[PPOAgent, Mapping[str, float]], bool | None]

NUM_PARTS = 10  # parts of a training
MIN_EPISODES_PER_PART = 32  # that every environment ends in a part
LSTM_HIDDEN_DIM = 128
MIN_STEPS_FOR_MEMORY = 10_000  # fewer steps are too few to train a memory
LONG_HORIZON = 100  # longer episodes need a larger GAE lambda

_COMMON = PPOConfig(
    lr=1e-3, epochs=10, minibatches=4, entropy_coef=0.01, target_kl=None, gamma=0.99
)
# Steps of every environment in a rollout, and settings of the learner. docs/rl.md gives reasons.
PRESETS = {
    "reactive": (32, replace(_COMMON, gae_lambda=0.9, sequence_length=8)),
    "memory": (
        64,
        replace(_COMMON, gae_lambda=0.3, sequence_length=64, lr=4e-3, value_coef=0.1),
    ),
    "long": (32, replace(_COMMON, gae_lambda=0.95, minibatches=2, sequence_length=32)),
}


def train(
    world: Any,
    steps: int,
    *,
    preset: str = "auto",
    num_envs: int = 16,
    seed: int = 0,
    out: str | Path | None = None,
    after_update: AfterUpdate | None = None,
    **settings: Any,
) -> PPOAgent:
    """Train an agent in a world.

    Learning rate and entropy bonus fall linearly to zero.

    Args:
        world: What `make_gym` takes, or a `VectorWorld`.
        steps: Steps of all environments together; the training ends with the next whole rollout.
        preset: Settings to start from: "auto", "reactive", "memory" or "long".
        num_envs: Number of environments, if `world` is a name or a function.
        seed: Random seed of the agent and of the environments.
        out: Directory for telemetry and checkpoints. The same call continues from the last one.
        after_update: Called after each update with the agent and the metrics, among them the steps
            so far and the returns and lengths of episodes. The training ends if it returns True.
        settings: Settings of `PPOConfig` that replace those of the preset.

    Returns:
        The trained agent.
    """
    vector_world = _to_vector_world(world, num_envs, seed)
    horizon = getattr(vector_world, "horizon", 0)
    preset = _choose_preset(preset, steps, horizon)
    agent = _build_agent(vector_world, preset, seed, settings)
    lr, entropy_coef = agent.config.lr, agent.config.entropy_coef
    steps_per_round = vector_world.num_envs * agent.buffer.max_steps_per_env

    with ExitStack() as stack:
        folder: LearningFolder | None = None
        hub = Hub()
        steps_taken = 0
        if out is not None:
            folder = LearningFolder(out)
            stack.enter_context(folder.locked())
            store, agent, rounds = folder.resume(agent, steps)
            hub = stack.enter_context(Hub(store))
            steps_taken = rounds * steps_per_round

        is_stopped = False
        for part in range(NUM_PARTS):
            part_end = math.ceil(steps * (part + 1) / NUM_PARTS)
            if is_stopped or steps_taken >= part_end:
                continue
            observations = _reset(vector_world, part)
            agent.reset()
            episodes = EpisodeStats(vector_world.num_envs)
            while steps_taken < steps and not is_stopped:
                if steps_taken >= part_end and episodes.are_enough(MIN_EPISODES_PER_PART, horizon):
                    break
                remaining = 1 - steps_taken / steps
                agent.set_hyperparameters(entropy_coef=remaining * entropy_coef, lr=remaining * lr)
                on_step = episodes.on_step
                observations = collect(agent, vector_world, observations, on_step=on_step)
                update_metrics = agent.update()
                steps_taken += update_metrics["valid_steps"]
                round_ = steps_taken // steps_per_round
                metrics = {
                    "steps": steps_taken,
                    **flatten(update_metrics),
                    **episodes.pop_means(),
                }
                hub.emit(UpdateMetrics(round=round_, metrics=metrics))
                if after_update is not None:
                    is_stopped = bool(after_update(agent, metrics))
            round_ = steps_taken // steps_per_round
            hub.commit(round_)
            if folder is not None:
                agent.save(folder.begin_checkpoint(round_) / "agent")
                folder.finish_checkpoint(round_, {}, {})
    return agent


def _to_vector_world(world: Any, num_envs: int, seed: int) -> VectorWorld:
    if hasattr(world, "legal"):
        vector_world: VectorWorld = world
        return vector_world
    return make_gym(world, num_envs, seed)


def _choose_preset(preset: str, steps: int, horizon: int) -> str:
    """Return the name of the preset; "auto" depends on the steps and the episodes' length."""
    require_known("preset", preset, ("auto", *PRESETS))
    if preset != "auto":
        return preset
    if steps < MIN_STEPS_FOR_MEMORY:
        return "reactive"
    return "long" if horizon > LONG_HORIZON else "memory"


def _build_agent(
    world: VectorWorld, preset: str, seed: int, settings: Mapping[str, Any]
) -> PPOAgent:
    """Return a new agent with the preset's network, and its settings where `settings` has none."""
    rollout_length, config = PRESETS[preset]
    config = replace(config, **settings)
    if "minibatches" not in settings:  # a minibatch has at least one sequence
        sequences_per_env = rollout_length // (config.sequence_length or rollout_length)
        num_sequences = world.num_envs * sequences_per_env
        config = replace(config, minibatches=max(1, min(config.minibatches, num_sequences)))
    with initial_weights(seed):
        network = SkipActorCritic(
            world.action_space,
            state_dim=world.state_dim,
            lstm_hidden_dim=LSTM_HIDDEN_DIM,
            lstm_layers=0 if preset == "reactive" else 1,
        )
    if preset == "memory":
        network.init_long_memory()
    return PPOAgent(
        network=network,
        num_envs=world.num_envs,
        max_steps_per_env=rollout_length,
        config=config,
        seed=seed,
    )


def _reset(world: VectorWorld, part: int) -> Tensor:
    """Reset the world for a part of the training; Gymnasium's worlds take the part's seeds."""
    if isinstance(world, GymWorld):
        return world.reset(part)
    return world.reset()


class LearningFolder(RunFolder):
    """Telemetry and checkpoints of a training; `learning.json` contains its settings."""

    kind = RunKind.LEARNING

    def resume(self, agent: PPOAgent, steps: int) -> tuple[RunStore, PPOAgent, int]:
        """Open the folder, or continue the training that it holds.

        Args:
            agent: The agent of a new training.
            steps: Steps of the training.

        Returns:
            The telemetry store, the agent and the rounds as of the last checkpoint.

        Raises:
            AgreementError: The folder holds a training with other settings.
        """
        settings = {"asked": f"steps {steps}, seed {agent.seed}, {agent.config}"}
        if not self.holds_run:
            self.require_fresh(fix="name another directory")
            self.write(self.kind, settings)
        stored_settings = self.read(self.kind)
        if stored_settings != settings:
            raise AgreementError(
                f"{self.path} holds another training",
                given=settings["asked"],
                valid=stored_settings.get("asked"),
            )
        self.clear_unfinished()
        store = RunStore(self.path, RunLayout.of(agent.action_space))
        rounds = 0
        checkpoint = self.newest()
        if checkpoint is not None:
            rounds = checkpoint[0]
            agent = PPOAgent.load(self.checkpoint(rounds) / "agent")
        store.rewind(rounds or -1)
        store.write([RunStarted(round=rounds, config=settings)])
        return store, agent, rounds


class EpisodeStats:
    """Returns and lengths of ended episodes."""

    def __init__(self, num_envs: int, max_per_env: float = math.inf) -> None:
        """Start to count.

        Args:
            num_envs: Number of environments `E`.
            max_per_env: Episodes of each environment that count; later ones are ignored.
        """
        self.max_per_env = max_per_env
        self.ended_per_env = [0] * num_envs
        self.episodes: list[list[float]] = []  # return and length of each
        self._running = torch.zeros(num_envs, 2)  # return and length so far

    def on_step(self, step: int, decision: Decision, outcome: Outcome) -> None:
        """Add one step of a rollout; an `OnStep` of `collect`."""
        self.add(outcome)

    def add(self, outcome: Outcome) -> None:
        """Add one step of every environment."""
        ones = torch.ones_like(outcome.rewards)
        self._running += torch.stack((outcome.rewards, ones), dim=1).cpu()
        ended = outcome.terminals | outcome.truncations
        for env in ended.nonzero()[:, 0].tolist():
            if self.ended_per_env[env] < self.max_per_env:
                self.episodes.append(self._running[env].tolist())
            self.ended_per_env[env] += 1
            self._running[env] = 0.0

    def are_enough(self, min_per_env: float, horizon: int = 0) -> bool:
        """Return whether every environment has ended enough episodes.

        This is also true if no episode ended at all and the horizon is unknown, because the
        episodes may be endless.

        Args:
            min_per_env: Episodes of each environment.
            horizon: Largest length of an episode; 0 if it is unknown.
        """
        may_be_endless = not any(self.ended_per_env) and not horizon
        return may_be_endless or min(self.ended_per_env) >= min_per_env

    def pop_means(self) -> dict[str, float]:
        """Return number, mean return and mean length of the episodes since the last call."""
        episodes, self.episodes = self.episodes, []
        means: dict[str, float] = {"episodes": len(episodes)}
        if episodes:
            means["episode_return"] = fmean(episode_return for episode_return, _ in episodes)
            means["episode_length"] = fmean(length for _, length in episodes)
        return means


def evaluate(
    agent: PPOAgent, world: Any, episodes: int = 20, *, greedy: bool = True, seed: int = 10_000
) -> dict[str, float]:
    """Return mean return and length of new episodes, and the standard error of the mean return.

    Every environment runs the same number of episodes. Otherwise short episodes would be counted
    more often than long ones.

    Args:
        agent: The trained agent.
        world: What `make_gym` takes, or a `VectorWorld`.
        episodes: Smallest number of episodes.
        greedy: Take the most probable action instead of sampling.
        seed: Random seed of the environments and of the sampling.
    """
    vector_world = _to_vector_world(world, min(episodes, 16), seed)
    num_envs = vector_world.num_envs
    generator = torch.Generator(agent.device).manual_seed(seed)
    controller = LearnedController(agent.network, greedy=greedy, generator=generator)
    episodes_per_env = math.ceil(episodes / num_envs)
    stats = EpisodeStats(num_envs, max_per_env=episodes_per_env)

    observations = vector_world.reset()
    starts = torch.ones(num_envs, dtype=torch.bool)
    while min(stats.ended_per_env) < episodes_per_env:
        actions = controller.act(observations, vector_world.legal(), starts)
        outcome = vector_world.step(actions.values)
        stats.add(outcome)
        observations = outcome.observations
        starts = outcome.terminals | outcome.truncations

    returns = [episode_return for episode_return, _ in stats.episodes]
    standard_deviation = stdev(returns) if len(returns) > 1 else 0.0
    return {"standard_error": standard_deviation / len(returns) ** 0.5, **stats.pop_means()}


class Player:
    """A trained agent that acts in one Gymnasium environment, with its own hidden state."""

    def __init__(self, agent: PPOAgent, env: Any, *, greedy: bool = True) -> None:
        """Create a player.

        Args:
            agent: The trained agent.
            env: The environment, or one with the same spaces. It is not stepped.
            greedy: Take the most probable action instead of sampling.
        """
        vector = SyncVectorEnv([lambda: env], **SAME_STEP)
        self.world = GymWorld(vector, action_space=agent.action_space)
        self.controller = LearnedController(agent.network, greedy=greedy)

    def act(self, observation: Any, mask: Any = None, *, first: bool = False) -> Any:
        """Return the next action in the form that the environment takes.

        Args:
            observation: Observation of the environment.
            mask: Action mask, in one of the forms that environments use.
            first: The observation is the first one of an episode.
        """
        legality = Legality(self.world.action_space, 1, {})
        if mask is not None:
            legality = self.world.to_legality([mask])
        states = self.world.flatten(observation)[None]
        actions = self.controller.act(states, legality, torch.tensor([first]))
        return self.world.to_env_actions(actions.values)[0]
