"""Gymnasium's vector environments as worlds for the learner."""

from functools import partial
from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402

from esper.simic.agent import PPOAgent, PPOConfig, train  # noqa: E402
from esper.simic.gym_worlds import GymError, GymWorld, make_gym  # noqa: E402

LENGTH = 5


class Counter(gymnasium.Env[Any, Any]):
    """Shows its own age; is cut after LENGTH steps; only action `age % actions` is legal."""

    def __init__(self, action_space: Any, masked: bool = False) -> None:
        self.action_space, self.masked = action_space, masked
        self.observation_space = spaces.Box(0, 100, (1,), np.float32)
        self.taken: list[Any] = []

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        mask = np.zeros(7, dtype=np.int8)
        mask[self.age % 7] = 1
        return np.array([self.age], np.float32), {"action_mask": mask} if self.masked else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        return self._seen()

    def step(self, action: Any) -> Any:
        self.taken.append((self.age, action))
        self.age += 1
        seen, info = self._seen()
        return seen, 1.0, False, self.age == LENGTH, info


def make(action_space: Any, masked: bool = False) -> tuple[GymWorld, list[Counter]]:
    made = [Counter(action_space, masked) for _ in range(3)]
    vector = SyncVectorEnv(
        [lambda env=env: env for env in made], autoreset_mode=AutoresetMode.SAME_STEP
    )
    return GymWorld(vector), made


def test_the_true_last_observation_and_the_next_first_one_are_both_given() -> None:
    world, _ = make(spaces.Discrete(2))
    assert world.reset().tolist() == [[0.0]] * 3
    for age in range(1, 2 * LENGTH + 1):
        outcome = world.step(torch.zeros(3, 1, dtype=torch.int64))
        cut = age % LENGTH == 0
        assert outcome.truncations.tolist() == [cut] * 3
        assert outcome.observations.tolist() == [[float(age % LENGTH)]] * 3
        if cut:
            assert outcome.final_observations is not None
            assert outcome.final_observations.tolist() == [[float(LENGTH)]] * 3
        assert not bool(outcome.terminals.any())


def test_no_filler_step_is_learned_from() -> None:
    world, made = make(spaces.Discrete(2))
    agent = PPOAgent.build(world.space, world.state_dim, 3, 2 * LENGTH, lstm_hidden_dim=8)
    train(agent, world, 1)
    ages = agent.buffer["states"][..., 0]
    assert ages.tolist() == [[float(t % LENGTH) for t in range(2 * LENGTH)]] * 3
    assert len(made[0].taken) == 2 * LENGTH
    with pytest.raises(GymError, match="autoreset mode NEXT_STEP; valid: SAME_STEP"):
        GymWorld(SyncVectorEnv([lambda: Counter(spaces.Discrete(2))]))


def test_masks_from_info_are_obeyed_through_episode_ends() -> None:
    world, made = make(spaces.Discrete(7), masked=True)
    agent = PPOAgent.build(world.space, world.state_dim, 3, 4 * LENGTH, lstm_hidden_dim=8)
    metrics = []
    train(agent, world, 1, lambda _, m: metrics.append(m))
    assert all(action == age % 7 for env in made for age, action in env.taken)
    assert metrics[0]["heads"]["action0"]["relevant_fraction"] == 0  # nothing to choose


def test_multi_discrete_actions_arrive_with_their_own_numbering() -> None:
    world, made = make(spaces.MultiDiscrete([2, 5], start=[0, 10]))
    assert world.space.sizes == (2, 5)
    world.reset()
    world.step(torch.tensor([[1, 4], [0, 0], [1, 2]]))
    assert [env.taken[0][1].tolist() for env in made] == [[1, 14], [0, 10], [1, 12]]


def test_continuous_actions_and_wrong_masks_are_refused() -> None:
    with pytest.raises(GymError, match="valid: Discrete"):
        make(spaces.Box(0, 1, (1,)))
    world, _ = make(spaces.Discrete(2), masked=True)
    world.reset()
    with pytest.raises(GymError, match=r"given: \[3, 7\]; valid: \[3, 2\]"):
        world.legal()


def test_an_environment_of_the_registry_trains() -> None:
    world = make_gym("CartPole-v1", envs=2)
    agent = PPOAgent.build(
        world.space, world.state_dim, 2, 32, PPOConfig(minibatches=2), lstm_hidden_dim=8
    )
    assert train(agent, world, 128) == 128


class Mixed(gymnasium.Env[Any, Any]):
    """Shows a name and its age in a space of parts; `action_masks()` opens action `age % 3`."""

    def __init__(self, observation_space: Any, name: int, masked: bool = True) -> None:
        self.observation_space, self.action_space = observation_space, spaces.Discrete(3)
        self.name, self.age = name, 0
        if masked:
            self.action_masks = self._masks

    def _masks(self) -> Any:
        return np.arange(3) == self.age % 3

    def _seen(self) -> Any:
        age, name = np.array([self.age, -self.age], np.float32), self.name
        if isinstance(self.observation_space, spaces.Tuple):
            return age, name
        return {"age": age, "name": name}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        assert action == self.age % 3, "only that was legal"
        self.age += 1
        return self._seen(), 1.0, False, self.age == LENGTH, {}


PARTS = {"age": spaces.Box(-100, 100, (2,), np.float32), "name": spaces.Discrete(4)}
SEVERAL = {"dict": spaces.Dict(PARTS), "tuple": spaces.Tuple(tuple(PARTS.values()))}


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_parts_of_an_observation_and_masks_are_those_of_each_environment(
    kind: str, vector: Any
) -> None:
    made = [partial(Mixed, SEVERAL[kind], name) for name in (0, 2)]
    env = vector(made, autoreset_mode=AutoresetMode.SAME_STEP)
    try:
        world = GymWorld(env)
        seen, one_hot = world.reset(), torch.eye(4)[[0, 2]]
        for age in range(1, LENGTH + 1):
            assert world.state_dim == 6
            now = torch.tensor([[age - 1.0, 1.0 - age]] * 2)
            assert torch.equal(seen, torch.cat((now, one_hot), 1))
            (mask,) = world.legal().masks.values()
            assert mask.tolist() == [[place == (age - 1) % 3 for place in range(3)]] * 2
            outcome = world.step(torch.full((2, 1), (age - 1) % 3))
            seen = outcome.observations
        assert outcome.final_observations is not None
        last = torch.cat((torch.tensor([[float(LENGTH), -LENGTH]] * 2), one_hot), 1)
        assert torch.equal(outcome.final_observations, last)
        assert torch.equal(seen[:, :2], torch.zeros(2, 2))
    finally:
        env.close()


def test_environments_of_which_only_some_say_what_is_legal_are_refused() -> None:
    made = [partial(Mixed, SEVERAL["dict"], 0, masked) for masked in (True, False)]
    with pytest.raises(GymError, match=r"action_masks.*given: environments \[1\]"):
        GymWorld(SyncVectorEnv(made, autoreset_mode=AutoresetMode.SAME_STEP))
    world, made_ = make(spaces.Discrete(7), masked=True)
    made_[1].masked = False
    world.reset()
    with pytest.raises(GymError, match=r"action_mask.*given: environments \[1\]"):
        world.legal()
