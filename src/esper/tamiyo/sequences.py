"""Running an LSTM over whole sequences in which episodes end and begin.

The hidden state is zero at the first step of an episode. `reset_hidden` is the only function that
resets it, in the rollout and in the update.

Shapes: `N` rows or sequences, `T` time, `D` hidden size, `L` layers, `K` segments. A *segment* is a
part of a sequence between two resets.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.leyline.slots import require_form

# Segments that run in one batch may differ in length by this factor. Measured with 442 segments of
# up to 130 steps: a factor of 2 took 1.2 times as long as sequences without resets, one batch of
# all segments 6.7 times, and a packed sequence 3.5 times.
MAX_LENGTH_RATIO = 2.0
MIN_PADDING_TO_SPLIT = 160  # steps of padding that cost as much as one more call of the LSTM
MAX_CACHED_STEPS = 4096  # batches of more steps are split anew each time

Hidden = tuple[Tensor, Tensor]  # h and c of an LSTM, [L, N, D] each


def reset_hidden(hidden: Hidden, starts: Tensor) -> Hidden:
    """Return the hidden state that enters a step: zero for rows that begin an episode.

    The state is replaced and not multiplied by 0, because the state of a failed environment may be
    NaN.

    Args:
        hidden: Hidden state after the step before, [L, N, D] each.
        starts: Rows whose step begins an episode, [N] bool, on any device.
    """
    is_start = starts.to(hidden[0].device, non_blocking=True)[None, :, None]
    return hidden[0].masked_fill(is_start, 0.0), hidden[1].masked_fill(is_start, 0.0)


def run_step(lstm: nn.Module, inputs: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
    """Run one time step.

    Args:
        lstm: An LSTM with `batch_first=True`.
        inputs: Inputs of the step, [N, D].
        hidden: Hidden state that enters the step.

    Returns:
        Outputs [N, D] and the hidden state after the step.
    """
    if isinstance(lstm, nn.LSTM) and lstm.num_layers == 1 and inputs.device.type == "cpu":
        # On the CPU, `nn.LSTM` reorders its weights in every call. A cell takes half the time.
        h, c = torch.lstm_cell(inputs, (hidden[0][0], hidden[1][0]), *lstm.all_weights[0])
        return h, (h[None], c[None])
    outputs, hidden_after = lstm(inputs[:, None], hidden)
    return outputs[:, 0], hidden_after


def run_sequences(
    lstm: nn.Module, inputs: Tensor, hidden: Hidden, starts: Tensor | None = None
) -> Tensor:
    """Run whole sequences, with the hidden state reset where an episode begins.

    Without a reset inside a sequence this is one call of the LSTM. Otherwise the sequences are
    split at the resets, and segments of similar length run as one padded batch.

    Args:
        lstm: An LSTM with `batch_first=True`.
        inputs: Inputs, [N, T, D].
        hidden: Hidden state that enters the first step, [L, N, D] each.
        starts: Steps that begin an episode, [N, T] bool. They determine the shape of the
            computation and therefore belong on the CPU.

    Returns:
        Outputs, [N, T, D].
    """
    if starts is not None:
        what = "Episode starts must have a boolean for each step"
        require_form(what, starts, inputs.shape[:2], torch.bool)
        starts = starts.cpu()
        hidden = reset_hidden(hidden, starts[:, 0])
        if bool(starts[:, 1:].any()):
            return _run_segments(lstm, inputs, hidden, starts)
    outputs: Tensor = lstm(inputs, hidden)[0]
    return outputs


class SegmentGroup(NamedTuple):
    """Segments of similar length that run as one padded batch."""

    sequence: Tensor  # [K] int64: the sequence of each segment
    is_reset: Tensor  # [K] bool: the segment begins an episode
    step: Tensor  # [K, longest] int64: index of every step among the N * T steps


class Segments(NamedTuple):
    """How sequences are split at resets."""

    groups: list[SegmentGroup]
    output_index: Tensor  # [N * T] int64: position of every step in the concatenated outputs


def _run_segments(lstm: nn.Module, inputs: Tensor, hidden: Hidden, starts: Tensor) -> Tensor:
    num_sequences, num_steps = starts.shape
    segments = split_at_resets(starts)
    flat_inputs = inputs.flatten(0, 1)  # [N * T, D]
    outputs = []
    for group in segments.groups:
        # A segment at the beginning of a sequence continues with the sequence's hidden state.
        sequence = group.sequence.to(inputs.device, non_blocking=True)
        h, c = hidden[0].index_select(1, sequence), hidden[1].index_select(1, sequence)
        entering = reset_hidden((h, c), group.is_reset)

        step = group.step.flatten().to(inputs.device, non_blocking=True)
        padded = flat_inputs.index_select(0, step).view(*group.step.shape, -1)
        outputs.append(lstm(padded, entering)[0].flatten(0, 1))
    joined = torch.cat(outputs)
    output_index = segments.output_index.to(inputs.device, non_blocking=True)
    return joined.index_select(0, output_index).view(num_sequences, num_steps, -1)


def split_at_resets(starts: Tensor) -> Segments:
    """Split sequences into segments and group segments of similar length.

    Args:
        starts: Steps that begin an episode, [N, T] bool on the CPU.
    """
    if starts.numel() > MAX_CACHED_STEPS or torch.compiler.is_compiling():
        return _split(starts.numpy())
    return _split_cached(starts.numpy().tobytes(), *starts.shape)


@lru_cache(maxsize=16)  # the same minibatches come again in every epoch of an update
def _split_cached(starts: bytes, num_sequences: int, num_steps: int) -> Segments:
    return _split(np.frombuffer(starts, bool).reshape(num_sequences, num_steps))


def _split(starts: NDArray[np.bool]) -> Segments:
    """Split with numpy, which is several times faster than torch for few numbers."""
    num_sequences, num_steps = starts.shape
    total = num_sequences * num_steps

    # Every sequence begins a segment, and so does every reset.
    is_first = starts.copy()
    is_first[:, 0] = True
    sequence, first_step = is_first.nonzero()  # [K], in order of position
    position = sequence * num_steps + first_step  # [K], among the N * T steps
    lengths = np.diff(position, append=total)  # [K]

    # Longest segments first, then groups of similar length.
    order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    groups = []
    num_outputs = 0
    output_index = np.empty(total, np.int64)
    for first, end in _group_by_length(lengths.tolist()):
        members = order[first:end]
        time = np.arange(lengths[first])
        is_step = time < lengths[first:end, None]  # [segments, longest]; False is padding
        step = position[members, None] + time
        output_index[step[is_step]] = num_outputs + np.flatnonzero(is_step)
        num_outputs += is_step.size
        groups.append(
            SegmentGroup(
                torch.from_numpy(sequence[members]),
                torch.from_numpy(first_step[members] > 0),
                torch.from_numpy(np.minimum(step, total - 1)),
            )
        )
    return Segments(groups, torch.from_numpy(output_index))


def _group_by_length(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of the descending lengths that run as one batch.

    A new group begins where a segment is much shorter than the first of its group and the padding
    that the split saves costs more than another call of the LSTM.
    """
    first = 0
    for index, length in enumerate(lengths):
        if length * MAX_LENGTH_RATIO >= lengths[first]:
            continue
        padding = lengths[first] * (len(lengths) - index) - sum(lengths[index:])
        if padding > MIN_PADDING_TO_SPLIT:
            yield first, index
            first = index
    yield first, len(lengths)
