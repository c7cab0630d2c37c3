"""Data that the parts of the learner exchange.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `A` actions of the largest head,
`L` layers, `D` hidden size, `R` sequences of a batch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.leyline.results import (
    HeadGradientNorms,
    HeadUpdateMetrics,
    Outcome,
    PerHead,
    PerHeadAdvantages,
    PPOUpdateMetrics,
)
from esper.tamiyo.sequences import Hidden

CHECKPOINT_VERSION = 4  # of saved agents; `ppo.load` reads versions 3 and 4

ActionDict = dict[str, Tensor]  # actions by head, [...] int64
HeadLogProbs = PerHead[Tensor]  # log-probabilities by head
HeadEntropies = PerHead[Tensor]  # entropies by head

__all__ = [
    "CHECKPOINT_VERSION",
    "ActionDict",
    "Decision",
    "HeadEntropies",
    "HeadGradientNorms",
    "HeadLogProbs",
    "HeadUpdateMetrics",
    "Outcome",
    "PPOUpdateMetrics",
    "PerHeadAdvantages",
    "SequenceBatch",
]


@dataclass(frozen=True)
class Decision:
    """The actions that an agent chose for all environments, with everything stored for learning."""

    states: Tensor  # [E, F]
    actions: Tensor  # [E, H] int64
    masks: Tensor  # [E, H, A] bool, resolved
    log_probs: Tensor  # [E, H]
    values: Tensor  # [E]
    hidden: Hidden  # entering the step, [L, E, D] each
    # With which the entropies count; None if every head is relevant for every op.
    entropy_masks: Tensor | None = None  # [E, H, A] bool
    entropy_conditions: Tensor | None = None  # [E, H] int64, earlier choices of these masks

    def mask_irrelevant_heads(self, relevant: Tensor) -> "Decision":
        """Return the decision as if some heads had had a single legal action.

        Nothing is learned from these heads, as from a head that is irrelevant by the head table.

        Args:
            relevant: Heads that mattered in this step, [E, H] bool.
        """
        chosen_only = torch.zeros_like(self.masks).scatter_(-1, self.actions[..., None], True)
        masks = torch.where(relevant[..., None], self.masks, chosen_only)
        log_probs = self.log_probs.masked_fill(~relevant, 0.0)
        return replace(self, masks=masks, log_probs=log_probs)


@dataclass(frozen=True)
class SequenceBatch:
    """Whole sequences of experience; padding has zero states and action 0, and is not `valid`."""

    states: Tensor  # [R, T, F]
    actions: Tensor  # [R, T, H] int64
    action_masks: Tensor  # [R, T, H, A] bool, resolved
    log_probs: Tensor  # [R, T, H], of the rollout
    values: Tensor  # [R, T]
    advantages: Tensor  # [R, T]
    returns: Tensor  # [R, T]
    valid: Tensor  # [R, T] bool
    head_mask: Tensor  # [R, T, H] bool: the head was relevant and had a choice
    entropy_mask: Tensor  # [R, T, H] bool: a legal op made the head relevant, with a choice
    starts: Tensor  # [R, T] bool, on the CPU: it determines the shape of the computation
    initial_hidden_h: Tensor  # [L, R, D], entering the first step
    initial_hidden_c: Tensor  # [L, R, D]
    # With which the entropies count; None if every head is relevant for every op.
    entropy_masks: Tensor | None = None  # [R, T, H, A] bool
    entropy_conditions: Tensor | None = None  # [R, T, H] int64, earlier choices of these masks

    @property
    def initial_hidden(self) -> Hidden:
        """Hidden state that enters the first step."""
        return self.initial_hidden_h, self.initial_hidden_c

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.valid)

    def select(self, rows: Tensor) -> "SequenceBatch":
        """Return the sequences with these row numbers [K]; `rows` is on the CPU."""
        if len(rows) == 1:
            return self._select_one(int(rows[0]))
        index = rows.to(self.states.device, non_blocking=True)
        parts = {}
        for name, tensor in vars(self).items():
            if tensor is None:
                continue
            if name == "starts":
                parts[name] = tensor[rows]
            else:
                parts[name] = tensor.index_select(_row_dimension(name), index)
        return SequenceBatch(**parts)

    def _select_one(self, row: int) -> "SequenceBatch":
        """Return one sequence without a copy."""
        return SequenceBatch(
            **{
                name: tensor.narrow(_row_dimension(name), row, 1)
                for name, tensor in vars(self).items()
                if tensor is not None
            }
        )

    def split(self, parts: int) -> "list[SequenceBatch]":
        """Split the batch into at most `parts` parts of whole sequences."""
        parts = min(parts, len(self))
        if parts == 0:
            return []
        if parts == 1:
            return [self]
        return [self.select(rows) for rows in torch.arange(len(self)).tensor_split(parts)]


def _row_dimension(field: str) -> int:
    return 1 if field.startswith("initial_hidden") else 0
