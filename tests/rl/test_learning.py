"""Training, evaluation and acting in worlds of one's own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium")

import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402

from esper import rl  # noqa: E402
from esper.archive import ArchiveError  # noqa: E402
from esper.leyline import AgreementError, Legality, UnknownNameError  # noqa: E402
from esper.nissa import RunReader  # noqa: E402
from esper.rl import learning  # noqa: E402
from esper.simic.agent import PPOAgent  # noqa: E402
from esper.tamiyo import LearnedController  # noqa: E402
from tests import programs  # noqa: E402
from tests.rl.worlds import Countdown, MaskedIdentity  # noqa: E402

# With a memory, though there is little time to learn one.
SMALL = {"envs": 4, "preset": "long", "epochs": 1, "minibatches": 2}
STEPS = 4 * 32 * 10  # one rollout for each part


def weights(agent: PPOAgent) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in agent.network.parameters()])


def test_what_is_kept_does_not_change_what_is_learned_and_is_all_in_the_run_store(
    tmp_path: Path,
) -> None:
    told: list[dict[str, float]] = []
    kept = rl.train(
        Countdown,
        STEPS,
        out=tmp_path / "run",
        after_update=lambda agent, m: told.append(m),
        **SMALL,
    )
    assert torch.equal(weights(kept), weights(rl.train(Countdown, STEPS, **SMALL)))
    assert not torch.equal(weights(kept), weights(rl.train(Countdown, STEPS, seed=1, **SMALL)))
    assert [m["valid_steps"] for m in told] == [128] * 10
    assert all(1 <= m["episode_length"] <= 3 and m["episodes"] > 30 for m in told)
    with RunReader(tmp_path / "run") as reader:
        rows = reader.query("SELECT round, value FROM updates WHERE name = 'episode_return'").rows
    assert rows == [(n + 1, pytest.approx(m["episode_return"])) for n, m in enumerate(told)]


PROGRAM = """
import sys
from esper import rl
from tests.rl.test_learning import SMALL, STEPS, weights
from tests.rl.worlds import Countdown
agent = rl.train(Countdown, STEPS, out=sys.argv[1], **SMALL)
print(agent.hidden[0].double().sum().item().hex(), weights(agent).double().sum().item().hex())
"""


def test_a_training_that_was_interrupted_goes_on_to_the_bit_in_another_process(
    tmp_path: Path,
) -> None:
    def interrupted(agent: PPOAgent, metrics: Any) -> None:
        if metrics["steps"] > 0.6 * STEPS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rl.train(Countdown, STEPS, out=tmp_path / "run", after_update=interrupted, **SMALL)
    done = programs.run(PROGRAM, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    whole = rl.train(Countdown, STEPS, **SMALL)
    numbers = (whole.hidden[0], weights(whole))
    assert done.stdout.split() == [number.double().sum().item().hex() for number in numbers]
    again = rl.train(Countdown, STEPS, out=tmp_path / "run", **SMALL)  # nothing is left to do
    assert torch.equal(weights(again), weights(whole))
    with RunReader(tmp_path / "run") as reader:
        rounds = reader.query("SELECT round FROM updates WHERE name = 'kl'").rows
    assert rounds == [(n,) for n in range(1, 11)]
    with pytest.raises(AgreementError, match="holds another training"):
        rl.train(Countdown, STEPS, out=tmp_path / "run", gamma=0.5, **SMALL)


def test_an_agent_of_an_earlier_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    agent = rl.train(Countdown, 2, **SMALL)
    agent.network.features[1] = torch.nn.Tanh()
    agent.save(tmp_path / "old")
    with pytest.raises(ArchiveError, match=r"made by an earlier version.*train it again"):
        PPOAgent.load(tmp_path / "old")


def test_what_has_few_steps_has_no_memory_and_goes_on_to_the_bit_too(tmp_path: Path) -> None:
    how: Any = {"envs": 4, "epochs": 1}
    whole = rl.train(Countdown, STEPS, **how)
    assert not list(whole.network.lstm.parameters())
    assert whole.hidden[0].numel() == 0

    def interrupted(agent: PPOAgent, metrics: Any) -> None:
        if metrics["steps"] > 0.6 * STEPS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rl.train(Countdown, STEPS, out=tmp_path / "run", after_update=interrupted, **how)
    again = rl.train(Countdown, STEPS, out=tmp_path / "run", **how)
    assert torch.equal(weights(again), weights(whole))


def test_a_sequence_that_does_not_divide_a_rollout_is_what_is_refused() -> None:
    with pytest.raises(AgreementError, match=r"sequence 64; valid: 4 env.* that divide 32 steps"):
        rl.train(Countdown, STEPS, envs=4, preset="reactive", sequence=64)


def test_the_preset_goes_by_the_steps_and_the_length_of_episodes() -> None:
    def chosen(world: Any, steps: int) -> Any:
        found: list[Any] = []
        rl.train(world, steps, envs=4, epochs=1, after_update=lambda a, m: found.append(a) or True)
        return (found[0].buffer.steps, found[0].config.gae_lambda)

    def settings(name: str) -> Any:
        rollout, config = rl.PRESETS[name]
        return rollout, config.gae_lambda

    assert chosen("CartPole-v1", 9_999) == settings("reactive")
    assert chosen("CartPole-v1", 10_000) == settings("long")  # cut at 500
    assert chosen(Countdown, 10_000) == settings("memory")


class Lasting(gymnasium.Env[Any, Any]):
    """Nothing happens for so many steps, or for ever; a limit may be told of."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int, limit: int | None = None) -> None:
        self.length = length
        if limit:
            self.spec = gymnasium.envs.registration.EnvSpec("Lasting-v0", max_episode_steps=limit)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        return self.observation_space.low, {}

    def step(self, action: Any) -> Any:
        self.age += 1
        return self.observation_space.low, 0.0, self.age == self.length, False, {}


@pytest.mark.parametrize(
    ("length", "limit", "begun", "episodes"),
    [
        (100, 100, [0], 4 * 3),  # of 320 steps in each environment; a part has 32
        (20, None, [0, 3, 6, 9], 4 * (4 + 4 + 4 + 1)),  # 96 steps until each has had four
        (10**6, None, [*range(10)], 0),  # without ends parts need not wait for them
    ],
)
def test_a_part_of_a_training_does_not_end_before_episodes_do(
    length: int, limit: int | None, begun: list[int], episodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "ENDS", 4)
    parts: list[int] = []
    reset = rl.GymWorld.reset
    monkeypatch.setattr(
        rl.GymWorld, "reset", lambda world, part: (parts.append(part), reset(world, part))[1]
    )
    over: list[float] = []
    told = lambda agent, metrics: over.append(metrics["episodes"])  # noqa: E731
    rl.train(partial(Lasting, length, limit), STEPS, after_update=told, **SMALL)
    assert parts == begun
    assert sum(over) == episodes


def test_half_of_the_memory_remembers_in_the_preset_that_is_for_memory() -> None:
    def forgetting(preset: str) -> Any:
        agent = rl.train(Countdown, 1, envs=4, epochs=1, preset=preset)
        gate = agent.network.lstm.bias_ih_l0.detach().chunk(4)[1]
        return float(gate[64:].mean() - gate[:64].mean())

    assert forgetting("memory") == pytest.approx(4.0, abs=0.2)
    assert forgetting("long") == pytest.approx(0.0, abs=0.2)


def test_a_training_ends_when_it_is_told_that_it_is_enough() -> None:
    taken: list[int] = []

    def enough(agent: PPOAgent, metrics: Any) -> bool:
        taken.append(metrics["steps"])
        return taken[-1] > 200

    rl.train(Countdown, STEPS, after_update=enough, **SMALL)
    assert taken == [128, 256]
    with pytest.raises(UnknownNameError, match="did you mean 'reactive'"):
        rl.train(Countdown, STEPS, preset="reactiv")


def test_short_episodes_are_not_counted_more_often_than_long_ones() -> None:
    agent = rl.train(Countdown, 1, **SMALL)
    score = rl.evaluate(agent, Countdown, 96)
    assert score["episodes"] == 96
    assert score["episode_length"] == pytest.approx(2.0, abs=0.2)  # 1, 2 and 3 alike
    assert 0 < score["standard_error"] < 0.2
    assert score == rl.evaluate(agent, Countdown, 96)
    assert score != rl.evaluate(agent, Countdown, 96, greedy=False)


def test_a_player_acts_as_the_agent_does_with_its_memory_and_the_numbers_of_the_environment() -> (
    None
):
    agent = rl.train(Countdown, STEPS, **SMALL)
    player, controller = rl.Player(agent, env := Countdown()), LearnedController(agent.network)
    for seed in range(12):
        observation, _ = env.reset(seed=seed)
        first, over = True, False
        while not over:
            action = player.act(observation, first=first)
            seen, starts = torch.as_tensor(observation)[None], torch.tensor([first])
            expected = controller.act(seen, Legality(agent.space, 1, {}), starts).values
            assert action == 3 + int(expected)
            observation, _, over, _, _ = env.step(action)
            first = False


def test_a_player_obeys_the_mask_it_is_given() -> None:
    world = partial(MaskedIdentity, spaces.MultiDiscrete([2, 3]), 3)
    player = rl.Player(rl.train(world, 1, **SMALL), env := world())
    observation, _ = env.reset(seed=0)
    for _ in range(20):  # only what is right is legal
        observation, reward, *_ = env.step(player.act(observation, env.action_masks()))
        assert reward == 1.0


def test_a_world_is_made_of_a_name_a_function_or_a_vector_environment() -> None:
    made = gymnasium.make_vec("CartPole-v1", 2, "async", {"context": "fork", **rl.SAME_STEP})
    try:
        worlds = [rl.make_gym("CartPole-v1", 2), rl.make_gym(made)]
        worlds.append(rl.make_gym(lambda: gymnasium.make("CartPole-v1"), 2))
        first = [world.reset() for world in worlds]
        assert torch.equal(first[0], first[1])
        assert torch.equal(first[0], first[2])
    finally:
        made.close()


@pytest.mark.slow
def test_the_bars_of_sb3_contribs_own_tests_of_illegal_actions_are_met() -> None:
    agent = rl.train(partial(MaskedIdentity, spaces.Discrete(70), 55), 4096, gamma=0.4, seed=0)
    world = partial(MaskedIdentity, spaces.Discrete(70), 55)
    assert rl.evaluate(agent, world)["episode_return"] >= 90
    assert rl.evaluate(agent, world, greedy=False)["episode_return"] >= 50
    for space, others in (
        (spaces.Discrete(20), 19),
        (spaces.MultiDiscrete([2, 3]), 3),
        (spaces.MultiBinary(3), 3),
    ):
        only = partial(MaskedIdentity, space, others)  # one action is legal: no learning is needed
        assert rl.evaluate(rl.train(only, 1, **SMALL), only, 5)["episode_return"] >= 99
