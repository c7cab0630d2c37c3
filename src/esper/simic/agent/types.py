"""What the learner's parts hand to each other.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `A` actions of the largest head,
`L` layers, `D` hidden size, `R` rows of a batch.
"""

from dataclasses import dataclass, fields, replace

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
        """These sequences only; `rows` is on the CPU."""
        there = rows.to(self.states.device, non_blocking=True)
        names = [each.name for each in fields(self) if each.name not in ("starts", "hidden")]
        return SequenceBatch(
            **{name: getattr(self, name).index_select(0, there) for name in names},
            starts=self.starts[rows],
            hidden=(self.hidden[0].index_select(1, there), self.hidden[1].index_select(1, there)),
        )
