"""What a network over tokens prefers in decisions that were tried out.

Shapes: `D` decisions, `K` choices of one, waiting the first of them, `H` heads.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper.garden import LAYOUT
from esper.leyline import Legality, LifecycleOp
from esper.tamiyo import MaskedCategorical, stack_logits
from studies.greenhouse_gains import Gains, places_liked


class Preferences(NamedTuple):
    """What a network prefers in decisions that were tried out, without memory."""

    op: Tensor  # [D] how much rather it plants than waits
    scores: Tensor  # [D, K - 1] log-probs of each seed if it plants
    near: Tensor  # [D, K - 1] how likely each is beside the likeliest of all, 1 if it is that

    @classmethod
    def of(cls, logits: Mapping[str, Tensor], data: Gains) -> "Preferences":
        seeds = data.actions.shape[1] - 1
        actions = data.actions[:, 1:].flatten(0, 1)  # [D * (K - 1), H]
        rows = torch.arange(len(actions), device=actions.device) // seeds
        masks = Legality(LAYOUT.space, len(data.gains), data.masks).rows(rows).resolved(actions)
        logits_by_row = {head: table[rows] for head, table in logits.items()}
        head_logits = stack_logits(logits_by_row, LAYOUT.space, actions)
        chances = MaskedCategorical(head_logits, masks, False)
        found = chances.log_prob(actions)[:, 1:]
        with torch.no_grad():
            best = places_liked(logits, data.masks).flatten(1).amax(1, keepdim=True)
            blend = chances.probs[:, -1].amax(-1).log()  # the likeliest one's, of its place
            near = (found.sum(-1) - blend).view(-1, seeds).sub(best).exp()
        op = logits["op"][:, LifecycleOp.GERMINATE] - logits["op"][:, LifecycleOp.WAIT]
        return cls(op, found.sum(-1).view(-1, seeds), near)

    def liked(self, there: Tensor) -> Tensor:
        """[D, 1]: the likeliest of the seeds that are there [D, K - 1]."""
        return self.scores.masked_fill(~there, -torch.inf).argmax(1, keepdim=True)
