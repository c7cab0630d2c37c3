"""The learner solves small worlds with known solutions; the bars were calibrated elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from esper.leyline import PPOUpdateMetrics
from esper.leyline.constants import STORED_LOG_PROB_TOLERANCE
from esper.simic.agent import PPOAgent, PPOConfig
from esper.simic.contracts import VectorWorld
from esper.tamiyo import LearnedController
from tests.simic.toys import (
    Endless,
    EndlessWithIncrease,
    Identity,
    ManyIllegal,
    OpArguments,
    RememberCue,
    Toy,
    train,
)

pytestmark = pytest.mark.slow

HIDDEN_DIM = 64  # half the default: these worlds are small
CONFIG = PPOConfig(lr=3e-3, minibatches=4, entropy_coef=0.01, target_kl=None)
BANDIT_CONFIG = replace(CONFIG, entropy_coef=0.05, normalize_observations=False)
MEMORY_CONFIG = replace(
    CONFIG, gamma=0.5, gae_lambda=0.9, minibatches=2, normalize_observations=False
)
AVERAGED_UPDATES = 4  # updates over which a score is averaged
EVALUATION_INTERVAL = 5  # updates between two evaluations


def greedy_score(agent: PPOAgent, world: Toy, steps: int) -> float:
    """Return how often the most probable actions are correct, over `steps` steps of a new world."""
    controller = LearnedController(agent.network)
    observations = world.reset()
    starts = torch.ones(world.num_envs, dtype=torch.bool)
    correct = []
    for _ in range(steps):
        actions = controller.act(observations, world.legal(), starts)
        outcome = world.step(actions.values)
        observations, starts = outcome.observations, outcome.terminals | outcome.truncations
        correct.append(world.correct.mean())
    return float(torch.stack(correct).mean())


def build_agent(world: VectorWorld, config: PPOConfig, seed: int, steps: int = 16) -> PPOAgent:
    return PPOAgent(
        world.action_space,
        state_dim=world.state_dim,
        num_envs=world.num_envs,
        max_steps_per_env=steps,
        config=config,
        lstm_hidden_dim=HIDDEN_DIM,
        seed=seed,
    )


def stop_when_learned(
    bar: float,
    agent: PPOAgent,
    make_world: Callable[[int], Toy],
    steps: int,
    errors: list[float],
) -> Callable[[int, PPOUpdateMetrics], bool]:
    """Return a function that ends training once the score is halfway between the bar and 1.

    It also stores the error of the stored log-probabilities of every update in `errors`.
    """

    def is_learned(steps_taken: int, metrics: PPOUpdateMetrics) -> bool:
        errors.append(metrics["stored_log_prob_error"])
        if len(errors) % EVALUATION_INTERVAL:
            return False
        return greedy_score(agent, make_world(1_000 + steps_taken), steps) >= (1 + bar) / 2

    return is_learned


@pytest.mark.parametrize("seed", range(2))
def test_three_heads_learn_to_repeat_digits(seed: int) -> None:
    world = Identity(16, seed)
    agent = build_agent(world, BANDIT_CONFIG, seed, steps=8)
    train(agent, world, 6_000, stop_when_learned(0.95, agent, partial(Identity, 64), 5, []))
    assert greedy_score(agent, Identity(64, 100 + seed), 20) >= 0.95


@pytest.mark.parametrize("seed", range(2))
def test_correct_action_is_found_when_most_are_illegal(seed: int) -> None:
    world = ManyIllegal(32, seed)
    agent = build_agent(world, replace(BANDIT_CONFIG, lr=2e-3, minibatches=2), seed, steps=8)
    errors: list[float] = []
    is_learned = stop_when_learned(0.93, agent, partial(ManyIllegal, 64), 5, errors)
    train(agent, world, 20_000, is_learned)
    evaluation_world = ManyIllegal(64, 100 + seed)
    assert greedy_score(agent, evaluation_world, 20) >= 0.93
    assert world.illegal_actions_taken == evaluation_world.illegal_actions_taken == 0
    assert max(errors) < STORED_LOG_PROB_TOLERANCE


@pytest.mark.parametrize("seed", range(2))
def test_cue_is_remembered_longer_than_a_rollout(seed: int) -> None:
    world = RememberCue(16, seed)
    agent = build_agent(world, MEMORY_CONFIG, seed)
    assert agent.buffer.max_steps_per_env < world.DELAY
    errors: list[float] = []
    steps = 3 * (world.DELAY + 1)
    is_learned = stop_when_learned(0.90, agent, partial(RememberCue, 32), steps, errors)
    train(agent, world, 15_000, is_learned)
    assert greedy_score(agent, RememberCue(32, 100 + seed), steps) >= 0.90
    assert max(errors) < STORED_LOG_PROB_TOLERANCE


def test_cue_is_forgotten_if_hidden_state_is_reset_between_rollouts() -> None:
    world = RememberCue(16, 0)
    agent = build_agent(world, MEMORY_CONFIG, 0)
    mean_rewards: list[torch.Tensor] = []

    def reset_hidden_state(_: int, metrics: PPOUpdateMetrics) -> None:
        agent.hidden = agent.network.get_initial_hidden(world.num_envs)
        mean_rewards.append(agent.buffer.rewards.mean())

    train(agent, world, 8_000, reset_hidden_state)  # twice as long as learning takes otherwise
    assert float(torch.stack(mean_rewards[-10:]).mean()) < 0.65


def test_value_of_endless_reward_ignores_truncation() -> None:
    world = Endless(8, seed=0)
    agent = build_agent(world, replace(CONFIG, gamma=0.95), seed=0, steps=25)
    train(agent, world, 16_000)  # some random seeds need more than 10,000
    assert float(agent.buffer.values.mean()) == pytest.approx(20.0, abs=0.5)


EXACT_VALUE_OF_A = 50.5  # mean over the ten ages
EXACT_VALUE_OF_B = 60.0


def test_truncated_episode_is_worth_the_value_of_its_last_observation() -> None:
    world = EndlessWithIncrease(16, seed=0)
    agent = build_agent(world, replace(CONFIG, gamma=0.95, lr=1e-3), seed=0, steps=25)
    is_truncated_at_b = world.episode_lengths == world.TRUNCATED_AFTER
    values_of_a, values_of_b = [], []

    def store_values(_: int, metrics: PPOUpdateMetrics) -> None:
        values, states = agent.buffer.values, agent.buffer.states
        values_of_a.append(values[is_truncated_at_b].mean())
        values_of_b.append(values[states[..., world.B] > 0].mean())

    train(agent, world, 30_000, store_values)
    # The estimates vary around their targets, also above them.
    mean_of_a = float(torch.stack(values_of_a[-20:]).mean())
    mean_of_b = float(torch.stack(values_of_b[-20:]).mean())
    assert 45 <= mean_of_a <= EXACT_VALUE_OF_A + 5.5
    assert 55 <= mean_of_b <= EXACT_VALUE_OF_B + 5


def steps_to_learn_arguments(seed: int, causal: bool, limit: int) -> int:
    """Return the steps until the greedy policy is correct in 75 % of states, at most `limit`."""
    world = OpArguments(32, seed, causal)
    agent = build_agent(world, replace(CONFIG, lr=1e-3, entropy_coef=0.05), seed)
    scores: list[float] = []

    def is_learned(steps_taken: int, metrics: PPOUpdateMetrics) -> bool:
        scores.append(greedy_score(agent, OpArguments(64, 1_000 + steps_taken, causal), 2))
        recent_scores = scores[-AVERAGED_UPDATES:]
        if len(recent_scores) < AVERAGED_UPDATES:
            return False
        return sum(recent_scores) / AVERAGED_UPDATES >= 0.75

    return train(agent, world, limit, is_learned)


def test_credit_for_relevant_heads_only_learns_arguments() -> None:
    limit = 60_000
    assert steps_to_learn_arguments(0, True, limit) < limit


@pytest.mark.nightly
@pytest.mark.xfail(
    strict=True,
    reason="The ratio is 1.35 for these two random seeds. Over ten it is 1.39, with a standard "
    "deviation of 0.15 for one seed.",
)
def test_credit_for_relevant_heads_only_learns_arguments_faster() -> None:
    limit, ratio = 60_000, 1.4
    causal_steps = [steps_to_learn_arguments(seed, True, limit) for seed in range(2)]
    assert max(causal_steps) < limit
    required_steps = int(ratio * sum(causal_steps))
    steps_without_relevance = 0
    for seed, steps in enumerate(causal_steps):
        # Training ends once the required sum is exceeded.
        most_steps = min(2 * steps, required_steps - steps_without_relevance + 1)
        steps_without_relevance += steps_to_learn_arguments(seed, False, most_steps)
    assert steps_without_relevance >= ratio * sum(causal_steps)


@pytest.mark.nightly
def test_pole_is_balanced_without_velocities() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from esper.rl import make_gym

    def hide_velocities(env):
        low, high = (
            bound[[0, 2]] for bound in (env.observation_space.low, env.observation_space.high)
        )
        space = gymnasium.spaces.Box(low, high)
        return gymnasium.wrappers.TransformObservation(env, lambda state: state[[0, 2]], space)

    def mean_episode_length(agent: PPOAgent, num_envs: int = 20) -> float:
        """Measure the mean length of an episode with the most probable actions."""
        world = make_gym("CartPole-v1", num_envs, 1_000, wrappers=[hide_velocities])
        controller = LearnedController(agent.network)
        observations, starts = world.reset(), torch.ones(num_envs, dtype=torch.bool)
        is_running, lengths = starts.clone(), torch.zeros(num_envs)
        while bool(is_running.any()):
            outcome = world.step(controller.act(observations, world.legal(), starts).values)
            lengths += is_running
            observations, starts = outcome.observations, outcome.terminals | outcome.truncations
            is_running &= ~starts
        return float(lengths.mean())

    config = PPOConfig(
        lr=1e-3,
        gamma=0.99,
        gae_lambda=0.95,
        epochs=8,
        minibatches=4,
        target_kl=0.03,
        entropy_coef=0.0,
    )
    world = make_gym("CartPole-v1", 8, 0, wrappers=[hide_velocities])
    agent = build_agent(world, config, seed=0, steps=64)
    lengths: list[float] = []

    def is_balanced(steps_taken: int, metrics: PPOUpdateMetrics) -> bool:
        if steps_taken % (10 * 8 * 64) == 0:
            lengths.append(mean_episode_length(agent))
        return bool(lengths) and lengths[-1] > 400

    train(agent, world, 60_000, is_balanced)
    assert lengths[-1] > 400
