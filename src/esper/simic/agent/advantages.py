"""Generalised advantage estimation, and the advantages of each action head.

Shapes: `E` environments, `T` time, `B` batch, `H` heads, `A` actions of the largest head.
"""

import torch
from torch import Tensor

from esper.distributed import SINGLE_PROCESS, Processes
from esper.leyline import HEADS, ActionSpace, AgreementError, HeadTable, PerHead, PerHeadAdvantages
from esper.leyline.legality import relevance_table

__all__ = [
    "compute_gae",
    "compute_per_head_advantages",
    "normalize",
    "relevant_head_mask",
]

EPSILON = 1e-8  # avoids a division by zero where all advantages are equal


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    terminals: Tensor,
    truncations: Tensor,
    bootstrap_values: Tensor,
    last_values: Tensor,
    step_counts: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Estimate advantages (Schulman et al. 2016, eq. 16); they never cross episodes.

    The recurrence A[t] = δ[t] + k[t] A[t + 1] is solved by doubling. After round i, every step
    holds the sum over the 2^i steps that begin with itself. This takes log2(T) operations on whole
    tensors instead of T.

    Args:
        rewards: Rewards, [E, T].
        values: Values of the states, [E, T].
        terminals: Steps that end an episode, [E, T] bool. Nothing follows them.
        truncations: Steps after which an episode was cut off, [E, T] bool.
        bootstrap_values: Value of the state after each truncated step, [E, T].
        last_values: Value of the state after the last step of each environment, [E].
        step_counts: Number of steps of each environment, [E].
        gamma: Discount factor.
        gae_lambda: The λ of GAE.

    Returns:
        Advantages [E, T]; 0 after the last step of an environment.
    """
    num_steps = rewards.shape[1]
    step = torch.arange(num_steps, device=rewards.device)
    step_counts = step_counts.to(rewards.device)[:, None]
    is_last = step == step_counts - 1  # [E, T]
    is_padding = step >= step_counts

    # Value of the next state: 0 after a terminal, stored after a truncation.
    next_values = torch.cat((values[:, 1:], last_values[:, None]), dim=1)
    next_values = torch.where(is_last, last_values[:, None], next_values)
    next_values = torch.where(truncations, bootstrap_values, next_values)
    next_values = next_values.masked_fill(terminals, 0.0)

    # TD error: δ = r + γ V(s') − V(s).
    delta = (rewards - values).add_(next_values, alpha=gamma).masked_fill(is_padding, 0.0)

    # Solve the recurrence by doubling, time first.
    episode_ends = terminals | truncations | is_last | is_padding
    advantages = delta.t().contiguous()  # [T, E]
    factor = torch.where(episode_ends.t(), 0.0, gamma * gae_lambda).to(advantages.dtype)
    distance = 1
    while distance < num_steps:
        # Not in place: the sums on the right are those of the round before.
        advantages[:-distance] = torch.addcmul(
            advantages[:-distance], factor[:-distance], advantages[distance:]
        )
        factor[:-distance] = factor[:-distance] * factor[distance:]
        distance *= 2
    return advantages.t()


def compute_per_head_advantages(
    base_advantages: Tensor, op_actions: Tensor, space: ActionSpace | HeadTable = HEADS
) -> PerHeadAdvantages:
    """Return the advantages of each head: 0 in the steps in which the head was irrelevant.

    A head is relevant for the ops that the head table lists for it. An irrelevant head did not
    influence the outcome of a step and gets no credit for it.

    Args:
        base_advantages: Advantages, [B] or [B, T].
        op_actions: The ops that were chosen, int64, of the same shape and on the same device.
        space: The action space or head table.

    Returns:
        Advantages of the shape of `base_advantages`, by head name.

    Raises:
        AgreementError: The shapes differ, or they have another number of dimensions.
    """
    if base_advantages.shape != op_actions.shape or base_advantages.ndim not in (1, 2):
        raise AgreementError(
            "Every advantage needs the op that was chosen",
            given=f"advantages {list(base_advantages.shape)}, ops {list(op_actions.shape)}",
            valid="the same shape for both, [batch] or [batch, time]",
        )
    is_relevant = relevance_table(space.relevance, base_advantages.device)[op_actions]  # [..., H]
    head_advantages = torch.where(is_relevant, base_advantages[..., None], 0.0)
    by_head = dict(zip(space.names, head_advantages.unbind(-1), strict=True))
    return PerHead(space.names, by_head)


def relevant_head_mask(space: ActionSpace, actions: Tensor, masks: Tensor, valid: Tensor) -> Tensor:
    """Return the steps in which each head was relevant and had a choice.

    Args:
        space: The action space.
        actions: Actions, [..., H] int64.
        masks: Resolved masks, [..., H, A] bool.
        valid: Steps that were taken, [...] bool.

    Returns:
        Mask [..., H] bool.
    """
    is_relevant = relevance_table(space.relevance, actions.device)[actions[..., 0]]
    has_choice = masks.sum(-1) > 1
    return is_relevant & has_choice & valid[..., None]


def normalize(advantages: Tensor, valid: Tensor, processes: Processes = SINGLE_PROCESS) -> Tensor:
    """Normalise advantages to mean 0 and standard deviation 1 over the valid steps.

    The sums are in float64, so that equal advantages have standard deviation 0 and not a rounding
    error. Padding, and advantages that are all equal, become 0.

    Args:
        advantages: Advantages, [E, T].
        valid: Steps that were taken, [E, T] bool.
        processes: Processes whose steps are normalised together.
    """
    masked = advantages.double().masked_fill(~valid, 0.0)
    sums = processes.sum_(torch.stack((masked.sum(), valid.sum().double())))
    count = sums[1].clamp(min=1)
    centred = (masked - sums[0] / count).masked_fill(~valid, 0.0)
    variance = processes.sum_(centred.square().sum()) / count
    return (centred / (variance.sqrt() + EPSILON)).to(advantages.dtype)
