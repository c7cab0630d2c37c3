"""The garden as Gymnasium environments: its checker, our learner and somebody else's loop."""

from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributions import Categorical  # noqa: E402

from esper.garden import Draw  # noqa: E402
from esper.garden.gym_view import CompositeActions, GardenVectorEnv  # noqa: E402
from esper.garden.reward_settings import MODES  # noqa: E402
from esper.leyline import ActionError, Actions, LifecycleOp, UnknownNameError  # noqa: E402
from esper.simic.agent import PPOAgent  # noqa: E402
from esper.simic.gym.worlds import GymWorld  # noqa: E402
from esper.tamiyo.controllers import RandomLegal  # noqa: E402
from tests.garden.plots import CONTEXTS, HORIZON, make_garden, walk  # noqa: E402
from tests.simic.toys import train  # noqa: E402

ROWS = 3
DRAW = Draw(contexts=CONTEXTS, seeds=2)


class Obeyed(GardenVectorEnv):
    """For learners that promise to obey masks."""

    def step(self, actions: Any) -> Any:
        found = super().step(actions)
        assert not found[-1]["illegal"].any()
        return found


def vector(rows: int = ROWS, *, obeyed: bool = False, **settings: Any) -> GardenVectorEnv:
    kind = Obeyed if obeyed else GardenVectorEnv
    return kind(settings.pop("deal", DRAW), rows, horizon=HORIZON, **settings)


def sampled(masks: Any, seed: int) -> Any:
    chance = np.random.default_rng(seed)
    return np.array([chance.choice(np.flatnonzero(row)) for row in masks])


def test_every_number_is_another_decision_without_what_does_not_matter() -> None:
    space = make_garden(1).action_space
    actions = CompositeActions(space)
    slots, kinds, blends = (space.size(name) for name in ("slot", "blueprint", "blend"))
    assert len(actions) == 1 + slots * kinds * blends + 3 * slots
    decisions = actions.decode(torch.arange(len(actions)))
    assert len(decisions.values.unique(dim=0)) == len(actions)
    assert torch.equal(decisions.values, decisions.canonical().values)
    assert not decisions.values[0].any(), "to wait is 0"
    assert decisions.values[1].tolist() == [LifecycleOp.GERMINATE, 0, 0, 0]
    for wrong in (-1, len(actions)):
        with pytest.raises(ActionError, match=f"given: {wrong}; valid: 0 to"):
            actions.decode(torch.tensor([0, wrong]))


def test_masks_are_exact_in_every_state_that_random_decisions_reach() -> None:
    garden = make_garden(8)
    garden.reset()
    actions = CompositeActions(garden.action_space)
    everything = actions.decode(torch.arange(len(actions)))
    opened = torch.zeros(len(actions), dtype=torch.bool)

    def look(garden: Any) -> None:
        legality = garden.legal()
        masks = actions.masks(legality)
        for number in range(len(actions)):
            values = everything.values[number].repeat(garden.num_envs, 1)
            assert torch.equal(
                masks[:, number], legality.permits(Actions(garden.action_space, values))
            )
        opened.logical_or_(masks.any(0))

    walk(garden, controller=RandomLegal(rate=0.9), look=look)
    assert int(opened.sum()) > 30


def test_the_vector_view_starts_anew_in_the_same_step() -> None:
    env = vector()
    assert env.metadata["autoreset_mode"].name == "SAME_STEP"
    seen, info = env.reset(seed=3)
    assert seen in env.observation_space
    first = env.garden.cases
    for number in range(HORIZON):
        assert np.array_equal(info["action_mask"].astype(bool), env.action_masks())
        actions = sampled(info["action_mask"], number)
        seen, rewards, terminated, truncated, info = env.step(actions)
        assert seen in env.observation_space
        total = sum(info["terms"][name] for name in MODES["shaped"])
        np.testing.assert_allclose(rewards, total, rtol=1e-6)
        assert ("final_obs" in info) == (number == HORIZON - 1) == bool(terminated.all())
        assert not truncated.any()
        assert list(info["context"]) == [case.context.name for case in first]
    assert info["_final_obs"].all()
    assert info["_final_info"].all()
    assert np.array_equal(info["final_info"]["illegal"], [False] * ROWS)
    for row in range(ROWS):
        assert info["final_obs"][row] in env.single_observation_space
        assert not np.array_equal(info["final_obs"][row], seen[row])
    assert env.garden.cases == tuple(env.garden.draw(row, 1) for row in range(ROWS))
    assert int(env.garden.lifecycle.epoch.max()) == 0


def test_illegal_actions_wait_and_are_told() -> None:
    env = vector()
    env.reset()
    prune = len(env.actions) - 1
    assert env.actions.table[prune].tolist() == [LifecycleOp.PRUNE, 2, 0, 0]
    *_, info = env.step(np.array([0, prune, 0]))
    assert info["illegal"].tolist() == [False, True, False]
    assert int(env.garden.lifecycle.interventions.sum()) == 0
    with pytest.raises(ActionError, match="no action"):
        env.step(np.array([0, 999, 0]))
    with pytest.raises(UnknownNameError, match="Unknown suite"):
        GardenVectorEnv("gardn")


def test_our_own_learner_trains_on_the_gymnasium_view() -> None:
    world = GymWorld(vector(obeyed=True))
    agent = PPOAgent(
        world.action_space,
        state_dim=world.state_dim,
        num_envs=ROWS,
        max_steps_per_env=HORIZON,
        lstm_hidden_dim=8,
    )
    before = [parameter.clone() for parameter in agent.network.parameters()]
    train(agent, world, 2)
    after = list(agent.network.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


class Policy(nn.Module):
    """An actor and a critic over one hidden layer, as other people write them."""

    def __init__(self, features: int, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, actions), nn.Linear(32, 1)

    def forward(self, seen: Tensor, masks: Tensor) -> tuple[Categorical, Tensor]:
        hidden = self.body(seen)
        logits = self.actor(hidden).masked_fill(~masks, -1e8)
        return Categorical(logits=logits), self.critic(hidden)[:, 0]


def test_a_loop_in_the_style_of_cleanrl_trains_on_it() -> None:
    torch.manual_seed(0)
    env = vector(4, obeyed=True)
    steps, gamma, clip = HORIZON, 0.99, 0.2
    policy = Policy(env.single_observation_space.shape[0], int(env.single_action_space.n))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    seen, info = env.reset(seed=1)
    losses = []
    for _ in range(2):
        kept: list[tuple[Tensor, ...]] = []
        for _ in range(steps):
            state, masks = torch.as_tensor(seen), torch.as_tensor(info["action_mask"]).bool()
            with torch.no_grad():
                choice, value = policy(state, masks)
                action = choice.sample()
            seen, reward, terminated, _, info = env.step(action.numpy())
            paid, over = torch.as_tensor(reward).float(), torch.as_tensor(terminated).float()
            kept.append((state, masks, action, choice.log_prob(action), value, paid, over))
        states, masks, actions, old, values, paid, over = map(torch.stack, zip(*kept, strict=True))
        returns = torch.zeros_like(values)
        ahead = policy(torch.as_tensor(seen), torch.as_tensor(info["action_mask"]).bool())[1]
        ahead = ahead.detach()
        for t in reversed(range(steps)):
            ahead = paid[t] + gamma * (1 - over[t]) * ahead
            returns[t] = ahead
        advantages = returns - values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(3):
            choice, value = policy(states.flatten(0, 1), masks.flatten(0, 1))
            ratio = (choice.log_prob(actions.flatten()) - old.flatten()).exp()
            gain = advantages.flatten()
            clipped = ratio.clamp(1 - clip, 1 + clip)
            loss = -torch.minimum(ratio * gain, clipped * gain).mean()
            loss = loss + 0.5 * (value - returns.flatten()).square().mean()
            loss = loss - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert np.isfinite(losses).all()
    assert losses[2] < losses[0], "the critic learns what the first round returned"
