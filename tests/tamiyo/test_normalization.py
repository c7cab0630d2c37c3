"""Running normalisation: its statistics, the variance floor, and the derived scale and shift.

Shapes: `F` features.
"""

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esper.leyline import HEADS, AgreementError
from esper.tamiyo import FactoredRecurrentActorCritic, RunningNorm
from esper.tamiyo.normalization import CLIP, DEFAULT_VARIANCE_FLOOR, GARDEN_VARIANCE_FLOOR
from tests.tamiyo.gardens import catalogue_of

CONSTANT = 0.3  # value of the first feature while statistics are collected


def make_norm(floor: float | None = None) -> RunningNorm:
    """Return a float64 norm of a constant, a feature of deviation 0.001, and one of deviation 2."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    norm = RunningNorm(3).double()
    if floor is not None:
        norm.set_variance_floor(floor)
    norm.observe(noise * torch.tensor([0.0, 1e-3, 2.0]) + CONSTANT)
    return norm


# --- statistics ---------------------------------------------------------------------------------


def test_statistics_equal_those_of_all_states_together() -> None:
    torch.manual_seed(0)
    norm = RunningNorm(6)
    batches = [torch.randn(size, 6) * 3 + 5 for size in (7, 1, 40)]
    for batch in batches:
        norm.observe(batch)
    norm.observe(torch.empty(0, 6))
    valid = torch.rand(3, 4) < 0.5
    sequences = torch.randn(3, 4, 6).masked_fill(~valid[..., None], math.nan)
    norm.observe(sequences, valid)
    states = torch.cat([*batches, sequences[valid]]).double()
    torch.testing.assert_close(norm.mean, states.mean(0))
    torch.testing.assert_close(norm.variance, states.var(0, correction=0))
    assert float(norm.count) == len(states)


def test_forward_does_not_change_statistics() -> None:
    norm = make_norm()
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    states = torch.randn(5, 3)
    assert torch.equal(norm(states), norm(states))
    assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())


def test_statistics_of_processes_are_summed() -> None:
    """Two equal processes have the mean and variance of one, and twice its count."""
    torch.manual_seed(0)
    states = torch.randn(10, 3)
    single, doubled = RunningNorm(3), RunningNorm(3)
    single.observe(states)
    doubled.observe(states, all_reduce_sum=lambda tensor: 2 * tensor)
    torch.testing.assert_close(doubled.mean, single.mean)
    torch.testing.assert_close(doubled.variance, single.variance)
    assert float(doubled.count) == 2 * float(single.count)


def test_observing_states_of_wrong_shape_raises() -> None:
    with pytest.raises(AgreementError, match=r"\[\.\.\., 6\]"):
        RunningNorm(6).observe(torch.zeros(6))


def test_before_observing_states_are_only_clipped() -> None:
    norm = RunningNorm(2)
    norm.set_variance_floor(GARDEN_VARIANCE_FLOOR)
    states = torch.tensor([[0.5, -3.0], [40.0, -40.0]])
    assert torch.equal(norm(states), states.clamp(-CLIP, CLIP))
    assert norm(states).dtype == torch.float32


def test_norm_without_features_returns_states() -> None:
    norm = RunningNorm(0)
    norm.observe(torch.randn(5, 3))
    assert float(norm.count) == 0


# --- variance floor -----------------------------------------------------------------------------


def test_floor_bounds_the_scale_of_constant_features() -> None:
    states = torch.tensor([[CONSTANT + 0.05, CONSTANT, CONSTANT]], dtype=torch.float64)
    assert float(make_norm()(states)[0, 0]) == CLIP  # without a floor it would be an outlier
    floored = make_norm(GARDEN_VARIANCE_FLOOR)
    expected = 0.05 / GARDEN_VARIANCE_FLOOR**0.5
    assert float(floored(states)[0, 0]) == pytest.approx(expected)
    states = torch.tensor([[CONSTANT, CONSTANT + 0.05, CONSTANT]], dtype=torch.float64)
    assert abs(float(make_norm()(states)[0, 1])) == CLIP
    assert float(floored(states)[0, 1]) == pytest.approx(0.5, abs=1e-2)


def test_floor_does_not_affect_features_that_vary_more() -> None:
    states = torch.randn(20, 3, dtype=torch.float64)
    plain, floored = make_norm()(states), make_norm(GARDEN_VARIANCE_FLOOR)(states)
    assert torch.equal(plain[:, 2], floored[:, 2])
    assert not torch.equal(plain[:, 1], floored[:, 1])


def test_default_floor_divides_by_the_standard_deviation() -> None:
    norm = make_norm()
    assert float(norm.floor) == DEFAULT_VARIANCE_FLOOR
    noise = torch.randn(20, 3, dtype=torch.float64)
    states = CONSTANT + noise * torch.tensor([1e-5, 1e-3, 2.0])
    expected = (states - norm.mean) / (norm.variance + DEFAULT_VARIANCE_FLOOR).sqrt()
    # The variance of the second feature is a hundred times the floor.
    torch.testing.assert_close(norm(states)[:, :2], expected[:, :2], rtol=6e-3, atol=1e-9)
    torch.testing.assert_close(norm(states)[:, 2], expected[:, 2], rtol=1e-8, atol=1e-9)
    constant = torch.full((2, 3), CONSTANT, dtype=torch.float64)
    assert bool(norm(constant).isfinite().all())
    assert float(norm(constant)[:, 0].abs().max()) < 1e-9


def test_floor_does_not_change_statistics() -> None:
    plain, floored = make_norm(), make_norm(GARDEN_VARIANCE_FLOOR)
    for name in ("mean", "variance", "count"):
        assert torch.equal(getattr(plain, name), getattr(floored, name))


def test_floor_is_saved_with_norm_and_network() -> None:
    norm, loaded = make_norm(GARDEN_VARIANCE_FLOOR).float(), RunningNorm(3)
    loaded.load_state_dict(norm.state_dict())
    assert float(loaded.floor) == pytest.approx(GARDEN_VARIANCE_FLOOR)
    states = torch.randn(5, 3)
    torch.testing.assert_close(loaded(states), norm(states))
    space = HEADS.resolve(catalogue_of())
    networks = [
        FactoredRecurrentActorCritic(space, state_dim=3, lstm_hidden_dim=8) for _ in range(2)
    ]
    networks[0].observation_norm.set_variance_floor(GARDEN_VARIANCE_FLOOR)
    networks[1].load_state_dict(networks[0].state_dict())
    assert float(networks[1].observation_norm.floor) == GARDEN_VARIANCE_FLOOR
    assert "observation_norm.floor" not in dict(networks[1].named_parameters())


# --- scale and shift are derived from the statistics --------------------------------------------


def reference_output(norm: RunningNorm, states: Tensor) -> Tensor:
    """Compute the normalised states [N, F] from the statistics, in float64."""
    deviation = norm.variance.double().clamp(min=float(norm.floor)).sqrt()
    return ((states.double() - norm.mean) / deviation).clamp(-CLIP, CLIP)


def changed_statistics(norm: RunningNorm) -> dict[str, Tensor]:
    return norm.state_dict() | {"mean": norm.mean + 2, "variance": norm.variance * 3}


def load(norm: RunningNorm) -> RunningNorm:
    norm.load_state_dict(changed_statistics(norm))
    return norm


def load_assigned(norm: RunningNorm) -> RunningNorm:
    norm.load_state_dict(changed_statistics(norm), assign=True)
    return norm


def load_as_part_of_a_module(norm: RunningNorm) -> RunningNorm:
    state = {f"0.{name}": tensor for name, tensor in changed_statistics(norm).items()}
    torch.nn.Sequential(norm).load_state_dict(state)
    return norm


def raise_floor(norm: RunningNorm) -> RunningNorm:
    norm.set_variance_floor(9.0)
    return norm


def observe_in_inference_mode(norm: RunningNorm) -> RunningNorm:
    with torch.inference_mode():
        norm(torch.zeros(1, 3))
        norm.observe(7 + torch.randn(50, 3))
    return norm


def to_double(norm: RunningNorm) -> RunningNorm:
    return norm.double()


def to_device(norm: RunningNorm) -> RunningNorm:
    return norm.to("cpu:0")


def save_and_load_module(norm: RunningNorm) -> RunningNorm:
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    loaded: RunningNorm = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "change",
    [
        load,
        load_assigned,
        load_as_part_of_a_module,
        raise_floor,
        observe_in_inference_mode,
        to_double,
        to_device,
        copy.deepcopy,
        copy.copy,
        save_and_load_module,
    ],
    ids=lambda change: change.__name__,
)
def test_changed_statistics_are_used_at_once(
    change: Callable[[RunningNorm], RunningNorm],
) -> None:
    generator = torch.Generator().manual_seed(1)
    norm = RunningNorm(3)

    def random_states() -> Tensor:
        return 4 * torch.randn(50, 3, generator=generator) + 1

    def check_outputs() -> None:
        states = random_states().requires_grad_()
        expected = reference_output(norm, states.detach())
        torch.testing.assert_close(norm(states).double(), expected, atol=1e-5, rtol=1e-5)
        norm(states).sum().backward()

    for _ in range(3):
        norm.observe(random_states())
        check_outputs()
        norm = change(norm)
        check_outputs()


def test_deep_copy_has_its_own_statistics() -> None:
    norm, states = make_norm(), torch.randn(5, 3)
    before = norm(states)
    copied = copy.deepcopy(norm)
    copied.observe(10 + torch.randn(400, 3))
    copied.set_variance_floor(4.0)
    expected = reference_output(copied, states).float()
    torch.testing.assert_close(copied(states), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(norm(states), before)


def test_derived_buffers_are_not_saved() -> None:
    assert set(RunningNorm(3).state_dict()) == {"mean", "variance", "count", "floor"}


def test_norm_made_in_inference_mode_is_usable_outside() -> None:
    with torch.inference_mode():
        norm = RunningNorm(2)
        norm.observe(torch.tensor([[1.0, 2.0], [3.0, 8.0]]))
    with torch.no_grad():
        normalised = norm(torch.tensor([[2.0, 5.0]]))
    assert normalised[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
