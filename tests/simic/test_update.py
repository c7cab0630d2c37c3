"""The PPO update: credit of heads, entropy coefficients, accumulation, and metrics.

Shapes: `E` environments, `H` heads.
"""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from esper.distributed import SINGLE_PROCESS
from esper.leyline import (
    DEFAULT_ENTROPY_COEF,
    ActionSpace,
    Legality,
    PerHead,
    PerHeadAdvantages,
    PPOUpdateMetrics,
)
from esper.simic.agent import Outcome, PPOAgent, PPOConfig, collect
from esper.simic.agent import update as update_module
from esper.simic.agent.advantages import compute_per_head_advantages
from esper.tamiyo import FactoredRecurrentActorCritic, independent_heads
from tests.simic.toys import Noise
from tests.tamiyo.spaces import esper_space

SPACE = esper_space()
HIDDEN_DIM = 8
NUM_ENVS = 6
NUM_STEPS = 8


def make_agent(**settings: Any) -> tuple[PPOAgent, Noise]:
    world = Noise(NUM_ENVS, seed=0)
    agent = PPOAgent(
        world.action_space,
        state_dim=world.state_dim,
        num_envs=NUM_ENVS,
        max_steps_per_env=NUM_STEPS,
        lstm_hidden_dim=HIDDEN_DIM,
        config=PPOConfig(**settings),
    )
    return agent, world


def update_after_waiting(
    agent: PPOAgent, world: Noise, other_ops_are_legal: bool = False
) -> PPOUpdateMetrics:
    """Collect a rollout in which WAIT is the only legal op, and update."""
    num_ops = world.action_space.size("op")
    op_mask = torch.full((NUM_ENVS, num_ops), other_ops_are_legal)
    op_mask[:, 0] = True
    legality = Legality(world.action_space, NUM_ENVS, {"op": op_mask})
    no_episode_ends = torch.zeros(NUM_ENVS, dtype=torch.bool)
    for _ in range(NUM_STEPS):
        decision = agent.act(world.reset(), legality)
        rewards = torch.rand(NUM_ENVS)
        outcome = Outcome(world.reset(), rewards, no_episode_ends, no_episode_ends)
        agent.record(decision, outcome)
    agent.bootstrap_and_compute_returns(world.reset())
    return agent.update()


# --- credit of heads ----------------------------------------------------------------------------


def test_update_takes_policy_gradient_from_per_head_advantages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With advantages of zero for every head, only the value loss has a gradient."""

    def zero_advantages(advantages: Tensor, ops: Tensor, space: ActionSpace) -> PerHeadAdvantages:
        zeros = torch.zeros_like(advantages)
        return PerHead(space.names, dict.fromkeys(space.names, zeros))

    norms = []
    for replaces_advantages in (False, True):
        if replaces_advantages:
            monkeypatch.setattr(update_module, "compute_per_head_advantages", zero_advantages)
        agent, world = make_agent(entropy_coef=0.0, epochs=1)
        collect(agent, world, world.reset())
        norms.append(agent.update()["gradient_norms"])
    original, without_credit = norms
    assert all(norm > 0 for norm in original.heads.values())
    assert set(without_credit.heads.values()) == {0.0}
    assert without_credit.value > 0


def test_update_computes_per_head_advantages_for_every_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy = Mock(wraps=compute_per_head_advantages)
    monkeypatch.setattr(update_module, "compute_per_head_advantages", spy)
    agent, world = make_agent(epochs=2, minibatches=3, accumulation_steps=2, target_kl=None)
    collect(agent, world, world.reset())
    agent.update()
    assert spy.call_count == 2 * 3 * 2
    for call in spy.call_args_list:
        advantages, ops, space = call.args
        assert advantages.shape == ops.shape == (1, NUM_STEPS)
        assert space == world.action_space


# --- entropy coefficients -----------------------------------------------------------------------


def entropy_coefficients(space: ActionSpace, entropy: float, **settings: Any) -> Tensor:
    """Return the coefficients for heads that all have this entropy and are always relevant."""
    network = FactoredRecurrentActorCritic(space, state_dim=3, lstm_hidden_dim=HIDDEN_DIM)
    entropies = torch.full((2, 2, len(space)), entropy)
    head_mask = torch.ones(2, 2, len(space), dtype=torch.bool)
    return update_module._entropy_coefficients(
        entropies, head_mask, network, PPOConfig(**settings), SINGLE_PROCESS
    )


@pytest.mark.parametrize("num_heads", [1, 2, 5])
def test_entropy_coefficients_sum_to_the_configured_one(num_heads: int) -> None:
    coefficients = entropy_coefficients(independent_heads((3,) * num_heads), entropy=0.5)
    assert float(coefficients.sum()) == pytest.approx(DEFAULT_ENTROPY_COEF)


def test_head_above_its_entropy_target_gets_no_bonus() -> None:
    targets = {"op": 0.4, "slot": 0.6}
    coefficients = entropy_coefficients(SPACE, entropy=0.5, entropy_targets=targets)
    assert float(coefficients[0]) == 0
    assert bool((coefficients[1:] == coefficients[1]).all())
    assert float(coefficients[1]) > 0


# --- accumulation -------------------------------------------------------------------------------


def weights(agent: PPOAgent) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in agent.network.parameters()])


def test_accumulation_steps_of_config_are_used_by_update(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated_rows: list[int] = []
    evaluate = update_module._evaluate

    def count_rows(network: Any, batch: Any, config: Any) -> Any:
        if torch.is_grad_enabled():
            evaluated_rows.append(len(batch))
        return evaluate(network, batch, config)

    monkeypatch.setattr(update_module, "_evaluate", count_rows)
    settings = {"epochs": 2, "target_kl": None, "entropy_coef": 0.05}
    unsplit, world = make_agent(**settings)
    collect(unsplit, world, world.reset())
    unsplit_metrics = unsplit.update()
    assert evaluated_rows == [NUM_ENVS] * 2

    evaluated_rows.clear()
    split, world = make_agent(**settings, accumulation_steps=3)
    collect(split, world, world.reset())
    split_metrics = split.update()
    assert evaluated_rows == [NUM_ENVS // 3] * 3 * 2
    torch.testing.assert_close(weights(split), weights(unsplit), atol=2e-5, rtol=1e-4)
    for name in ("policy_loss", "value_loss", "entropy", "gradient_norm"):
        assert split_metrics[name] == pytest.approx(unsplit_metrics[name], rel=1e-3, abs=1e-5)

    evaluated_rows.clear()
    collect(split, world, world.reset())
    split.update(accumulation_steps=2)  # an argument takes precedence
    assert evaluated_rows == [NUM_ENVS // 2] * 2 * 2


# --- metrics ------------------------------------------------------------------------------------


def test_metric_return_scale_equals_that_of_the_network() -> None:
    agent, world = make_agent()
    for _ in range(3):
        collect(agent, world, world.reset())
        metrics = agent.update()
        assert metrics["return_scale"] == pytest.approx(float(agent.network.return_scale))
        assert metrics["return_scale"] not in (0.0, 1.0)


def test_metrics_of_heads_never_relevant_are_neutral() -> None:
    agent, world = make_agent(target_kl=None)
    metrics = update_after_waiting(agent, world)
    assert metrics["kl"] == 0.0
    for head in metrics["heads"].values():  # WAIT is the only legal op, so no head has a choice
        assert head["relevant_fraction"] == 0.0
        assert head["kl"] == 0.0
        assert head["entropy"] == 0.0
        assert head["clip_fraction"] == 0.0
        assert head["loss"] == 0.0
        assert head["ratio_min"] == head["ratio_mean"] == head["ratio_max"] == 1.0
    assert set(metrics["gradient_norms"].heads.values()) == {0.0}


@pytest.mark.parametrize("entropy_steps", ["relevant", "legal"])
def test_heads_of_unchosen_ops_have_gradient_if_legal_steps_count(entropy_steps: str) -> None:
    agent, world = make_agent(entropy_steps=entropy_steps)
    agent.network.bias_action_logit("op", 0, 50.0)  # WAIT is chosen always
    metrics = update_after_waiting(agent, world, other_ops_are_legal=True)
    assert metrics["heads"]["blueprint"]["relevant_fraction"] == 0.0
    norms = metrics["gradient_norms"].heads
    for head in ("slot", "blueprint", "blend"):
        assert (norms[head] > 0) == (entropy_steps == "legal")


def test_kl_of_irrelevant_heads_is_zero_while_the_op_learns() -> None:
    """Only WAIT and ADVANCE are legal: blueprint and blend are never relevant."""
    agent, world = make_agent(target_kl=None, epochs=4, lr=1e-2)
    legality_of = world.legal

    def without_planting() -> Legality:
        legality = legality_of()
        is_plant = torch.tensor([row[-1] for row in world.action_space.relevance])
        legality.masks["op"][:, is_plant] = False
        legality.masks["op"][:, ~is_plant] = True
        return legality

    world.legal = without_planting  # type: ignore[method-assign]
    collect(agent, world, world.reset())
    heads = agent.update()["heads"]
    assert heads["op"]["kl"] > 0.0
    assert heads["blueprint"]["kl"] == heads["blend"]["kl"] == 0.0
    assert heads["blueprint"]["ratio_mean"] == heads["blend"]["ratio_mean"] == 1.0
