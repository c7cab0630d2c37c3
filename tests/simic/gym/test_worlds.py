"""Gymnasium's vector environments as worlds for the learner."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402

from esper.leyline import AgreementError  # noqa: E402
from esper.simic.agent import PPOAgent, PPOConfig  # noqa: E402
from esper.simic.contracts import VectorWorld  # noqa: E402
from esper.simic.gym.worlds import GymError, GymWorld, make_gym  # noqa: E402
from esper.tamiyo import independent_heads  # noqa: E402
from tests.simic.toys import train  # noqa: E402

LENGTH = 5


class Counter(gymnasium.Env[Any, Any]):
    """Shows its age and is truncated after LENGTH steps; only action `age % 7` may be legal."""

    def __init__(self, action_space: Any, is_masked: bool = False) -> None:
        self.action_space = action_space
        self.observation_space = spaces.Box(0, 100, (1,), np.float32)
        self.is_masked = is_masked
        self.actions: list[Any] = []  # age and action of every step
        self.seeds: list[int | None] = []

    def _observe(self) -> tuple[Any, dict[str, Any]]:
        mask = np.zeros(7, dtype=np.int8)
        mask[self.age % 7] = 1
        info = {"action_mask": mask} if self.is_masked else {}
        return np.array([self.age], np.float32), info

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        self.seeds.append(seed)
        return self._observe()

    def step(self, action: Any) -> Any:
        self.actions.append((self.age, action))
        self.age += 1
        observation, info = self._observe()
        return observation, 1.0, False, self.age == LENGTH, info


def make_vector(envs: list[Any]) -> SyncVectorEnv:
    return SyncVectorEnv(
        [lambda env=env: env for env in envs], autoreset_mode=AutoresetMode.SAME_STEP
    )


def make_world(action_space: Any, is_masked: bool = False) -> tuple[GymWorld, list[Counter]]:
    envs = [Counter(action_space, is_masked) for _ in range(3)]
    return GymWorld(make_vector(envs)), envs


def make_agent(world: GymWorld, steps: int, **settings: Any) -> PPOAgent:
    return PPOAgent(
        world.action_space,
        state_dim=world.state_dim,
        num_envs=world.num_envs,
        max_steps_per_env=steps,
        lstm_hidden_dim=8,
        **settings,
    )


def no_actions(num_envs: int) -> torch.Tensor:
    return torch.zeros(num_envs, 1, dtype=torch.int64)


def test_gym_world_is_a_vector_world() -> None:
    world, _ = make_world(spaces.Discrete(2))
    assert isinstance(world, VectorWorld)


def test_truncated_step_has_final_and_next_first_observation() -> None:
    world, _ = make_world(spaces.Discrete(2))
    assert world.reset().tolist() == [[0.0]] * 3
    for age in range(1, 2 * LENGTH + 1):
        outcome = world.step(no_actions(3))
        is_truncated = age % LENGTH == 0
        assert outcome.truncations.tolist() == [is_truncated] * 3
        assert outcome.observations.tolist() == [[float(age % LENGTH)]] * 3
        if is_truncated:
            assert outcome.final_observations is not None
            assert outcome.final_observations.tolist() == [[float(LENGTH)]] * 3
        assert not bool(outcome.terminals.any())


def test_rollout_contains_no_reset_steps() -> None:
    world, envs = make_world(spaces.Discrete(2))
    agent = make_agent(world, 2 * LENGTH)
    train(agent, world, 1)
    ages = agent.buffer.states[..., 0]
    assert ages.tolist() == [[float(t % LENGTH) for t in range(2 * LENGTH)]] * 3
    assert len(envs[0].actions) == 2 * LENGTH
    with pytest.raises(GymError, match="autoreset mode NEXT_STEP; valid: SAME_STEP"):
        GymWorld(SyncVectorEnv([lambda: Counter(spaces.Discrete(2))]))


def test_info_masks_restrict_actions_across_episode_ends() -> None:
    world, envs = make_world(spaces.Discrete(7), is_masked=True)
    agent = make_agent(world, 4 * LENGTH)
    metrics = []
    train(agent, world, 1, lambda _, update_metrics: metrics.append(update_metrics))
    assert all(action == age % 7 for env in envs for age, action in env.actions)
    assert metrics[0]["heads"]["action0"]["relevant_fraction"] == 0  # one legal action only


def test_multi_discrete_actions_have_the_numbers_of_their_space() -> None:
    world, envs = make_world(spaces.MultiDiscrete([2, 5], start=[0, 10]))
    assert world.action_space.sizes == (2, 5)
    world.reset()
    world.step(torch.tensor([[1, 4], [0, 0], [1, 2]]))
    assert [env.actions[0][1].tolist() for env in envs] == [[1, 14], [0, 10], [1, 12]]


def test_continuous_actions_and_masks_of_other_sizes_raise() -> None:
    with pytest.raises(GymError, match="valid: Discrete"):
        make_world(spaces.Box(0, 1, (1,)))
    world, _ = make_world(spaces.Discrete(2), is_masked=True)
    world.reset()
    with pytest.raises(GymError, match=r"given: 3 masks of shape \[7\]; valid: 3 of shape \[2\]"):
        world.legal()


def test_registered_environment_can_be_trained_on() -> None:
    world = make_gym("CartPole-v1", num_envs=2)
    agent = make_agent(world, 32, config=PPOConfig(minibatches=2))
    assert train(agent, world, 128) == 128


class Mixed(gymnasium.Env[Any, Any]):
    """Shows a number and its age in a composite space; `action_masks()` allows action `age % 3`."""

    def __init__(self, observation_space: Any, number: int, is_masked: bool = True) -> None:
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(3)
        self.number = number
        self.age = 0
        if is_masked:
            self.action_masks = self._masks

    def _masks(self) -> Any:
        return np.arange(3) == self.age % 3

    def _observe(self) -> Any:
        age = np.array([self.age, -self.age], np.float32)
        if isinstance(self.observation_space, spaces.Tuple):
            return age, self.number
        return {"age": age, "number": self.number}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert action == self.age % 3, "no other action is legal"
        self.age += 1
        return self._observe(), 1.0, False, self.age == LENGTH, {}


PARTS = {"age": spaces.Box(-100, 100, (2,), np.float32), "number": spaces.Discrete(4)}
COMPOSITE_SPACES = {"dict": spaces.Dict(PARTS), "tuple": spaces.Tuple(tuple(PARTS.values()))}


@pytest.mark.parametrize("space", COMPOSITE_SPACES)
@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_observations_and_masks_belong_to_their_environment(space: str, vector: Any) -> None:
    factories = [partial(Mixed, COMPOSITE_SPACES[space], number) for number in (0, 2)]
    env = vector(factories, autoreset_mode=AutoresetMode.SAME_STEP)
    try:
        world = GymWorld(env)
        observations = world.reset()
        one_hot = torch.eye(4)[[0, 2]]
        for age in range(LENGTH):
            assert world.state_dim == 6
            ages = torch.tensor([[float(age), -float(age)]] * 2)
            assert torch.equal(observations, torch.cat((ages, one_hot), 1))
            (mask,) = world.legal().masks.values()
            assert mask.tolist() == [[action == age % 3 for action in range(3)]] * 2
            outcome = world.step(torch.full((2, 1), age % 3))
            observations = outcome.observations
        assert outcome.final_observations is not None
        last = torch.cat((torch.tensor([[float(LENGTH), -LENGTH]] * 2), one_hot), 1)
        assert torch.equal(outcome.final_observations, last)
        assert torch.equal(observations[:, :2], torch.zeros(2, 2))
    finally:
        env.close()


def test_masks_from_some_environments_only_raise() -> None:
    factories = [partial(Mixed, COMPOSITE_SPACES["dict"], 0, masked) for masked in (True, False)]
    with pytest.raises(GymError, match=r"action_masks.*given: environments \[1\]"):
        GymWorld(SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP))
    world, envs = make_world(spaces.Discrete(7), is_masked=True)
    envs[1].is_masked = False
    world.reset()
    with pytest.raises(GymError, match=r"action_mask.*given: environments \[1\]"):
        world.legal()


def test_second_training_resets_memory_and_uses_new_seeds() -> None:
    world, envs = make_world(spaces.Discrete(2))
    agent = make_agent(world, LENGTH + 2)
    train(agent, world, 1)  # ends in the middle of an episode
    assert bool(agent.hidden[0].any())
    train(agent, world, 1)
    assert agent.buffer.episode_starts[:, 0].all()
    assert not agent.buffer.hidden_h[:, 0].any()
    seeds_by_env = [[seed for seed in env.seeds if seed is not None] for env in envs]
    assert [seeds[0] for seeds in seeds_by_env] == [0, 1, 2]
    assert all(len(set(seeds)) == len(seeds) == 2 for seeds in seeds_by_env)
    assert len({seed for seeds in seeds_by_env for seed in seeds}) == 6


def test_reset_discards_an_unfinished_rollout() -> None:
    world, _ = make_world(spaces.Discrete(2))
    agent = make_agent(world, 4)
    observations = world.reset()
    for _ in range(2):
        decision = agent.act(observations, world.legal())
        outcome = world.step(decision.actions)
        agent.record(decision, outcome)
        observations = outcome.observations
    assert train(agent, world, 1) == 3 * 4
    assert agent.buffer.states[..., 0].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3


@pytest.mark.parametrize(
    ("attribute", "sizes"),
    [("action heads", (3, 1, 3)), ("state_dim", (2, 4, 3)), ("num_envs", (2, 1, 5))],
)
def test_agent_of_another_size_than_its_world_raises(
    attribute: str, sizes: tuple[int, int, int]
) -> None:
    world, envs = make_world(spaces.Discrete(2))
    num_actions, state_dim, num_envs = sizes
    agent = PPOAgent(
        independent_heads((num_actions,)),
        state_dim=state_dim,
        num_envs=num_envs,
        max_steps_per_env=4,
        lstm_hidden_dim=8,
    )
    with pytest.raises(AgreementError, match=attribute):
        train(agent, world, 1)
    assert not envs[0].actions


def test_single_environment_raises() -> None:
    with pytest.raises(GymError, match="given: a single Counter; valid: a vector environment"):
        GymWorld(Counter(spaces.Discrete(2)))


@pytest.mark.parametrize("space", [spaces.MultiBinary(3), spaces.MultiBinary((2, 2))])
def test_binary_actions_become_heads_of_size_two(space: Any) -> None:
    world, envs = make_world(space)
    num_heads = int(np.prod(space.shape))
    assert world.action_space.sizes == (2,) * num_heads
    world.reset()
    actions = torch.arange(3 * num_heads).view(3, num_heads) % 2
    world.step(actions)
    for env, row in zip(envs, actions, strict=True):
        env_action = env.actions[0][1]
        assert env_action.tolist() == row.view(space.shape).tolist()
        assert space.contains(env_action)


class InfoMasked(Counter):
    """A counter whose `info` has the mask that a function of the age returns, if not None."""

    def __init__(self, action_space: Any, mask_of_age: Any) -> None:
        super().__init__(action_space)
        self.mask_of_age = mask_of_age

    def _observe(self) -> tuple[Any, dict[str, Any]]:
        mask = self.mask_of_age(self.age)
        info = {} if mask is None else {"action_mask": mask}
        return np.array([self.age], np.float32), info


def make_info_masked(action_space: Any, mask_of_age: Any) -> GymWorld:
    return GymWorld(make_vector([InfoMasked(action_space, mask_of_age) for _ in range(2)]))


def test_tuple_of_masks_has_one_mask_for_each_head() -> None:
    masks = (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
    world = make_info_masked(spaces.MultiDiscrete([2, 3]), lambda age: masks)
    world.reset()
    legal_masks = torch.cat(list(world.legal().masks.values()), 1)
    assert legal_masks.tolist() == [[True, False, False, True, True]] * 2


@pytest.mark.parametrize("value", [0.5, -np.inf, 2.0])
def test_masks_that_are_not_boolean_raise(value: float) -> None:
    world = make_info_masked(spaces.Discrete(2), lambda age: np.array([1.0, value]))
    world.reset()
    with pytest.raises(GymError, match=f"given: {value}"):
        world.legal()


@pytest.mark.parametrize("is_first", [True, False])
def test_masks_after_some_steps_only_raise(is_first: bool) -> None:
    world = make_info_masked(
        spaces.Discrete(2), lambda age: np.ones(2) if (age == 0) == is_first else None
    )
    world.reset()
    world.legal()
    world.step(no_actions(2))
    with pytest.raises(GymError, match="is missing sometimes"):
        world.legal()


class MaskInObservation(Mixed):
    """Its action mask is a part of the observation."""

    def __init__(self, number: int) -> None:
        space = spaces.Dict({**PARTS, "action_mask": spaces.MultiBinary(3)})
        super().__init__(space, number, is_masked=False)

    def _observe(self) -> Any:
        return {**super()._observe(), "action_mask": self._masks().astype(np.int8)}


def test_mask_in_observation_restricts_actions_and_is_no_feature() -> None:
    world = GymWorld(make_vector([MaskInObservation(number) for number in (0, 2)]))
    assert world.state_dim == 6
    agent = make_agent(world, 2 * LENGTH)
    train(agent, world, 1)  # the environment asserts that actions are legal
    assert agent.buffer.action_masks.sum(-1).eq(1).all()


OBSERVATION_SPACE = spaces.Dict(
    {
        "z": spaces.Discrete(3, start=5),
        "a": spaces.MultiDiscrete([2, 3], start=[1, 0]),
        "b": spaces.MultiBinary((2, 2)),
        "t": spaces.Tuple((spaces.Box(-1, 1, (2, 2), np.float64), spaces.Discrete(2))),
    }
)


@pytest.mark.parametrize(
    "space",
    [OBSERVATION_SPACE, *OBSERVATION_SPACE.values()],
    ids=lambda space: type(space).__name__,
)
def test_observations_are_flattened_like_gymnasium_does(space: Any) -> None:
    class Sampler(Counter):
        """Shows random observations and stores them flattened."""

        def __init__(self, seed: int) -> None:
            super().__init__(spaces.Discrete(2))
            self.observation_space = copy.deepcopy(space)
            self.observation_space.seed(seed)
            self.flattened: list[Any] = []

        def _observe(self) -> tuple[Any, dict[str, Any]]:
            sample = self.observation_space.sample()
            self.flattened.append(spaces.flatten(space, sample).astype(np.float32))
            return sample, {}

    envs = [Sampler(seed) for seed in range(3)]
    world = GymWorld(make_vector(envs))
    observations = world.reset()
    for _ in range(LENGTH):
        for row, env in zip(observations, envs, strict=True):
            assert row.tolist() == pytest.approx(env.flattened[-1].tolist())
        outcome = world.step(no_actions(3))
        observations = outcome.observations
    assert outcome.final_observations is not None
    for row, first, env in zip(outcome.final_observations, observations, envs, strict=True):
        assert row.tolist() == pytest.approx(env.flattened[-2].tolist())
        assert first.tolist() == pytest.approx(env.flattened[-1].tolist())


def test_missing_final_observation_raises() -> None:
    world, _ = make_world(spaces.Discrete(2))
    world.reset()
    env_step = world.env.step
    world.env.step = lambda actions: (*env_step(actions)[:4], {})  # type: ignore[method-assign]
    for _ in range(LENGTH - 1):
        world.step(no_actions(3))
    with pytest.raises(GymError, match="final_obs"):
        world.step(no_actions(3))


class RelevantHeads(Counter):
    """Reports after odd steps which of its two heads mattered: by default the second one."""

    def __init__(self, flags: Any = None) -> None:
        super().__init__(spaces.MultiDiscrete([2, 3]))
        self.flags = np.array([False, True]) if flags is None else flags

    def step(self, action: Any) -> Any:
        *results, info = super().step(action)
        if self.age % 2:
            info["relevant_heads"] = self.flags
        return *results, info


def test_irrelevant_heads_of_a_step_are_not_learned_from() -> None:
    world = make_gym(RelevantHeads, 2)
    config = PPOConfig(strict=True, target_kl=None, normalize_observations=False)
    agent = make_agent(world, LENGTH + 1, config=config)
    observations = world.reset()
    for step in range(LENGTH + 1):
        decision = agent.act(observations, world.legal())
        outcome = world.step(decision.actions)
        if step % 2 == 0 and step < LENGTH:  # among them the last step of an episode
            assert outcome.relevant is not None
            assert outcome.relevant.tolist() == [[False, True]] * 2
        agent.record(decision, outcome)
        observations = outcome.observations
    agent.bootstrap_and_compute_returns(observations)
    head_mask = agent.buffer.get_batched_sequences("cpu").head_mask
    expected = [[step % 2 == 1, True] for step in range(LENGTH)] + [[False, True]]
    assert head_mask.tolist() == [expected] * 2
    heads = agent.update()["heads"]  # strict: compares stored and recomputed log-probabilities
    assert heads["action0"]["relevant_fraction"] == pytest.approx(2 / (LENGTH + 1))
    assert heads["action1"]["relevant_fraction"] == 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [(np.ones(3), r"no entry a head; given: shape \[3\]"), (np.full(2, 7), "given: 7")],
)
def test_malformed_relevant_heads_raise(flags: Any, message: str) -> None:
    world = make_gym(partial(RelevantHeads, flags), 2)
    world.reset()
    with pytest.raises(GymError, match=message):
        world.step(torch.zeros(2, 2, dtype=torch.int64))
