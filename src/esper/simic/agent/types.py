"""What the learner's parts hand to each other.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `A` actions of the largest head,
`L` layers, `D` hidden size, `R` rows of a batch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.leyline.results import Outcome as Outcome
from esper.tamiyo.network import Hidden


@dataclass(frozen=True)
class Decision:
    """What an agent decided for all environments, and all that is kept of it for learning."""

    states: Tensor  # [E, F]
    actions: Tensor  # [E, H] int64
    masks: Tensor  # [E, H, A] bool, resolved
    log_probs: Tensor  # [E, H]
    values: Tensor  # [E]
    hidden: Hidden  # entering the step

    def credited(self, relevant: Tensor) -> "Decision":
        """As if heads that turned out not to matter, by `relevant` [E, H] bool, had had no other
        choice: nothing is learned from them, as from a head that the table says did not matter."""
        taken = torch.zeros_like(self.masks).scatter_(-1, self.actions[..., None], True)
        masks = torch.where(relevant[..., None], self.masks, taken)
        return replace(self, masks=masks, log_probs=self.log_probs.masked_fill(~relevant, 0.0))


@dataclass(frozen=True)
class SequenceBatch:
    """Whole sequences of experience. Padding is closed by `valid`: zero states, action 0."""

    states: Tensor  # [R, T, F]
    actions: Tensor  # [R, T, H]
    masks: Tensor  # [R, T, H, A]
    log_probs: Tensor  # [R, T, H], as they were during the rollout
    values: Tensor  # [R, T]
    advantages: Tensor  # [R, T]
    returns: Tensor  # [R, T]
    valid: Tensor  # [R, T] bool
    matters: Tensor  # [R, T, H] bool: the step was taken, the head was relevant and had a choice
    starts: Tensor  # [R, T] bool, always on the CPU: it decides the shape of the computation
    hidden: Hidden  # [L, R, D] each, entering the first step

    def rows(self, rows: Tensor) -> "SequenceBatch":
        """These sequences only; `rows` is on the CPU. A single one is not copied."""
        there = rows.to(self.states.device, non_blocking=True)
        first = int(rows[0]) if len(rows) == 1 else None

        def taken(tensor: Tensor, dim: int = 0) -> Tensor:
            if first is None:
                return tensor.index_select(dim, there)
            return tensor.narrow(dim, first, 1)

        parts = {name: taken(part) for name, part in vars(self).items() if name not in _APART}
        hidden = (taken(self.hidden[0], 1), taken(self.hidden[1], 1))
        return SequenceBatch(**parts, starts=self.starts[rows], hidden=hidden)


_APART = ("starts", "hidden")  # what is not a row of numbers for each sequence, on the device
