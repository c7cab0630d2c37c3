"""The floor under the variance: what hardly changed while learning is not blown up later."""

import pytest
import torch

from esper.leyline import HEADS
from esper.tamiyo import FactoredRecurrentActorCritic, RunningNorm
from esper.tamiyo.network import CLIP, EPSILON, GARDEN_FLOOR
from tests.tamiyo.gardens import catalogue_of

ALWAYS = 0.3  # of the first feature while learning


def seen(floor: float | None = None) -> RunningNorm:
    """A norm that saw a constant, a feature that hardly moved, and one of standard deviation 2."""
    draws = torch.randn(400, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm = RunningNorm(3)
    if floor is not None:
        norm.floor.fill_(floor)
    norm.observe(draws * torch.tensor([0.0, 1e-3, 2.0]) + ALWAYS)
    return norm


def test_a_feature_that_was_constant_is_not_blown_up_where_it_differs_later() -> None:
    later = torch.tensor([[ALWAYS + 0.05, ALWAYS, ALWAYS]], dtype=torch.float64)
    assert float(seen()(later)[0, 0]) == CLIP, "without a floor it would be an outlier"
    assert float(seen(GARDEN_FLOOR)(later)[0, 0]) == pytest.approx(0.05 / GARDEN_FLOOR**0.5)
    hardly = torch.tensor([[ALWAYS, ALWAYS + 0.05, ALWAYS]], dtype=torch.float64)
    assert abs(float(seen()(hardly)[0, 1])) == CLIP
    assert float(seen(GARDEN_FLOOR)(hardly)[0, 1]) == pytest.approx(0.5, abs=1e-2)


def test_what_varies_more_than_the_floor_does_not_feel_it() -> None:
    states = torch.randn(20, 3, dtype=torch.float64)
    assert torch.equal(seen()(states)[:, 2], seen(GARDEN_FLOOR)(states)[:, 2])
    assert not torch.equal(seen()(states)[:, 1], seen(GARDEN_FLOOR)(states)[:, 1])


def test_without_a_floor_of_its_own_it_divides_by_the_standard_deviation() -> None:
    norm = seen()
    assert float(norm.floor) == EPSILON
    states = ALWAYS + torch.randn(20, 3, dtype=torch.float64) * torch.tensor([1e-5, 1e-3, 2.0])
    expected = (states - norm.mean) / (norm.variance + EPSILON).sqrt()
    # Of a feature that moved by 1e-3, the variance is a hundred times the smallest one.
    torch.testing.assert_close(norm(states)[:, :2], expected[:, :2], rtol=6e-3, atol=1e-9)
    torch.testing.assert_close(norm(states)[:, 2], expected[:, 2], rtol=1e-8, atol=1e-9)
    constant = torch.full((2, 3), ALWAYS, dtype=torch.float64)
    assert bool(norm(constant).isfinite().all())
    assert float(norm(constant)[:, 0].abs().max()) < 1e-9


def test_the_floor_does_not_change_what_is_measured() -> None:
    plain, floored = seen(), seen(GARDEN_FLOOR)
    for name in ("mean", "variance", "count"):
        assert torch.equal(getattr(plain, name), getattr(floored, name))


def test_before_anything_was_seen_states_stay_as_they_are() -> None:
    norm = RunningNorm(2)
    norm.floor.fill_(GARDEN_FLOOR)
    states = torch.tensor([[0.5, -3.0], [40.0, -40.0]])
    assert torch.equal(norm(states), states.clamp(-CLIP, CLIP))
    assert norm(states).dtype == torch.float32


def test_the_floor_is_saved_with_the_norm_and_with_the_network() -> None:
    norm, again = seen(GARDEN_FLOOR), RunningNorm(3)
    again.load_state_dict(norm.state_dict())
    assert float(again.floor) == GARDEN_FLOOR
    states = torch.randn(5, 3)
    assert torch.equal(again(states), norm(states))
    networks = [FactoredRecurrentActorCritic(HEADS.resolve(catalogue_of()), 3, 8) for _ in range(2)]
    networks[0].observation_norm.floor.fill_(GARDEN_FLOOR)
    networks[1].load_state_dict(networks[0].state_dict())
    assert float(networks[1].observation_norm.floor) == GARDEN_FLOOR
    assert "observation_norm.floor" not in dict(networks[1].named_parameters()), "never learned"
