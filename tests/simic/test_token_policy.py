"""PPO with the network over tokens: exact, resumable to the bit, and able to overrule advice."""

from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import Legality, LifecycleOp
from esper.simic.agent import Outcome, PPOAgent, PPOConfig
from esper.simic.agent.rollouts import collect
from esper.tamiyo import TokenActorCritic, TokenLayout
from esper.tamiyo.token_layout import ADVISED, WIDTHS
from tests.simic.toys import Toy, train
from tests.tamiyo.spaces import esper_space, random_legality

LAYOUT = TokenLayout(2, 3)


class Misled(Toy):
    """Rows of hosts of two shapes; the advice is to wait, which pays nothing, pruning does.

    Episodes end at random.
    """

    space, state_dim = LAYOUT.space, LAYOUT.state_dim

    def legal(self) -> Legality:
        halves = [random_legality(esper_space(*size), self.envs // 2, self.draw)
                  for size in ((1, 2), (2, 3))]  # fmt: skip
        for half in halves:
            half.masks["op"][:] = True
        masks = [LAYOUT.widen(half).masks for half in halves]
        together = {name: torch.cat([each[name] for each in masks]) for name in masks[0]}
        return Legality(LAYOUT.space, self.envs, together)

    def reset(self) -> Tensor:
        states = torch.rand(self.envs, LAYOUT.state_dim, generator=self.draw)
        whole, own, seeds = LAYOUT.split(states)
        for tokens, size in zip((whole, own, seeds), ADVISED, strict=True):
            tokens[..., -size:] = 0.0
        whole[:, WIDTHS[0] - ADVISED[0] + LifecycleOp.WAIT] = 1.0
        own[..., 0] = seeds[..., 0] = 1.0
        half = self.envs // 2
        own[:half, 1:] = 0.0
        seeds[:half, 1:] = seeds[:half, :, 2:] = 0.0
        return states

    def step(self, actions: Tensor) -> Outcome:
        self.chosen = actions[:, 0]
        ends = torch.rand(self.envs, generator=self.draw) < 0.3
        return self.outcome(self.reset(), (self.chosen == LifecycleOp.PRUNE).float(), ends)


def agent_of(envs: int, steps: int = 6, **settings: object) -> PPOAgent:
    config = PPOConfig(strict=True, **settings)
    size = (LAYOUT.space, LAYOUT.state_dim, envs, steps)
    return PPOAgent.build(*size, config, layout=LAYOUT, seed=3)


def test_stored_and_recomputed_log_probs_agree_with_episodes_that_begin_anywhere() -> None:
    agent, world = agent_of(4, learning_rate=0.01), Misled(4, 0)
    found: list[float] = []
    train(agent, world, 72, lambda _, metrics: found.append(metrics["stored_log_prob_error"]))
    assert len(found) == 3
    assert max(found) < 1e-4
    assert bool(agent.network.heads[0][-1].weight.any())


def test_a_saved_agent_goes_on_to_the_bit(tmp_path: Path) -> None:
    def rounds(agent: PPOAgent, world: Misled, observations: Tensor, count: int) -> Tensor:
        for _ in range(count):
            observations = collect(agent, world, observations)
            agent.update()
        return observations

    whole, world = agent_of(4), Misled(4, 0)
    rounds(whole, world, world.reset(), 2)
    first, world = agent_of(4), Misled(4, 0)
    observations = rounds(first, world, world.reset(), 1)
    loaded = PPOAgent.load(first.save(tmp_path / "agent"))
    assert isinstance(loaded.network, TokenActorCritic)
    assert loaded.network.layout == LAYOUT
    rounds(loaded, world, observations, 1)
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(loaded.network.state_dict()[name], tensor), name


def test_advice_that_does_not_pay_is_overruled() -> None:
    agent, world = agent_of(16, learning_rate=0.01, minibatches=2), Misled(16, 0)
    shares: list[float] = []

    def listen(_: int, __: object) -> bool:
        with torch.no_grad():
            op = agent.network(world.reset()).logits[0].softmax(-1)
        shares.append(float(op[:, LifecycleOp.PRUNE].mean()))
        return shares[-1] > 0.5

    train(agent, world, 96 * 40, listen)
    assert shares[-1] > 0.5
