"""Advantage estimation compared with a float64 definition, and the advantages of each head."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from esper.leyline import (
    DEFAULT_EPISODE_LENGTH,
    DEFAULT_GAE_LAMBDA,
    DEFAULT_GAMMA,
    HEAD_NAMES,
    HEADS,
    AgreementError,
    LifecycleOp,
)
from esper.simic.agent import compute_gae, compute_per_head_advantages
from esper.simic.agent.advantages import normalize
from esper.tamiyo import independent_heads


def gae_by_definition(
    rewards: Tensor,
    values: Tensor,
    terminals: Tensor,
    truncations: Tensor,
    bootstrap_values: Tensor,
    last_values: Tensor,
    step_counts: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Sum the discounted TD errors of each step until its episode ends, in float64."""
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    for env in range(len(rewards)):
        count = int(step_counts[env])
        for start in range(count):
            weight = 1.0
            for step in range(start, count):
                if terminals[env, step]:
                    next_value = 0.0
                elif truncations[env, step]:
                    next_value = float(bootstrap_values[env, step])
                elif step == count - 1:
                    next_value = float(last_values[env])
                else:
                    next_value = float(values[env, step + 1])
                delta = float(rewards[env, step]) + gamma * next_value - float(values[env, step])
                advantages[env, start] += weight * delta
                if terminals[env, step] or truncations[env, step]:
                    break
                weight *= gamma * gae_lambda
    return advantages


@st.composite
def random_rollouts(draw: st.DrawFn) -> dict[str, Tensor]:
    num_envs = draw(st.integers(1, 4))
    num_steps = draw(st.integers(1, DEFAULT_EPISODE_LENGTH))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    end_rate = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    episode_ends = torch.rand(num_envs, num_steps, generator=generator) < end_rate
    is_truncated = torch.rand(num_envs, num_steps, generator=generator) < 0.5
    step_counts = [draw(st.integers(0, num_steps)) for _ in range(num_envs)]

    def random_numbers(*shape: int) -> Tensor:
        return 5 * torch.randn(*shape, generator=generator)

    return {
        "rewards": random_numbers(num_envs, num_steps),
        "values": random_numbers(num_envs, num_steps),
        "terminals": episode_ends & ~is_truncated,
        "truncations": episode_ends & is_truncated,
        "bootstrap_values": random_numbers(num_envs, num_steps),
        "last_values": random_numbers(num_envs),
        "step_counts": torch.tensor(step_counts),
    }


@settings(max_examples=150)
@given(
    random_rollouts(),
    st.sampled_from([DEFAULT_GAMMA, 0.5, 1.0]),
    st.sampled_from([0.0, 0.97, 1.0]),
)
def test_gae_equals_definition_on_random_rollouts(
    rollout: dict[str, Tensor], gamma: float, gae_lambda: float
) -> None:
    expected = gae_by_definition(**rollout, gamma=gamma, gae_lambda=gae_lambda)
    advantages = compute_gae(**rollout, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(advantages.double(), expected, atol=1e-4, rtol=1e-5)


@settings(max_examples=30)
@given(random_rollouts())
def test_gae_does_not_depend_on_other_environments(rollout: dict[str, Tensor]) -> None:
    discounts = {"gamma": DEFAULT_GAMMA, "gae_lambda": DEFAULT_GAE_LAMBDA}
    advantages = compute_gae(**rollout, **discounts)
    rows = []
    for env in range(len(advantages)):
        single = {name: tensor[env : env + 1] for name, tensor in rollout.items()}
        rows.append(compute_gae(**single, **discounts))
    assert torch.equal(advantages, torch.cat(rows))


@given(random_rollouts())
def test_normalized_advantages_have_mean_zero_and_unit_deviation(
    rollout: dict[str, Tensor],
) -> None:
    advantages = rollout["rewards"]
    valid = torch.arange(advantages.shape[1]) < rollout["step_counts"][:, None]
    normalized = normalize(torch.where(valid, advantages, torch.nan), valid)
    assert bool((normalized[~valid] == 0).all())
    assert bool(normalized.isfinite().all())
    if int(valid.sum()) > 1:
        reference = advantages[valid].double()
        expected = (reference - reference.mean()) / reference.std(correction=0)
        torch.testing.assert_close(normalized[valid].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("number", [0.0, 0.1, -1e6, 1e-30])
@pytest.mark.parametrize("steps", [1, 7])
def test_normalized_constant_advantages_are_zero(number: float, steps: int) -> None:
    valid = torch.ones(1, steps, dtype=torch.bool)
    normalized = normalize(torch.full((1, steps), number), valid)
    torch.testing.assert_close(normalized, torch.zeros(1, steps), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(11,), (3, DEFAULT_EPISODE_LENGTH)])
def test_per_head_advantages_are_zero_for_irrelevant_ops(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    advantages = torch.randn(shape)
    ops = torch.randint(len(LifecycleOp), shape)
    by_head = compute_per_head_advantages(advantages, ops)
    assert tuple(by_head) == HEAD_NAMES
    for head in HEADS.heads:
        is_relevant = torch.isin(ops, torch.tensor(sorted(head.matters_for)))
        assert torch.equal(by_head[head.name], torch.where(is_relevant, advantages, 0.0))


def test_per_head_advantages_of_independent_heads_are_unchanged() -> None:
    advantages = torch.randn(9)
    ops = torch.zeros(9, dtype=torch.int64)
    by_head = compute_per_head_advantages(advantages, ops, independent_heads((2, 3)))
    assert all(torch.equal(head_advantages, advantages) for head_advantages in by_head.values())


def test_per_head_advantages_with_wrong_shapes_raise() -> None:
    ops = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(AgreementError, match=r"advantages \[3\], ops \[4\]"):
        compute_per_head_advantages(torch.zeros(3), ops)
    with pytest.raises(AgreementError, match=r"\[batch\] or \[batch, time\]"):
        compute_per_head_advantages(torch.zeros(2, 2, 2), ops.expand(2, 2, 4)[..., :2])


def test_per_head_advantages_document_that_devices_must_match() -> None:
    assert "same device" in (compute_per_head_advantages.__doc__ or "")
