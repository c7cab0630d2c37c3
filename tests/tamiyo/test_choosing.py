"""The masked categorical distribution."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from esper.leyline import MASK_VALUE, ActionError
from esper.tamiyo import InvalidStateMachineError, MaskedCategorical

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_case(seed: int, rows: int = 32, actions: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, actions, generator=draw) < 0.5
    mask[torch.arange(rows), torch.randint(actions, (rows,), generator=draw)] = True
    return 3 * torch.randn(rows, actions, generator=draw), mask


@pytest.mark.slow
@given(st.integers(0, 10_000))
def test_it_is_the_plain_distribution_over_the_legal_actions(seed: int) -> None:
    logits, mask = random_case(seed)
    found = MaskedCategorical(logits, mask)
    for row in range(len(logits)):
        legal = mask[row].nonzero()[:, 0]
        plain = torch.distributions.Categorical(logits=logits[row, legal].double())
        for position, action in enumerate(legal):
            expected = plain.log_prob(torch.tensor(position)).float()
            torch.testing.assert_close(found.log_prob(action.expand(len(logits)))[row], expected)
        scale = math.log(len(legal)) if len(legal) > 1 else 1.0
        expected = (plain.entropy() / scale).float()
        torch.testing.assert_close(found.entropy()[row], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 3e4])
def test_nothing_is_nan_in_any_precision_whatever_the_logits(
    dtype: torch.dtype, size: float
) -> None:
    logits, mask = random_case(1)
    mask[0] = False
    mask[0, 2] = True
    leaf = (logits.sign() * size).to(dtype).requires_grad_()
    found = MaskedCategorical(leaf, mask)
    entropy = found.entropy()
    (entropy.sum() + found.log_prob(found.mode()).sum()).backward()
    assert entropy[0] == 0
    assert found.log_prob(found.mode())[0] == 0
    assert bool(((entropy >= -1e-6) & (entropy <= 1 + 1e-6)).all())
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    assert bool((leaf.grad[~mask] == 0).all())
    assert bool((found.probs[~mask] == 0).all())


@pytest.mark.parametrize("dtype", TYPES)
def test_the_mask_value_is_finite_in_every_precision(dtype: torch.dtype) -> None:
    assert bool(torch.tensor(MASK_VALUE, dtype=dtype).isfinite())


def test_equal_logits_have_entropy_one_whatever_the_mask() -> None:
    _, mask = random_case(2)
    entropy = MaskedCategorical(torch.zeros(mask.shape), mask).entropy()
    expected = (mask.sum(-1) > 1).float()
    torch.testing.assert_close(entropy, expected)


def test_samples_have_the_right_frequencies_and_are_never_illegal() -> None:
    logits, mask = random_case(3, rows=1)
    found = MaskedCategorical(logits, mask)
    many = MaskedCategorical(logits.expand(200_000, -1), mask.expand(200_000, -1))
    drawn = many.sample(torch.Generator().manual_seed(0))
    frequency = torch.bincount(drawn, minlength=mask.shape[1]) / len(drawn)
    torch.testing.assert_close(frequency, found.probs[0], atol=0.005, rtol=0)
    assert bool((frequency[~mask[0]] == 0).all())


def test_a_row_without_a_legal_action_is_refused_when_validating() -> None:
    logits, mask = random_case(4)
    mask[5] = False
    with pytest.raises(InvalidStateMachineError, match=r"No action is legal.*row \[5\]"):
        MaskedCategorical(logits, mask)
    assert bool(MaskedCategorical(logits, mask, validate=False).entropy().isfinite().all())


def test_a_mask_of_another_shape_or_type_is_refused_with_the_expected_one() -> None:
    logits, mask = random_case(5)
    with pytest.raises(ActionError, match=r"valid: torch.bool \[32, 7\]"):
        MaskedCategorical(logits, mask[:, :-1])
    with pytest.raises(ActionError, match=r"torch\.float32"):
        MaskedCategorical(logits, mask.float())


def test_without_validation_it_compiles_into_one_graph() -> None:
    logits, mask = random_case(6)

    def both(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = MaskedCategorical(logits, mask, validate=False)
        return found.entropy() + found.log_prob(found.mode())

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, mask), both(logits, mask))
