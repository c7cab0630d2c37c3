"""Training, evaluation and acting in Gymnasium environments."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium")

import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402

from esper import rl  # noqa: E402
from esper.leyline import AgreementError, Legality, UnknownNameError  # noqa: E402
from esper.nissa import RunReader  # noqa: E402
from esper.simic.agent import Outcome, PPOAgent  # noqa: E402
from esper.simic.gym import training  # noqa: E402
from esper.tamiyo import LearnedController, SkipActorCritic  # noqa: E402
from tests import programs  # noqa: E402
from tests.simic.gym.environments import Countdown, MaskedIdentity  # noqa: E402

# With a memory, although there are few steps.
SMALL: dict[str, Any] = {"num_envs": 4, "preset": "long", "epochs": 1, "minibatches": 2}
STEPS = 4 * 32 * 10  # ten rollouts: one for each part


def weights(agent: PPOAgent) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in agent.network.parameters()])


def interrupt_after_60_percent(agent: PPOAgent, metrics: Any) -> None:
    if metrics["steps"] > 0.6 * STEPS:
        raise KeyboardInterrupt


def test_recorded_training_learns_the_same_and_stores_all_metrics(tmp_path: Path) -> None:
    reported: list[Any] = []
    recorded = rl.train(
        Countdown,
        STEPS,
        out=tmp_path / "run",
        after_update=lambda agent, metrics: reported.append(metrics),
        **SMALL,
    )
    assert torch.equal(weights(recorded), weights(rl.train(Countdown, STEPS, **SMALL)))
    assert not torch.equal(weights(recorded), weights(rl.train(Countdown, STEPS, seed=1, **SMALL)))
    assert [metrics["valid_steps"] for metrics in reported] == [128] * 10
    assert all(1 <= metrics["episode_length"] <= 3 for metrics in reported)
    assert all(metrics["episodes"] > 30 for metrics in reported)
    with RunReader(tmp_path / "run") as reader:
        rows = reader.query("SELECT round, value FROM updates WHERE name = 'episode_return'").rows
    returns = [metrics["episode_return"] for metrics in reported]
    assert rows == [(index + 1, pytest.approx(value)) for index, value in enumerate(returns)]


PROGRAM = """
import sys
from esper import rl
from tests.simic.gym.test_training import SMALL, STEPS, weights
from tests.simic.gym.environments import Countdown
agent = rl.train(Countdown, STEPS, out=sys.argv[1], **SMALL)
print(agent.hidden[0].double().sum().item().hex(), weights(agent).double().sum().item().hex())
"""


def test_resume_in_another_process_matches_uninterrupted_training(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        rl.train(Countdown, STEPS, out=folder, after_update=interrupt_after_60_percent, **SMALL)
    result = programs.run(PROGRAM, folder)
    assert result.returncode == 0, result.stderr
    uninterrupted = rl.train(Countdown, STEPS, **SMALL)
    tensors = (uninterrupted.hidden[0], weights(uninterrupted))
    assert result.stdout.split() == [tensor.double().sum().item().hex() for tensor in tensors]

    finished = rl.train(Countdown, STEPS, out=folder, **SMALL)  # no step is left
    assert torch.equal(weights(finished), weights(uninterrupted))
    with RunReader(folder) as reader:
        rounds = reader.query("SELECT round FROM updates WHERE name = 'kl'").rows
    assert rounds == [(number,) for number in range(1, 11)]
    with pytest.raises(AgreementError, match="holds another training"):
        rl.train(Countdown, STEPS, out=folder, gamma=0.5, **SMALL)


def test_few_steps_train_without_memory_and_resume_bit_for_bit(tmp_path: Path) -> None:
    settings: Any = {"num_envs": 4, "epochs": 1}
    uninterrupted = rl.train(Countdown, STEPS, **settings)
    assert isinstance(uninterrupted.network, SkipActorCritic)
    assert not list(uninterrupted.network.lstm.parameters())
    assert uninterrupted.hidden[0].numel() == 0

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        rl.train(Countdown, STEPS, out=folder, after_update=interrupt_after_60_percent, **settings)
    resumed = rl.train(Countdown, STEPS, out=folder, **settings)
    assert torch.equal(weights(resumed), weights(uninterrupted))


def test_sequence_length_that_does_not_divide_a_rollout_raises() -> None:
    message = r"sequence_length 64; valid: at most 4 env.* that divide 32 steps"
    with pytest.raises(AgreementError, match=message):
        rl.train(Countdown, STEPS, num_envs=4, preset="reactive", sequence_length=64)


def test_auto_preset_depends_on_steps_and_episode_length() -> None:
    def trained_settings(world: Any, steps: int) -> tuple[int, float]:
        def stop(agent: PPOAgent, metrics: Any) -> bool:
            return True

        agent = rl.train(world, steps, num_envs=4, epochs=1, after_update=stop)
        return agent.buffer.max_steps_per_env, agent.config.gae_lambda

    def preset_settings(name: str) -> tuple[int, float]:
        rollout_length, config = rl.PRESETS[name]
        return rollout_length, config.gae_lambda

    assert trained_settings("CartPole-v1", 9_999) == preset_settings("reactive")
    assert trained_settings("CartPole-v1", 10_000) == preset_settings("long")  # 500 steps
    assert trained_settings(Countdown, 10_000) == preset_settings("memory")


class Uneventful(gymnasium.Env[Any, Any]):
    """Episodes of a fixed length without rewards; the limit of steps may be known."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: float, limit: int | None = None) -> None:
        self.length = length
        if limit:
            spec = gymnasium.envs.registration.EnvSpec("Uneventful-v0", max_episode_steps=limit)
            self.spec = spec

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        return self.observation_space.low, {}

    def step(self, action: Any) -> Any:
        self.age += 1
        return self.observation_space.low, 0.0, self.age == self.length, False, {}


@pytest.mark.parametrize(
    ("length", "limit", "expected_parts", "expected_episodes"),
    [
        (100, 100, [0], 4 * 3),  # 320 steps in each environment; a part has at least 32
        (20, None, [0, 3, 6, 9], 4 * (4 + 4 + 4 + 1)),  # 96 steps until four episodes have ended
        (math.inf, None, list(range(10)), 0),  # endless episodes do not extend a part
    ],
)
def test_part_lasts_until_enough_episodes_have_ended(
    length: float,
    limit: int | None,
    expected_parts: list[int],
    expected_episodes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[int] = []
    reset = rl.GymWorld.reset

    def recording_reset(world: rl.GymWorld, part: int) -> torch.Tensor:
        parts.append(part)
        return reset(world, part)

    monkeypatch.setattr(training, "MIN_EPISODES_PER_PART", 4)
    monkeypatch.setattr(rl.GymWorld, "reset", recording_reset)
    episodes: list[float] = []
    rl.train(
        partial(Uneventful, length, limit),
        STEPS,
        after_update=lambda agent, metrics: episodes.append(metrics["episodes"]),
        **SMALL,
    )
    assert parts == expected_parts
    assert sum(episodes) == expected_episodes


@pytest.mark.parametrize(("preset", "expected"), [("memory", 4.0), ("long", 0.0)])
def test_memory_preset_biases_half_of_the_forget_gates(preset: str, expected: float) -> None:
    agent = rl.train(Countdown, 1, num_envs=4, epochs=1, preset=preset)
    assert isinstance(agent.network.lstm, torch.nn.LSTM)
    forget_bias = agent.network.lstm.bias_ih_l0.detach().chunk(4)[1]
    difference = float(forget_bias[64:].mean() - forget_bias[:64].mean())
    assert difference == pytest.approx(expected, abs=0.2)


def test_training_stops_when_after_update_returns_true() -> None:
    steps: list[int] = []

    def stop_after_200(agent: PPOAgent, metrics: Any) -> bool:
        steps.append(metrics["steps"])
        return metrics["steps"] > 200

    rl.train(Countdown, STEPS, after_update=stop_after_200, **SMALL)
    assert steps == [128, 256]


def test_unknown_preset_raises_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'reactive'"):
        rl.train(Countdown, STEPS, preset="reactiv")


def test_episode_stats_count_at_most_the_allowed_episodes() -> None:
    stats = training.EpisodeStats(2, max_per_env=1)
    flags = torch.zeros(2, dtype=torch.bool)
    for reward, ended in ((1.0, [False, True]), (2.0, [True, True])):
        terminals = torch.tensor(ended)
        stats.add(Outcome(torch.zeros(2, 1), torch.full((2,), reward), terminals, flags))
    assert stats.episodes == [[1.0, 1.0], [3.0, 2.0]]
    assert stats.ended_per_env == [1, 2]
    assert stats.pop_means() == {"episodes": 2, "episode_return": 2.0, "episode_length": 1.5}
    assert stats.pop_means() == {"episodes": 0}


def test_evaluation_counts_short_and_long_episodes_equally() -> None:
    agent = rl.train(Countdown, 1, **SMALL)
    score = rl.evaluate(agent, Countdown, 96)
    assert score["episodes"] == 96
    assert score["episode_length"] == pytest.approx(2.0, abs=0.2)  # lengths 1, 2, 3 alike
    assert 0 < score["standard_error"] < 0.2
    assert score == rl.evaluate(agent, Countdown, 96)
    assert score != rl.evaluate(agent, Countdown, 96, greedy=False)


def test_player_acts_like_the_agent_with_memory() -> None:
    agent = rl.train(Countdown, STEPS, **SMALL)
    env = Countdown()
    player = rl.Player(agent, env)
    controller = LearnedController(agent.network)
    for seed in range(12):
        observation, _ = env.reset(seed=seed)
        is_first, is_over = True, False
        while not is_over:
            action = player.act(observation, first=is_first)
            states = torch.as_tensor(observation)[None]
            legality = Legality(agent.action_space, 1, {})
            expected = controller.act(states, legality, torch.tensor([is_first])).values
            assert action == 3 + int(expected)  # actions of the environment begin at 3
            observation, _, is_over, _, _ = env.step(action)
            is_first = False


def test_player_respects_the_action_mask() -> None:
    make_env = partial(MaskedIdentity, spaces.MultiDiscrete([2, 3]), 3)
    env = make_env()
    player = rl.Player(rl.train(make_env, 1, **SMALL), env)
    observation, _ = env.reset(seed=0)
    for _ in range(20):  # only the correct action is legal
        observation, reward, *_ = env.step(player.act(observation, env.action_masks()))
        assert reward == 1.0


def test_name_function_and_vector_environment_give_equal_worlds() -> None:
    vector = gymnasium.make_vec("CartPole-v1", 2, "async", {"context": "fork", **rl.SAME_STEP})
    make_env: Callable[[], Any] = partial(gymnasium.make, "CartPole-v1")
    try:
        worlds = [rl.make_gym("CartPole-v1", 2), rl.make_gym(vector), rl.make_gym(make_env, 2)]
        observations = [world.reset() for world in worlds]
        assert torch.equal(observations[0], observations[1])
        assert torch.equal(observations[0], observations[2])
    finally:
        vector.close()


@pytest.mark.slow
def test_bars_of_sb3_contribs_tests_of_masking_are_met() -> None:
    world = partial(MaskedIdentity, spaces.Discrete(70), 55)
    agent = rl.train(world, 4096, gamma=0.4, seed=0)
    assert rl.evaluate(agent, world)["episode_return"] >= 90
    assert rl.evaluate(agent, world, greedy=False)["episode_return"] >= 50
    for space, num_illegal in (
        (spaces.Discrete(20), 19),
        (spaces.MultiDiscrete([2, 3]), 3),
        (spaces.MultiBinary(3), 3),
    ):
        one_legal = partial(MaskedIdentity, space, num_illegal)  # no learning is needed
        agent = rl.train(one_legal, 1, **SMALL)
        assert rl.evaluate(agent, one_legal, 5)["episode_return"] >= 99
