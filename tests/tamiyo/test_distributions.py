"""Masked categorical distributions, and the choice of a composite action head after head.

Shapes: `N` rows, `H` heads, `A` actions of the largest head.
"""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from esper.leyline import MASK_VALUE, ActionError, AgreementError, Legality
from esper.tamiyo import (
    InvalidStateMachineError,
    MaskedCategorical,
    independent_heads,
    sample_actions,
    stack_logits,
)
from esper.tamiyo.distributions import Logits, _validate_action_mask, select_head_logits
from tests.tamiyo.spaces import esper_space, random_legality

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_logits_and_mask(seed: int, rows: int = 32, actions: int = 7) -> tuple[Tensor, Tensor]:
    """Return logits and a mask [rows, actions] with at least one legal action in each row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, actions, generator=generator) < 0.5
    mask[torch.arange(rows), torch.randint(actions, (rows,), generator=generator)] = True
    return 3 * torch.randn(rows, actions, generator=generator), mask


# --- MaskedCategorical --------------------------------------------------------------------------


@given(st.integers(0, 10_000))
def test_distribution_equals_categorical_over_legal_actions(seed: int) -> None:
    logits, mask = random_logits_and_mask(seed)
    distribution = MaskedCategorical(logits, mask)
    for row in range(len(logits)):
        legal_actions = mask[row].nonzero()[:, 0]
        reference = torch.distributions.Categorical(logits=logits[row, legal_actions].double())
        for position, action in enumerate(legal_actions):
            expected = reference.log_prob(torch.tensor(position)).float()
            log_prob = distribution.log_prob(action.expand(len(logits)))[row]
            torch.testing.assert_close(log_prob, expected)
        scale = math.log(len(legal_actions)) if len(legal_actions) > 1 else 1.0
        expected = (reference.entropy() / scale).float()
        entropy = distribution.entropy()[row]
        torch.testing.assert_close(entropy, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 3e4])
def test_nothing_is_nan_in_any_precision(dtype: torch.dtype, size: float) -> None:
    logits, mask = random_logits_and_mask(1)
    mask[0] = False
    mask[0, 2] = True
    leaf = (logits.sign() * size).to(dtype).requires_grad_()
    distribution = MaskedCategorical(leaf, mask)
    entropy = distribution.entropy()
    log_prob = distribution.log_prob(distribution.mode())
    (entropy.sum() + log_prob.sum()).backward()
    assert entropy[0] == 0
    assert log_prob[0] == 0
    assert bool(((entropy >= -1e-6) & (entropy <= 1 + 1e-6)).all())
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    assert bool((leaf.grad[~mask] == 0).all())
    assert bool((distribution.probs[~mask] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_value_is_finite_in_every_precision(dtype: torch.dtype) -> None:
    assert bool(torch.tensor(MASK_VALUE, dtype=dtype).isfinite())


def test_uniform_distribution_has_entropy_one_for_any_mask() -> None:
    _, mask = random_logits_and_mask(2)
    entropy = MaskedCategorical(torch.zeros(mask.shape), mask).entropy()
    expected = (mask.sum(-1) > 1).float()
    torch.testing.assert_close(entropy, expected)


def test_samples_have_their_probabilities_and_are_legal() -> None:
    logits, mask = random_logits_and_mask(3, rows=1)
    distribution = MaskedCategorical(logits, mask)
    repeated = MaskedCategorical(logits.expand(200_000, -1), mask.expand(200_000, -1))
    samples = repeated.sample(torch.Generator().manual_seed(0))
    frequency = torch.bincount(samples, minlength=mask.shape[1]) / len(samples)
    torch.testing.assert_close(frequency, distribution.probs[0], atol=0.005, rtol=0)
    assert bool((frequency[~mask[0]] == 0).all())


def test_samples_of_an_env_slice_equal_those_of_all_rows() -> None:
    logits, mask = random_logits_and_mask(7)
    samples = MaskedCategorical(logits, mask).sample(torch.Generator().manual_seed(1))
    for first, end in ((0, 5), (5, 6), (6, 32)):
        distribution = MaskedCategorical(logits[first:end], mask[first:end])
        part = distribution.sample(torch.Generator().manual_seed(1), env_slice=(first, 32))
        assert torch.equal(part, samples[first:end])


def test_row_without_legal_action_raises_when_validating() -> None:
    logits, mask = random_logits_and_mask(4)
    mask[5] = False
    with pytest.raises(InvalidStateMachineError, match=r"No action is legal.*row \[5\]"):
        MaskedCategorical(logits, mask)
    assert bool(MaskedCategorical(logits, mask, validate=False).entropy().isfinite().all())


def test_validation_names_head_and_row() -> None:
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    _validate_action_mask(mask, ("op", "slot", "blend"))
    mask[1, 2] = False
    with pytest.raises(InvalidStateMachineError, match=r"Head 'blend' .*row \[1\], the first of 1"):
        _validate_action_mask(mask, ("op", "slot", "blend"))


def test_mask_of_wrong_shape_or_dtype_raises() -> None:
    logits, mask = random_logits_and_mask(5)
    with pytest.raises(ActionError, match=r"valid: torch.bool \[32, 7\]"):
        MaskedCategorical(logits, mask[:, :-1])
    with pytest.raises(ActionError, match=r"torch\.float32"):
        MaskedCategorical(logits, mask.float())


def test_distribution_without_validation_compiles_into_one_graph() -> None:
    logits, mask = random_logits_and_mask(6)

    def entropy_and_log_prob(logits: Tensor, mask: Tensor) -> Tensor:
        distribution = MaskedCategorical(logits, mask, validate=False)
        return distribution.entropy() + distribution.log_prob(distribution.mode())

    compiled = torch.compile(entropy_and_log_prob, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, mask), entropy_and_log_prob(logits, mask))


# --- composite actions --------------------------------------------------------------------------


def random_tables(rows: int, generator: torch.Generator) -> Logits:
    """Return logits for 2 slots and 3 blueprints in which heads depend on earlier choices."""
    shapes = {"op": (5,), "slot": (5, 2), "blueprint": (2, 3), "blend": (2, 3, 3)}
    return {name: torch.randn(rows, *shape, generator=generator) for name, shape in shapes.items()}


def test_head_is_chosen_from_logits_given_earlier_choices() -> None:
    space = esper_space(2, 3)
    generator = torch.Generator().manual_seed(0)
    tables = random_tables(4, generator)
    legality = random_legality(space, 4, generator)
    sampled = sample_actions(tables, legality, generator=generator)
    logits = stack_logits(tables, space, sampled.actions)
    for row, (op, slot, blueprint, _) in enumerate(sampled.actions.tolist()):
        assert torch.equal(logits[row, 0], tables["op"][row])
        assert torch.equal(logits[row, 1, :2], tables["slot"][row, op])
        assert torch.equal(logits[row, 2, :3], tables["blueprint"][row, slot])
        assert torch.equal(logits[row, 3, :3], tables["blend"][row, slot, blueprint])
        assert bool((logits[row, 1, 2:] == MASK_VALUE).all())
        for index, name in enumerate(space.names):
            head_logits = select_head_logits(tables, space, name, sampled.actions)
            assert torch.equal(head_logits[row], logits[row, index, : space.size(name)])
    assert torch.equal(sampled.masks, legality.resolved(sampled.actions))
    expected = MaskedCategorical(logits, sampled.masks).log_prob(sampled.actions)
    torch.testing.assert_close(sampled.log_probs, expected)


def test_greedy_choice_is_the_most_probable_of_each_head() -> None:
    space = esper_space(2, 3)
    generator = torch.Generator().manual_seed(0)
    tables = random_tables(4, generator)
    legality = random_legality(space, 4, generator)
    actions = sample_actions(tables, legality, greedy=True).actions
    masks = legality.resolved(actions)
    logits = stack_logits(tables, space, actions)
    for row, head in itertools.product(range(4), range(4)):
        legal_logits = logits[row, head].masked_fill(~masks[row, head], -torch.inf)
        assert int(legal_logits.argmax()) == int(actions[row, head])


@pytest.mark.parametrize(("greedy", "method"), [(False, "sample"), (True, "mode")])
def test_actions_are_drawn_by_the_distribution(
    greedy: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sample_actions` does not sample by itself."""
    space = independent_heads((3, 4, 2))
    logits = {
        name: torch.zeros(2, size) for name, size in zip(space.names, space.sizes, strict=True)
    }
    legality = Legality(space, 2, {})
    calls: list[tuple[int, ...]] = []

    def return_last_action(distribution: MaskedCategorical, *_: object) -> Tensor:
        calls.append(tuple(distribution.log_probs.shape))
        return torch.full((2,), distribution.log_probs.shape[-1] - 1)

    def fail(distribution: MaskedCategorical, *_: object) -> Tensor:
        raise AssertionError("the other method was called")

    monkeypatch.setattr(MaskedCategorical, "sample", fail)
    monkeypatch.setattr(MaskedCategorical, "mode", fail)
    monkeypatch.setattr(MaskedCategorical, method, return_last_action)
    sampled = sample_actions(logits, legality, greedy=greedy)
    assert calls == [(2, 3), (2, 4), (2, 2)]
    assert sampled.actions.tolist() == [[2, 3, 1]] * 2


def test_sampled_actions_have_their_joint_probabilities() -> None:
    """Frequencies of composite actions equal the product of the heads' probabilities."""
    space = esper_space(2, 2)
    generator = torch.Generator().manual_seed(1)
    rows = 100_000
    logits = {
        name: torch.randn(size, generator=generator).expand(rows, -1)
        for name, size in zip(space.names, space.sizes, strict=True)
    }
    single_legality = random_legality(space, 1, generator)
    masks = {
        name: mask.expand(rows, *mask.shape[1:]) for name, mask in single_legality.masks.items()
    }
    sampled = sample_actions(logits, Legality(space, rows, masks), generator=generator)
    composites, inverse, counts = sampled.actions.unique(
        dim=0, return_inverse=True, return_counts=True
    )
    probability = sampled.log_probs.sum(-1).exp()
    for index in range(len(composites)):
        expected = float(probability[inverse == index][0])
        assert float(counts[index]) / rows == pytest.approx(expected, abs=0.008)


def test_action_space_without_heads_raises() -> None:
    with pytest.raises(AgreementError, match="at least one head"):
        independent_heads(())
