"""PPO with the network over tokens: exact, resumable bit for bit, and able to overrule the rule."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline import Legality, LifecycleOp, PPOUpdateMetrics
from esper.simic.agent import Outcome, PPOAgent, PPOConfig, collect, initial_weights
from esper.tamiyo import TokenActorCritic, TokenLayout
from esper.tamiyo.token_layout import ADVISED, WIDTHS
from tests.simic.toys import Toy, train
from tests.tamiyo.spaces import esper_space, random_legality

LAYOUT = TokenLayout(2, 3)
SEED = 3


class WrongProposal(Toy):
    """The rule proposes WAIT, which pays nothing; PRUNE pays 1.

    Half of the environments have one slot and two blueprints, and padding for the rest. Episodes
    end at random.
    """

    action_space = LAYOUT.space
    state_dim = LAYOUT.state_dim

    def legal(self) -> Legality:
        halves = []
        for size in ((1, 2), (2, 3)):
            legality = random_legality(esper_space(*size), self.num_envs // 2, self.generator)
            legality.masks["op"][:] = True
            halves.append(LAYOUT.widen(legality).masks)
        masks = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
        return Legality(LAYOUT.space, self.num_envs, masks)

    def reset(self) -> Tensor:
        states = torch.rand(self.num_envs, LAYOUT.state_dim, generator=self.generator)
        global_token, slots, candidates = LAYOUT.split(states)
        for tokens, size in zip((global_token, slots, candidates), ADVISED, strict=True):
            tokens[..., -size:] = 0.0
        global_token[:, WIDTHS[0] - ADVISED[0] + LifecycleOp.WAIT] = 1.0
        slots[..., 0] = 1.0
        candidates[..., 0] = 1.0
        half = self.num_envs // 2
        slots[:half, 1:] = 0.0
        candidates[:half, 1:] = 0.0
        candidates[:half, :, 2:] = 0.0
        return states

    def step(self, actions: Tensor) -> Outcome:
        rewards = (actions[:, 0] == LifecycleOp.PRUNE).float()
        terminals = torch.rand(self.num_envs, generator=self.generator) < 0.3
        return self.outcome(self.reset(), rewards, terminals)


def make_agent(num_envs: int, **settings: Any) -> PPOAgent:
    with initial_weights(SEED):
        network = TokenActorCritic(LAYOUT)
    config = PPOConfig(strict=True, **settings)
    return PPOAgent(
        network=network, num_envs=num_envs, max_steps_per_env=6, config=config, seed=SEED
    )


def test_updates_reproduce_stored_log_probs_of_token_networks() -> None:
    agent, world = make_agent(4, lr=0.01), WrongProposal(4, 0)
    errors: list[float] = []

    def store_error(_: int, metrics: PPOUpdateMetrics) -> None:
        errors.append(metrics["stored_log_prob_error"])

    train(agent, world, 72, store_error)
    assert len(errors) == 3
    assert max(errors) < 1e-4
    assert bool(agent.network.heads["op"][-1].weight.any())


def test_loaded_token_agent_continues_bit_for_bit(tmp_path: Path) -> None:
    def run_rounds(
        agent: PPOAgent, world: WrongProposal, observations: Tensor, rounds: int
    ) -> Tensor:
        for _ in range(rounds):
            observations = collect(agent, world, observations)
            agent.update()
        return observations

    uninterrupted, world = make_agent(4), WrongProposal(4, 0)
    run_rounds(uninterrupted, world, world.reset(), 2)

    interrupted, world = make_agent(4), WrongProposal(4, 0)
    observations = run_rounds(interrupted, world, world.reset(), 1)
    loaded = PPOAgent.load(interrupted.save(tmp_path / "agent"))
    assert isinstance(loaded.network, TokenActorCritic)
    assert loaded.network.layout == LAYOUT
    run_rounds(loaded, world, observations, 1)
    for name, tensor in uninterrupted.network.state_dict().items():
        assert torch.equal(loaded.network.state_dict()[name], tensor), name


def test_proposal_that_does_not_pay_is_overruled() -> None:
    agent, world = make_agent(16, lr=0.01, minibatches=2), WrongProposal(16, 0)
    prune_probabilities: list[float] = []

    def has_learned_to_prune(_: int, metrics: PPOUpdateMetrics) -> bool:
        with torch.no_grad():
            op_probabilities = agent.network(world.reset()).logits["op"].softmax(-1)
        prune_probabilities.append(float(op_probabilities[:, LifecycleOp.PRUNE].mean()))
        return prune_probabilities[-1] > 0.5

    train(agent, world, 96 * 40, has_learned_to_prune)
    assert prune_probabilities[-1] > 0.5
