"""An LSTM over whole sequences with resets, compared with a loop over steps.

Shapes: `N` sequences, `T` time, `D` hidden size, `L` layers.
"""

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from esper.leyline import DEFAULT_LSTM_HIDDEN_DIM, AgreementError
from esper.tamiyo import Hidden, reset_hidden, run_sequences
from esper.tamiyo.sequences import MAX_LENGTH_RATIO, run_step, split_at_resets

HIDDEN_DIM = DEFAULT_LSTM_HIDDEN_DIM // 8


def run_step_by_step(
    lstm: nn.LSTM, inputs: Tensor, hidden: Hidden, starts: Tensor
) -> tuple[Tensor, Hidden]:
    """Run an LSTM one step at a time, with the hidden state zeroed at starts [N, T]."""
    outputs = []
    for time in range(inputs.shape[1]):
        continues = (~starts[:, time]).float()[None, :, None]
        hidden = (hidden[0] * continues, hidden[1] * continues)
        output, hidden = lstm(inputs[:, time : time + 1], hidden)
        outputs.append(output)
    return torch.cat(outputs, 1), hidden


def random_hidden(rows: int, layers: int = 1) -> Hidden:
    return torch.randn(layers, rows, HIDDEN_DIM), torch.randn(layers, rows, HIDDEN_DIM)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 6),
    time=st.integers(1, 12),
    layers=st.integers(1, 2),
    reset_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_sequences_equal_a_loop_over_steps(
    rows: int, time: int, layers: int, reset_rate: float, seed: int
) -> None:
    torch.manual_seed(seed)
    lstm = nn.LSTM(HIDDEN_DIM, HIDDEN_DIM, layers, batch_first=True)
    inputs = torch.randn(rows, time, HIDDEN_DIM)
    hidden = random_hidden(rows, layers)
    starts = torch.rand(rows, time) < reset_rate
    expected, _ = run_step_by_step(lstm, inputs, hidden, starts)
    outputs = run_sequences(lstm, inputs, hidden, starts)
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=0)


def test_long_sequences_run_in_groups_of_similar_length() -> None:
    """Long enough that splitting into groups of segments saves time."""
    torch.manual_seed(0)
    lstm = nn.LSTM(HIDDEN_DIM, HIDDEN_DIM, batch_first=True)
    starts = torch.rand(8, 120) < 0.05
    groups = split_at_resets(starts).groups
    assert len(groups) > 1
    assert sum(len(group.sequence) for group in groups) == 8 + int(starts[:, 1:].sum())
    inputs, hidden = torch.randn(8, 120, HIDDEN_DIM), random_hidden(8)
    expected, _ = run_step_by_step(lstm, inputs, hidden, starts)
    outputs = run_sequences(lstm, inputs, hidden, starts)
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=0)
    longest = [group.step.shape[1] for group in groups]
    assert longest == sorted(longest, reverse=True)
    assert longest[1] * MAX_LENGTH_RATIO < longest[0]


def test_same_starts_in_another_shape_are_split_differently() -> None:
    """The cached split depends on the shape and not only on the flags."""
    torch.manual_seed(0)
    lstm = nn.LSTM(HIDDEN_DIM, HIDDEN_DIM, batch_first=True)
    flat_starts = torch.rand(24) < 0.3
    for rows in (1, 2, 3, 2, 1):
        starts, inputs = flat_starts.view(rows, -1), torch.randn(rows, 24 // rows, HIDDEN_DIM)
        hidden = random_hidden(rows)
        expected, _ = run_step_by_step(lstm, inputs, hidden, starts)
        outputs = run_sequences(lstm, inputs, hidden, starts)
        torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=0)


def test_gradients_with_resets_equal_those_of_the_loop() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(HIDDEN_DIM, HIDDEN_DIM, batch_first=True)
    hidden = random_hidden(4)
    starts = torch.rand(4, 9) < 0.3
    inputs = torch.randn(4, 9, HIDDEN_DIM)

    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaf = inputs.clone().requires_grad_()
        return torch.autograd.grad(run(leaf).square().sum(), [leaf, *lstm.parameters()])

    expected = gradients(lambda leaf: run_step_by_step(lstm, leaf, hidden, starts)[0])
    computed = gradients(lambda leaf: run_sequences(lstm, leaf, hidden, starts))
    for gradient, expected_gradient in zip(computed, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_single_step_equals_a_sequence_of_one(layers: int) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(HIDDEN_DIM, HIDDEN_DIM, layers, batch_first=True)
    inputs, hidden = torch.randn(3, HIDDEN_DIM), random_hidden(3, layers)
    outputs, hidden_after = run_step(lstm, inputs, hidden)
    expected, expected_hidden = lstm(inputs[:, None], hidden)
    torch.testing.assert_close(outputs, expected[:, 0], atol=1e-6, rtol=0)
    for part, expected_part in zip(hidden_after, expected_hidden, strict=True):
        torch.testing.assert_close(part, expected_part, atol=1e-6, rtol=0)


def test_nan_in_hidden_state_ends_with_the_episode() -> None:
    lstm = nn.LSTM(HIDDEN_DIM, HIDDEN_DIM, batch_first=True)
    nan = torch.full((1, 2, HIDDEN_DIM), math.nan)
    starts = torch.tensor([[True, False], [True, True]])
    outputs = run_sequences(lstm, torch.randn(2, 2, HIDDEN_DIM), (nan, nan), starts)
    assert bool(outputs.isfinite().all())
    h, c = reset_hidden((nan, nan), torch.tensor([True, False]))
    assert not bool(h[:, 0].any() | c[:, 0].any())
    assert bool(h[:, 1].isnan().all() & c[:, 1].isnan().all())


def test_starts_of_wrong_shape_raise() -> None:
    lstm = nn.LSTM(HIDDEN_DIM, HIDDEN_DIM, batch_first=True)
    starts = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(AgreementError, match=r"valid: torch.bool \[3, 2\]"):
        run_sequences(lstm, torch.zeros(3, 2, HIDDEN_DIM), random_hidden(3), starts)
