"""An LSTM over whole sequences in which episodes end and begin.

Shapes: `L` layers, `N` sequences, `T` time, `D` hidden size, `K` pieces between episode starts.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from esper.leyline.errors import AgreementError

# How much longer than a piece the longest beside it may be. Measured with 442 pieces of up to 130
# steps: with 2 it took 1.2 times as long as sequences without cuts, in one group of all 6.7 times,
# as a packed sequence 3.5 times.
MAX_PADDING = 2.0
WORTH_A_CALL = 64  # steps of padding that cost as much as one more call of the LSTM

Hidden = tuple[Tensor, Tensor]  # the LSTM's h and c, [L, N, D] each


def reset_hidden(hidden: Hidden, starts: Tensor) -> Hidden:
    """The state entering a step: zero in the rows [N] where that step begins an episode.

    Rollout and update both go through here. Replaced, not multiplied: what a failed environment
    left behind may be NaN.
    """
    fresh = starts.to(hidden[0].device, non_blocking=True)[None, :, None]
    h, c = (part.masked_fill(fresh, 0.0) for part in hidden)
    return h, c


def run_sequences(
    lstm: nn.LSTM, inputs: Tensor, hidden: Hidden, starts: Tensor | None = None
) -> Tensor:
    """Outputs [N, T, D] for inputs [N, T, D]; `starts` [N, T] bool marks resets.

    `starts` decides the shape of the computation and so belongs on the CPU. With no reset inside
    a sequence this is one call of the LSTM. Otherwise sequences are cut at the resets, and pieces
    of similar length run side by side, padded.
    """
    outputs: Tensor
    if starts is None:
        outputs = lstm(inputs, hidden)[0]
        return outputs
    if starts.dtype != torch.bool or starts.shape != inputs.shape[:2]:
        raise AgreementError(
            "Episode starts must have a boolean for each step",
            given=f"{starts.dtype} {list(starts.shape)}",
            valid=f"torch.bool {list(inputs.shape[:2])}",
        )
    starts = starts.cpu()
    hidden = reset_hidden(hidden, starts[:, 0])
    if not bool(starts[:, 1:].any()):
        outputs = lstm(inputs, hidden)[0]
        return outputs
    return _run_pieces(lstm, inputs, hidden, starts)


def _run_pieces(lstm: nn.LSTM, inputs: Tensor, hidden: Hidden, starts: Tensor) -> Tensor:
    N, T = starts.shape

    def there(index: Tensor) -> Tensor:
        return index.to(inputs.device, non_blocking=True)

    cuts = starts.clone()
    cuts[:, 0] = True  # every sequence begins a piece, with the state it carries
    owner, begin = cuts.nonzero(as_tuple=True)  # [K] in order of place
    place = owner * T + begin  # [K] in the steps of all sequences, one after the other
    lengths = torch.diff(place, append=torch.tensor([N * T]))  # [K]
    lengths, order = lengths.sort(descending=True, stable=True)

    steps = inputs.flatten(0, 1)  # [N * T, D]
    outputs, ran = [], 0
    back = torch.empty(N * T, dtype=torch.int64)  # where each step's output will stand
    for first, after in _similar(lengths.tolist()):
        group = order[first:after]
        time = torch.arange(int(lengths[first]))
        inside = time < lengths[first:after, None]  # [pieces, longest]
        source = place[group, None] + time
        owners = there(owner[group])
        h, c = (part.index_select(1, owners) for part in hidden)
        entering = reset_hidden((h, c), begin[group] > 0)
        filled = there(source.clamp(max=N * T - 1).flatten())
        padded = steps.index_select(0, filled).view(*source.shape, -1)  # [pieces, longest, D]
        outputs.append(lstm(padded, entering)[0].flatten(0, 1))
        back[source[inside]] = ran + inside.flatten().nonzero()[:, 0]
        ran += inside.numel()
    return torch.cat(outputs).index_select(0, there(back)).view(N, T, -1)


def _similar(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of lengths, longest first, in which none is much shorter than the first."""
    first = 0
    for index, length in enumerate(lengths):
        if length * MAX_PADDING >= lengths[first]:
            continue
        if lengths[first] * (len(lengths) - index) - sum(lengths[index:]) > WORTH_A_CALL:
            yield first, index
            first = index
    yield first, len(lengths)
