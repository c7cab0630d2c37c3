"""Advantages against a brute force in float64, and their division among heads."""

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
from esper.simic.agent import compute_per_head_advantages, generalised_advantages
from esper.simic.agent.advantages import normalised
from esper.tamiyo import independent_heads


def brute_force(
    rewards: Tensor,
    values: Tensor,
    terminals: Tensor,
    truncations: Tensor,
    bootstraps: Tensor,
    last_values: Tensor,
    counts: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """The definition: every step sums its own future, until its episode ends."""
    result = torch.zeros(rewards.shape, dtype=torch.float64)
    for env in range(len(rewards)):
        count = int(counts[env])
        for start in range(count):
            weight = 1.0
            for step in range(start, count):
                if terminals[env, step]:
                    following = 0.0
                elif truncations[env, step]:
                    following = float(bootstraps[env, step])
                elif step == count - 1:
                    following = float(last_values[env])
                else:
                    following = float(values[env, step + 1])
                delta = float(rewards[env, step]) + gamma * following - float(values[env, step])
                result[env, start] += weight * delta
                if terminals[env, step] or truncations[env, step]:
                    break
                weight *= gamma * gae_lambda
    return result


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Tensor]:
    envs, time = draw(st.integers(1, 4)), draw(st.integers(1, DEFAULT_EPISODE_LENGTH))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rate = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    ended = torch.rand(envs, time, generator=noise) < rate
    cut = torch.rand(envs, time, generator=noise) < 0.5
    counts = [draw(st.integers(0, time)) for _ in range(envs)]

    def numbers(*shape: int) -> Tensor:
        return 5 * torch.randn(*shape, generator=noise)

    return {
        "rewards": numbers(envs, time),
        "values": numbers(envs, time),
        "terminals": ended & ~cut,
        "truncations": ended & cut,
        "bootstraps": numbers(envs, time),
        "last_values": numbers(envs),
        "counts": torch.tensor(counts),
    }


@settings(max_examples=150)
@given(layouts(), st.sampled_from([DEFAULT_GAMMA, 0.5, 1.0]), st.sampled_from([0.0, 0.97, 1.0]))
def test_advantages_equal_the_definition_on_random_layouts(
    layout: dict[str, Tensor], gamma: float, gae_lambda: float
) -> None:
    expected = brute_force(**layout, gamma=gamma, gae_lambda=gae_lambda)
    found = generalised_advantages(**layout, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


@settings(max_examples=30)
@given(layouts())
def test_an_environment_never_feels_the_numbers_of_another(layout: dict[str, Tensor]) -> None:
    rates = {"gamma": DEFAULT_GAMMA, "gae_lambda": DEFAULT_GAE_LAMBDA}
    together = generalised_advantages(**layout, **rates)
    alone = [
        generalised_advantages(**{k: v[env : env + 1] for k, v in layout.items()}, **rates)
        for env in range(len(together))
    ]
    assert torch.equal(together, torch.cat(alone))


@given(layouts())
def test_normalised_advantages_have_mean_zero_and_deviation_one_over_valid_steps(
    layout: dict[str, Tensor],
) -> None:
    base = layout["rewards"]
    valid = torch.arange(base.shape[1]) < layout["counts"][:, None]
    found = normalised(torch.where(valid, base, torch.nan), valid)
    assert bool((found[~valid] == 0).all())
    assert bool(found.isfinite().all())
    if int(valid.sum()) > 1:
        kept = base[valid].double()
        expected = (kept - kept.mean()) / kept.std(correction=0)
        torch.testing.assert_close(found[valid].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("number", [0.0, 0.1, -1e6, 1e-30])
@pytest.mark.parametrize("steps", [1, 7])
def test_constant_and_single_advantages_become_zero(number: float, steps: int) -> None:
    found = normalised(torch.full((1, steps), number), torch.ones(1, steps, dtype=torch.bool))
    torch.testing.assert_close(found, torch.zeros(1, steps), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(11,), (3, DEFAULT_EPISODE_LENGTH)])
def test_a_head_gets_the_advantages_of_the_ops_for_which_it_matters(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    base, ops = torch.randn(shape), torch.randint(len(LifecycleOp), shape)
    found = compute_per_head_advantages(base, ops)
    assert tuple(found) == HEAD_NAMES
    for head in HEADS.heads:
        matters = torch.isin(ops, torch.tensor(sorted(head.matters_for)))
        assert torch.equal(found[head.name], torch.where(matters, base, 0.0))


def test_in_a_space_of_independent_heads_every_head_gets_every_advantage() -> None:
    base = torch.randn(9)
    found = compute_per_head_advantages(base, torch.zeros(9).long(), independent_heads((2, 3)))
    assert all(torch.equal(part, base) for part in found.values())


def test_advantages_without_their_ops_are_refused() -> None:
    with pytest.raises(AgreementError, match=r"advantages \[3\], ops \[4\]"):
        compute_per_head_advantages(torch.zeros(3), torch.zeros(4).long())
    with pytest.raises(AgreementError, match=r"\[batch\] or \[batch, time\]"):
        compute_per_head_advantages(torch.zeros(2, 2, 2), torch.zeros(2, 2, 2).long())
