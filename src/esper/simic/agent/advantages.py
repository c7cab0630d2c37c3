"""Advantages: how much better than expected it went, in time and for each head.

Shapes: `E` environments, `T` time, `B` batch.
"""

import torch
from torch import Tensor

from esper.leyline import HEADS, ActionSpace, AgreementError, HeadTable, PerHead, PerHeadAdvantages
from esper.leyline.legality import relevance_table
from esper.simic.agent.processes import ALONE, Processes


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    terminals: Tensor,
    truncations: Tensor,
    bootstraps: Tensor,
    last_values: Tensor,
    counts: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimates [E, T]; 0 beyond an environment's count of steps.

    What follows a step is worth nothing where it was terminal, its own `bootstraps` [E, T] where
    it was truncated, `last_values` [E] after an environment's last step, and otherwise the value
    of the next step. Estimates never look past the end of an episode.

    The recurrence a[t] = d[t] + k[t] * a[t + 1] is solved by doubling: after round i a step has
    summed the 2^i steps from itself on. Log2(T) rounds of whole-tensor operations, time first.
    """
    T = rewards.shape[1]
    time = torch.arange(T, device=rewards.device)
    last = time == (counts - 1).to(time.device)[:, None]  # [E, T]
    following = torch.cat((values[:, 1:], last_values[:, None]), 1)
    following = torch.where(last, last_values[:, None], following)
    following = torch.where(truncations, bootstraps, following).masked_fill(terminals, 0.0)
    beyond = time >= counts.to(time.device)[:, None]
    delta = (rewards - values).add_(following, alpha=gamma).masked_fill(beyond, 0.0)
    ended = terminals | truncations | last | beyond

    total = delta.t().contiguous()  # [T, E]
    factor = torch.where(ended.t(), 0.0, gamma * gae_lambda).to(total.dtype)
    reach = 1
    while reach < T:
        # The sums on the right are all from the round before, so they are not added in place.
        total[:-reach] = torch.addcmul(total[:-reach], factor[:-reach], total[reach:])
        factor[:-reach] = factor[:-reach] * factor[reach:]
        reach *= 2
    return total.t()


def compute_per_head_advantages(
    base: Tensor, op_actions: Tensor, space: ActionSpace | HeadTable = HEADS
) -> PerHeadAdvantages:
    """For each head the advantages [B] or [B, T] of the steps in which it mattered, else 0.

    A head matters for the ops that its row in the table names; `op_actions` has the shape of
    `base` and holds the ops that were chosen.
    """
    if base.shape != op_actions.shape or base.ndim not in (1, 2):
        raise AgreementError(
            "Every advantage needs the op that was chosen",
            given=f"advantages {list(base.shape)}, ops {list(op_actions.shape)}",
            valid="the same shape for both, [batch] or [batch, time]",
        )
    matters = relevance_table(space.relevance, base.device)[op_actions]
    parts = torch.where(matters, base[..., None], 0.0).unbind(-1)
    return PerHead(space.names, dict(zip(space.names, parts, strict=True)))


def mattered(space: ActionSpace, actions: Tensor, masks: Tensor, valid: Tensor) -> Tensor:
    """[..., H] bool: steps taken in which the head was relevant and had a choice at all.

    `actions` [..., H], resolved `masks` [..., H, A], `valid` [...].
    """
    relevant = relevance_table(space.relevance, actions.device)[actions[..., 0]]
    return relevant & (masks.sum(-1) > 1) & valid[..., None]


def normalised(advantages: Tensor, valid: Tensor, processes: Processes = ALONE) -> Tensor:
    """Mean 0 and standard deviation 1 over the valid steps; 0 elsewhere, and where all are equal.

    In float64, so that equal numbers have a spread of 0 and not of rounding errors.
    """
    wide = advantages.double().masked_fill(~valid, 0.0)
    total = processes.sum_(torch.stack((wide.sum(), valid.sum().double())))
    count = total[1].clamp(min=1)
    centred = (wide - total[0] / count).masked_fill(~valid, 0.0)
    spread = (processes.sum_(centred.square().sum()) / count).sqrt()
    return (centred / (spread + 1e-8)).to(advantages.dtype)
