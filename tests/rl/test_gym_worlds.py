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
from esper.rl.gym_worlds import GymError, GymWorld, make_gym  # noqa: E402
from esper.simic.agent import PPOAgent, PPOConfig  # noqa: E402
from esper.tamiyo import independent_heads  # noqa: E402
from tests.simic.toys import train  # noqa: E402

LENGTH = 5


class Counter(gymnasium.Env[Any, Any]):
    """Shows its own age; is cut after LENGTH steps; only action `age % actions` is legal."""

    def __init__(self, action_space: Any, masked: bool = False) -> None:
        self.action_space, self.masked = action_space, masked
        self.observation_space = spaces.Box(0, 100, (1,), np.float32)
        self.taken: list[Any] = []
        self.seeds: list[int | None] = []

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        mask = np.zeros(7, dtype=np.int8)
        mask[self.age % 7] = 1
        return np.array([self.age], np.float32), {"action_mask": mask} if self.masked else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        self.seeds.append(seed)
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
    with pytest.raises(GymError, match=r"given: 3 masks of shape \[7\]; valid: 3 of shape \[2\]"):
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


def test_training_again_begins_new_episodes_with_an_empty_memory_and_new_seeds() -> None:
    world, made = make(spaces.Discrete(2))
    agent = PPOAgent.build(world.space, world.state_dim, 3, LENGTH + 2, lstm_hidden_dim=8)
    train(agent, world, 1)  # ends in the middle of an episode
    assert bool(agent.hidden[0].any())
    train(agent, world, 1)
    assert agent.buffer["starts"][:, 0].all()
    assert not agent.buffer["h"][:, 0].any()
    given = [[seed for seed in env.seeds if seed is not None] for env in made]
    assert [seeds[0] for seeds in given] == [0, 1, 2]
    assert all(len(set(seeds)) == len(seeds) == 2 for seeds in given)
    assert len({seed for seeds in given for seed in seeds}) == 6


def test_a_rollout_that_was_broken_off_is_not_learned_from_across_a_reset() -> None:
    world, _ = make(spaces.Discrete(2))
    agent = PPOAgent.build(world.space, world.state_dim, 3, 4, lstm_hidden_dim=8)
    seen = world.reset()
    for _ in range(2):
        decision = agent.act(seen, world.legal())
        agent.record(decision, outcome := world.step(decision.actions))
        seen = outcome.observations
    assert train(agent, world, 1) == 3 * 4
    assert agent.buffer["states"][..., 0].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3


@pytest.mark.parametrize(
    ("what", "sizes"),
    [("space", (3, 1, 3)), ("state_dim", (2, 4, 3)), ("envs", (2, 1, 5))],
)
def test_an_agent_of_another_size_than_its_world_is_refused(
    what: str, sizes: tuple[int, int, int]
) -> None:
    world, made = make(spaces.Discrete(2))
    actions, state, envs = sizes
    agent = PPOAgent.build(independent_heads((actions,)), state, envs, 4, lstm_hidden_dim=8)
    with pytest.raises(AgreementError, match=what):
        train(agent, world, 1)
    assert not made[0].taken


def test_a_single_environment_is_refused_by_name() -> None:
    with pytest.raises(GymError, match="given: a single Counter; valid: a vector environment"):
        GymWorld(Counter(spaces.Discrete(2)))


@pytest.mark.parametrize("space", [spaces.MultiBinary(3), spaces.MultiBinary((2, 2))])
def test_binary_actions_are_heads_of_two(space: Any) -> None:
    world, made = make(space)
    heads = int(np.prod(space.shape))
    assert world.space.sizes == (2,) * heads
    world.reset()
    actions = torch.arange(3 * heads).view(3, heads) % 2
    world.step(actions)
    for env, row in zip(made, actions, strict=True):
        taken = env.taken[0][1]
        assert taken.tolist() == row.view(space.shape).tolist()
        assert space.contains(taken)


def masks_of(world: GymWorld) -> Any:
    return torch.cat(list(world.legal().masks.values()), 1).tolist()


class Told(Counter):
    """Says in `info` what is legal, as `how` makes it of its age; None: not at all."""

    def __init__(self, action_space: Any, how: Any) -> None:
        super().__init__(action_space)
        self.how = how

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        told = self.how(self.age)
        return np.array([self.age], np.float32), {} if told is None else {"action_mask": told}


def told(action_space: Any, how: Any) -> GymWorld:
    made = [partial(Told, action_space, how) for _ in range(2)]
    return GymWorld(SyncVectorEnv(made, autoreset_mode=AutoresetMode.SAME_STEP))


def test_a_mask_for_each_head_is_one_of_all_heads_side_by_side() -> None:
    parts = (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
    world = told(spaces.MultiDiscrete([2, 3]), lambda age: parts)
    world.reset()
    assert masks_of(world) == [[True, False, False, True, True]] * 2


@pytest.mark.parametrize("value", [0.5, -np.inf, 2.0])
def test_masks_that_are_not_yes_or_no_are_refused(value: float) -> None:
    world = told(spaces.Discrete(2), lambda age: np.array([1.0, value]))
    world.reset()
    with pytest.raises(GymError, match=f"given: {value}"):
        world.legal()


@pytest.mark.parametrize("first", [True, False])
def test_masks_that_are_told_only_sometimes_are_refused(first: bool) -> None:
    world = told(spaces.Discrete(2), lambda age: np.ones(2) if (age == 0) == first else None)
    world.reset()
    world.legal()
    world.step(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(GymError, match="but not always"):
        world.legal()


class Shown(Mixed):
    """Its masks are a part of what it shows."""

    def __init__(self, name: int) -> None:
        super().__init__(spaces.Dict({**PARTS, "action_mask": spaces.MultiBinary(3)}), name, False)

    def _seen(self) -> Any:
        return {**super()._seen(), "action_mask": self._masks().astype(np.int8)}


def test_masks_that_are_observed_are_obeyed_and_not_observed() -> None:
    made = [partial(Shown, name) for name in (0, 2)]
    world = GymWorld(SyncVectorEnv(made, autoreset_mode=AutoresetMode.SAME_STEP))
    agent = PPOAgent.build(world.space, 6, 2, 2 * LENGTH, lstm_hidden_dim=8)
    train(agent, world, 1)  # the environment asserts that what is taken is legal
    assert agent.buffer["masks"].sum(-1).eq(1).all()


OBSERVED = spaces.Dict(
    {
        "z": spaces.Discrete(3, start=5),
        "a": spaces.MultiDiscrete([2, 3], start=[1, 0]),
        "b": spaces.MultiBinary((2, 2)),
        "t": spaces.Tuple((spaces.Box(-1, 1, (2, 2), np.float64), spaces.Discrete(2))),
    }
)


@pytest.mark.parametrize("space", [OBSERVED, *OBSERVED.values()], ids=lambda s: type(s).__name__)
def test_every_space_is_flattened_as_gymnasium_does_it(space: Any) -> None:
    class Sampler(Counter):
        def __init__(self, number: int) -> None:
            super().__init__(spaces.Discrete(2))
            self.observation_space = copy.deepcopy(space)
            self.observation_space.seed(number)
            self.shown: list[Any] = []

        def _seen(self) -> tuple[Any, dict[str, Any]]:
            self.shown.append(spaces.flatten(space, sample := self.observation_space.sample()))
            return sample, {}

    made = [Sampler(number) for number in range(3)]
    vector = SyncVectorEnv(
        [lambda env=env: env for env in made], autoreset_mode=AutoresetMode.SAME_STEP
    )
    world = GymWorld(vector)
    outcome = None
    for age in range(LENGTH + 1):
        seen = world.step(torch.zeros(3, 1, dtype=torch.int64)) if age else None
        outcome = seen or outcome
        shown = world.reset() if outcome is None else outcome.observations
        for row, env in zip(shown, made, strict=True):
            assert row.tolist() == pytest.approx(env.shown[-1].astype(np.float32).tolist())
    assert outcome is not None and outcome.final_observations is not None  # noqa: PT018
    for row, env in zip(outcome.final_observations, made, strict=True):
        assert row.tolist() == pytest.approx(env.shown[-2].astype(np.float32).tolist())


def test_a_vector_environment_that_hides_what_was_seen_last_is_refused() -> None:
    world, _ = make(spaces.Discrete(2))
    world.reset()
    real = world.env.step
    world.env.step = lambda actions: (*real(actions)[:4], {})  # type: ignore[method-assign]
    for _ in range(LENGTH - 1):
        world.step(torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(GymError, match="final_obs"):
        world.step(torch.zeros(3, 1, dtype=torch.int64))


class Telling(Counter):
    """Says which of its two heads mattered: after an odd step the second one alone."""

    def __init__(self, said: Any = None) -> None:
        super().__init__(spaces.MultiDiscrete([2, 3]))
        self.said = said

    def step(self, action: Any) -> Any:
        *seen, info = super().step(action)
        if self.age % 2:
            info["relevant_heads"] = np.array([False, True]) if self.said is None else self.said
        return *seen, info


def test_a_head_that_an_environment_says_did_not_matter_is_not_learned_from() -> None:
    world = make_gym(Telling, 2)
    config = PPOConfig(strict=True, target_kl=None, normalize_observations=False)
    agent = PPOAgent.build(world.space, world.state_dim, 2, LENGTH + 1, config)
    observations = world.reset()
    for step in range(LENGTH + 1):
        decision = agent.act(observations, world.legal())
        outcome = world.step(decision.actions)
        if step % 2 == 0 and step < LENGTH:  # the last of an episode, too
            assert outcome.relevant is not None
            assert outcome.relevant.tolist() == [[False, True]] * 2
        agent.record(decision, outcome)
        observations = outcome.observations
    agent.finish(observations)
    matters = agent.buffer.get_batched_sequences("cpu").matters
    expected = [[step % 2 == 1, True] for step in range(LENGTH)] + [[False, True]]
    assert matters.tolist() == [expected] * 2
    heads = agent.update()["heads"]  # strict: log-probs are found again
    assert heads["action0"]["relevant_fraction"] == pytest.approx(2 / (LENGTH + 1))
    assert heads["action1"]["relevant_fraction"] == 1.0


def test_relevance_that_is_not_of_the_heads_is_refused() -> None:
    for said, why in ((np.ones(3), r"no entry a head; given: shape \[3\]"), (np.full(2, 7), "7")):
        world = make_gym(partial(Telling, said), 2)
        world.reset()
        with pytest.raises(GymError, match=why):
            world.step(torch.zeros(2, 2, dtype=torch.int64))
