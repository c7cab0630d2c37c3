"""The learner learns: small worlds with known answers and bars that were calibrated elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from esper.leyline import PPOUpdateMetrics
from esper.leyline.constants import STORED_LOG_PROB_TOLERANCE
from esper.simic.agent import PPOAgent, PPOConfig, VectorWorld
from esper.tamiyo import LearnedController
from tests.simic.toys import (
    ForEver,
    ForEverThenMore,
    Identity,
    ManyIllegal,
    OpArguments,
    RememberCue,
    train,
)

pytestmark = pytest.mark.slow

HIDDEN = 64  # half the default: these worlds are small
CONFIG = PPOConfig(learning_rate=3e-3, minibatches=4, entropy_coef=0.01, target_kl=None)
BANDIT = replace(CONFIG, entropy_coef=0.05, normalize_observations=False)
WATCH = 4  # updates over which a score is averaged
LOOK = 5  # updates between two looks at whether it was learned


def greedy_score(agent: PPOAgent, world: VectorWorld, steps: int) -> float:
    """How often the likeliest actions are right, over that many steps of a fresh world."""
    controller = LearnedController(agent.network)
    observations, starts = world.reset(), torch.ones(world.envs, dtype=torch.bool)
    correct = []
    for _ in range(steps):
        actions = controller.act(observations, world.legal(), starts)
        outcome = world.step(actions.values)
        observations, starts = outcome.observations, outcome.terminals | outcome.truncations
        correct.append(world.correct.mean())
    return float(torch.stack(correct).mean())


def build(world: VectorWorld, config: PPOConfig, seed: int, steps: int = 16) -> PPOAgent:
    return PPOAgent.build(
        world.space,
        world.state_dim,
        world.envs,
        steps,
        config,
        lstm_hidden_dim=HIDDEN,
        seed=seed,
    )


def until_learned(
    bar: float,
    agent: PPOAgent,
    world: Callable[[int], VectorWorld],
    steps: int,
    errors: list[float],
) -> Callable[[int, PPOUpdateMetrics], bool]:
    """Ends a training that is well above the bar in worlds of its own; notes errors meanwhile."""

    def enough(taken: int, metrics: PPOUpdateMetrics) -> bool:
        errors.append(metrics["stored_log_prob_error"])
        if len(errors) % LOOK:
            return False
        return greedy_score(agent, world(1_000 + taken), steps) >= (1 + bar) / 2

    return enough


@pytest.mark.parametrize("seed", range(2))
def test_three_heads_learn_to_repeat_what_they_are_shown(seed: int) -> None:
    agent = build(world := Identity(16, seed), BANDIT, seed, steps=8)
    train(agent, world, 6_000, until_learned(0.95, agent, partial(Identity, 64), 5, []))
    assert greedy_score(agent, Identity(64, 100 + seed), 20) >= 0.95


@pytest.mark.parametrize("seed", range(2))
def test_the_right_one_of_seventy_actions_is_found_when_most_are_illegal(seed: int) -> None:
    config = replace(BANDIT, learning_rate=2e-3, minibatches=2)
    agent = build(world := ManyIllegal(32, seed), config, seed, steps=8)
    errors: list[float] = []
    train(agent, world, 20_000, until_learned(0.93, agent, partial(ManyIllegal, 64), 5, errors))
    assert greedy_score(agent, fresh := ManyIllegal(64, 100 + seed), 20) >= 0.93
    assert world.illegal_taken == fresh.illegal_taken == 0
    assert max(errors) < STORED_LOG_PROB_TOLERANCE


MEMORY = replace(CONFIG, gamma=0.5, gae_lambda=0.9, minibatches=2, normalize_observations=False)


@pytest.mark.parametrize("seed", range(2))
def test_a_cue_is_remembered_for_longer_than_a_rollout(seed: int) -> None:
    agent = build(world := RememberCue(16, seed), MEMORY, seed)
    assert agent.buffer.steps < world.DELAY
    errors: list[float] = []
    episodes = 3 * (world.DELAY + 1)
    train(
        agent, world, 15_000, until_learned(0.90, agent, partial(RememberCue, 32), episodes, errors)
    )
    assert greedy_score(agent, RememberCue(32, 100 + seed), episodes) >= 0.90
    assert max(errors) < STORED_LOG_PROB_TOLERANCE


def test_a_cue_is_forgotten_when_the_memory_is_emptied_between_rollouts() -> None:
    agent = build(world := RememberCue(16, 0), MEMORY, 0)
    right: list[torch.Tensor] = []

    def forget(_: int, metrics: PPOUpdateMetrics) -> bool:
        agent.hidden = agent.network.get_initial_hidden(world.envs)
        answers = agent.buffer["rewards"]
        right.append(answers.mean())
        return False

    train(agent, world, 8_000, forget)  # it would have been learned in less than half of them
    assert float(torch.stack(right[-10:]).mean()) < 0.65


def test_a_reward_for_ever_is_worth_its_sum_although_it_is_cut() -> None:
    config = replace(CONFIG, gamma=0.95)
    agent = build(world := ForEver(8, seed=0), config, seed=0, steps=25)
    train(agent, world, 10_000)
    values = agent.buffer["values"]
    assert float(values.mean()) == pytest.approx(20.0, abs=0.5)


EXACT_A, EXACT_B = 50.5, 60.0  # V(A) is the mean over the ten ages


def test_a_cut_episode_is_worth_what_its_true_last_observation_promises() -> None:
    config = replace(CONFIG, gamma=0.95, learning_rate=1e-3)
    agent = build(world := ForEverThenMore(16, seed=0), config, seed=0, steps=25)
    just_cut = world.lengths == world.CUT
    of_a, of_b = [], []

    def note(_: int, metrics: PPOUpdateMetrics) -> bool:
        values, states = agent.buffer["values"], agent.buffer["states"]
        of_a.append(values[just_cut].mean())
        of_b.append(values[states[..., world.B] > 0].mean())
        return False

    train(agent, world, 30_000, note)
    # Every cut shows B last. The estimates sway around their targets, also above them.
    found_a, found_b = (float(torch.stack(found[-20:]).mean()) for found in (of_a, of_b))
    assert 45 <= found_a <= EXACT_A + 5.5
    assert 55 <= found_b <= EXACT_B + 5


def steps_to_learn_arguments(seed: int, causal: bool, limit: int) -> int:
    """Steps until the greedy policy is right in 75 % of states, at most `limit`."""
    config = replace(CONFIG, learning_rate=1e-3, entropy_coef=0.05)
    agent = build(world := OpArguments(32, seed, causal), config, seed)
    scores: list[float] = []

    def reached(steps: int, _: PPOUpdateMetrics) -> bool:
        scores.append(greedy_score(agent, OpArguments(64, 1_000 + steps, causal), 2))
        return len(scores) >= WATCH and sum(scores[-WATCH:]) / WATCH >= 0.75

    return train(agent, world, limit, reached)


def test_credit_only_where_a_head_mattered_learns_arguments_much_faster() -> None:
    limit = 60_000
    causal = [steps_to_learn_arguments(seed, True, limit) for seed in range(2)]
    assert max(causal) < limit
    # A single seed's ratio sways from 1.2 to 1.9; measured over three of them it was 1.6.
    slow, without = int(1.4 * sum(causal)), 0
    for seed, steps in enumerate(causal):  # what is over the bar needs no further training
        without += steps_to_learn_arguments(seed, False, min(2 * steps, slow - without + 1))
    assert without >= 1.4 * sum(causal)


def test_a_pole_is_balanced_without_seeing_velocities() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from esper.rl.gym_worlds import make_gym

    def hide_velocities(env):
        low, high = (
            bound[[0, 2]] for bound in (env.observation_space.low, env.observation_space.high)
        )
        shown = gymnasium.spaces.Box(low, high)
        return gymnasium.wrappers.TransformObservation(env, lambda seen: seen[[0, 2]], shown)

    def balanced(agent: PPOAgent, envs: int = 20) -> float:
        """Mean length of an episode with the likeliest actions."""
        world = make_gym("CartPole-v1", envs, 1_000, wrappers=[hide_velocities])
        controller = LearnedController(agent.network)
        observations, starts = world.reset(), torch.ones(envs, dtype=torch.bool)
        alive, steps = starts.clone(), torch.zeros(envs)
        while bool(alive.any()):
            outcome = world.step(controller.act(observations, world.legal(), starts).values)
            steps += alive
            observations, starts = outcome.observations, outcome.terminals | outcome.truncations
            alive &= ~starts
        return float(steps.mean())

    config = PPOConfig(
        learning_rate=1e-3,
        gamma=0.99,
        gae_lambda=0.95,
        epochs=8,
        minibatches=4,
        target_kl=0.03,
        entropy_coef=0.0,
    )
    world = make_gym("CartPole-v1", 8, 0, wrappers=[hide_velocities])
    agent = build(world, config, seed=0, steps=64)
    lengths: list[float] = []

    def reached(steps: int, _: PPOUpdateMetrics) -> bool:
        if steps % (10 * 8 * 64) == 0:
            lengths.append(balanced(agent))
        return bool(lengths) and lengths[-1] > 400

    train(agent, world, 60_000, reached)
    assert lengths[-1] > 400
