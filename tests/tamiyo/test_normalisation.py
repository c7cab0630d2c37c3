"""The floor under the variance: what hardly changed while learning is not blown up later.

And what is remembered of the buffers never outlives them.
"""

import copy
import io
from collections.abc import Callable

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


def anew(norm: RunningNorm, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the buffers say, feature by feature: of states, and of ones that are made louder."""
    assert norm.others is not None
    found = torch.zeros(2, *states.shape, dtype=torch.float64)
    for f, (mean, variance, other) in enumerate(
        zip(norm.mean, norm.variance, norm.others, strict=True)
    ):
        wide = variance.clamp(min=float(norm.floor)).sqrt()
        plain = states[:, f].double()
        found[0, :, f] = ((plain - mean) / wide if other else plain).clamp(-CLIP, CLIP)
        found[1, :, f] = 1.0 if other else (1 / wide).clamp(max=CLIP)
    return found[0], found[1]


def saved(norm: RunningNorm) -> RunningNorm:
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    loaded: RunningNorm = torch.load(file, weights_only=False)
    return loaded


def others(norm: RunningNorm) -> dict[str, torch.Tensor]:
    """Other statistics, with the same marks."""
    return norm.state_dict() | {"mean": norm.mean + 2, "variance": norm.variance * 3}


def assigned(norm: RunningNorm) -> RunningNorm:
    norm.load_state_dict(others(norm), assign=True)
    return norm


def loaded(norm: RunningNorm) -> RunningNorm:
    norm.load_state_dict(others(norm))
    return norm


def floored(norm: RunningNorm) -> RunningNorm:
    norm.floor.fill_(9.0)
    return norm


def moved(norm: RunningNorm) -> RunningNorm:
    norm.mean[0] = 7.0
    return norm


def unmarked(norm: RunningNorm) -> RunningNorm:
    assert norm.others is not None
    norm.others.fill_(1.0)
    return norm


def doubled(norm: RunningNorm) -> RunningNorm:
    return norm.double()


def inferred(norm: RunningNorm) -> RunningNorm:
    with torch.inference_mode():
        norm(torch.zeros(1, 3))
        norm.mean.fill_(3.0)
    return norm


def test_what_inference_mode_made_is_used_outside_of_it() -> None:
    with torch.inference_mode():
        norm = RunningNorm(2)
        norm.observe(torch.tensor([[1.0, 2.0], [3.0, 8.0]]))
    with torch.no_grad():
        assert norm(torch.tensor([[2.0, 5.0]]))[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        floored,
        moved,
        unmarked,
        loaded,
        assigned,
        inferred,
        doubled,
        copy.deepcopy,
        copy.copy,
        saved,
    ],
    ids=lambda change: change.__name__,
)
def test_what_changes_in_the_buffers_is_seen_at_once(
    change: Callable[[RunningNorm], RunningNorm],
) -> None:
    draw = torch.Generator().manual_seed(1)
    norm = RunningNorm(3, keeps_marks=True)

    def news() -> torch.Tensor:
        marks = torch.rand(50, 1, generator=draw) < 0.2
        return torch.cat((4 * torch.randn(50, 2, generator=draw) + 1, marks), 1)

    def check() -> None:
        states = news().requires_grad_()
        seen, louder = anew(norm, states.detach())
        torch.testing.assert_close(norm(states).double(), seen, atol=1e-5, rtol=1e-5)
        ones = torch.ones_like(states)
        torch.testing.assert_close(norm.louder(ones).double(), louder, atol=1e-5, rtol=1e-5)
        norm(states).sum().backward()

    for _ in range(3):
        norm.observe(news())
        check()
        check()
        norm = change(norm)
        check()


def test_a_copy_that_was_written_to_as_often_as_its_original_goes_by_its_own_buffers() -> None:
    norm, states = RunningNorm(3), torch.randn(5, 3)
    norm.observe(torch.randn(20, 3))
    for buffer in norm.buffers():
        for _ in range(3):
            buffer.mul_(1.0)
    before = norm(states)
    copied = copy.deepcopy(norm)
    for buffer, original in zip(copied.buffers(), norm.buffers(), strict=True):
        while buffer._version < original._version:
            buffer.add_(2.0)
        assert buffer._version == original._version
    wide = copied.variance.maximum(copied.floor).sqrt()
    expected = ((states - copied.mean) / wide).float().clamp(-CLIP, CLIP)
    torch.testing.assert_close(copied(states), expected)
    assert torch.equal(norm(states), before)


def test_a_buffer_in_the_place_of_one_that_was_written_to_as_often_counts() -> None:
    norm, states = RunningNorm(3), torch.randn(5, 3)
    assert torch.equal(norm(states), states)
    norm.mean = torch.full_like(norm.mean, 2.0)  # new, as the one before it was
    torch.testing.assert_close(norm(states), states - 2.0)
