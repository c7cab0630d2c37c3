"""Losses of PPO with one probability ratio per action head.

Shapes: `R` sequences, `T` time, `H` heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import constants
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.agent.types import SequenceBatch
from esper.tamiyo.recurrent import Evaluation


@dataclass(frozen=True)
class LossWeights:
    """Weight of one step in the means that the losses are.

    A mean is over the steps of the whole minibatch, in all micro-batches and all processes.
    """

    head: Tensor  # [H] surrogate of each head
    entropy: Tensor  # [H] entropy of each head
    step: Tensor  # [] averages over all steps


@dataclass(frozen=True)
class LossStats:
    """Detached sums over the steps of a (micro-)batch; sums of micro-batches are added."""

    policy_loss: Tensor  # [H] mean surrogate
    entropy_bonus: Tensor  # [H] mean entropy
    value_loss: Tensor  # []
    kl: Tensor  # [H] mean over all steps
    entropy: Tensor  # [H] sum over the steps in which a legal op made the head relevant
    clipped: Tensor  # [H] number of relevant steps with a clipped ratio
    ratio: Tensor  # [H] sum over the relevant steps
    ratio_min: Tensor  # [H]
    ratio_max: Tensor  # [H]

    @classmethod
    def zeros(cls, heads: int, device: torch.device) -> "LossStats":
        """Return the statistics of no steps: adding them to others changes nothing."""
        zero = torch.zeros(heads, device=device)
        infinite = torch.full((heads,), torch.inf, device=device)
        return cls(
            policy_loss=zero,
            entropy_bonus=zero,
            value_loss=zero.sum(),
            kl=zero,
            entropy=zero,
            clipped=zero,
            ratio=zero,
            ratio_min=infinite,
            ratio_max=-infinite,
        )

    def __add__(self, other: "LossStats") -> "LossStats":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        sums["ratio_min"] = torch.minimum(self.ratio_min, other.ratio_min)
        sums["ratio_max"] = torch.maximum(self.ratio_max, other.ratio_max)
        return LossStats(**sums)


def loss_weights(counts: Tensor, config: PPOConfig) -> LossWeights:
    """Return the weight of one step in each mean.

    Args:
        counts: Numbers of steps of the whole minibatch, [2 H + 1]: in which each head was relevant,
            in which a legal op made it relevant, and last all steps.
        config: Settings of the learner.
    """
    step_count = counts[-1].float().clamp(min=1)
    head_counts = counts[:-1].float()
    if config.head_average == "all":
        head_counts = step_count.expand_as(head_counts)
    else:
        # A lower bound on the count, so that a single relevant step does not get full weight.
        head_counts = head_counts.clamp(min=1).maximum(step_count * constants.HEAD_COUNT_FLOOR)
    head_weights, entropy_weights = (1.0 / head_counts).chunk(2)
    return LossWeights(head=head_weights, entropy=entropy_weights, step=1.0 / step_count)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_ratio: float) -> Tensor:
    """Return the negative clipped surrogate objective of every step.

    PPO-clip (Schulman et al. 2017, eq. 7): min(r A, clip(r, 1 − ε, 1 + ε) A).

    Args:
        ratio: Probability ratio of the new to the old policy, `r`.
        advantages: Advantages `A` of the same shape.
        clip_ratio: The clip range `ε`.
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages
    return -torch.minimum(unclipped, clipped)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float
) -> Tensor:
    """Return half the squared error of every value, with a bound on the change of the value.

    The larger of two errors counts: that of the value, and that of the value moved at most
    `value_clip` away from the old one.
    """
    error = values - returns
    clipped_values = old_values + (values - old_values).clamp(-value_clip, value_clip)
    clipped_error = clipped_values - returns
    return 0.5 * torch.maximum(error.square(), clipped_error.square())


def entropy_bonus(entropies: Tensor, weights: Tensor, coefficients: Tensor) -> Tensor:
    """Return the weighted sum of the mean entropies of the heads, [].

    Args:
        entropies: Entropy of every step and head, [R, T, H]; 0 where it does not count.
        weights: Weight of one step in the mean of each head, [H].
        coefficients: Entropy coefficient of each head, [H].
    """
    mean_entropies = entropies.sum((0, 1)) * weights
    return (coefficients * mean_entropies).sum()


def ppo_loss(
    batch: SequenceBatch,
    evaluation: Evaluation,
    head_advantages: Tensor,
    weights: LossWeights,
    entropy_coefs: Tensor,
    return_scale: Tensor,
    config: PPOConfig,
) -> tuple[Tensor, LossStats]:
    """Return the loss of a (micro-)batch and its statistics.

    Args:
        batch: Sequences, with the log-probabilities and values from before the first step.
        evaluation: Log-probabilities, entropies and values under the current weights.
        head_advantages: Advantages of every head, [R, T, H]; 0 where the head was irrelevant.
        weights: Weight of one step in each mean.
        entropy_coefs: Entropy coefficient of each head, [H].
        return_scale: Size of the returns, [], in which the value loss is measured.
        config: Settings of the learner.
    """
    head_mask = batch.head_mask

    # Probability ratio of each head; heads that were irrelevant in a step keep ratio 1.
    log_ratio = (evaluation.log_probs - batch.log_probs).masked_fill(~head_mask, 0.0)
    log_ratio = log_ratio.clamp(-constants.LOG_RATIO_CLAMP, constants.LOG_RATIO_CLAMP)
    ratio = log_ratio.exp()

    # Policy loss: for each head the mean over the steps in which the head was relevant.
    surrogate = clipped_surrogate(ratio, head_advantages, config.clip_ratio)
    policy_loss = surrogate.sum((0, 1)) * weights.head  # [H]

    # Value loss in units of the return scale: the mean over all valid steps.
    value_errors = clipped_value_loss(
        evaluation.values / return_scale,
        batch.values / return_scale,
        batch.returns / return_scale,
        config.value_clip,
    )
    value_loss = value_errors.masked_fill(~batch.valid, 0.0).sum() * weights.step

    # Entropy bonus: for each head the mean over the steps in which a legal op made it relevant.
    entropies = evaluation.entropies.masked_fill(~batch.entropy_mask, 0.0)
    bonus = entropy_bonus(entropies, weights.entropy, entropy_coefs)

    loss = policy_loss.sum() + config.value_coef * value_loss - bonus

    with torch.no_grad():
        # k3 estimator of the KL divergence (Schulman 2020): r − 1 − log r.
        kl = (ratio - 1 - log_ratio).sum((0, 1)) * weights.step
        is_clipped = (ratio - 1).abs() > config.clip_ratio
        entropy_sums = entropies.sum((0, 1))
        stats = LossStats(
            policy_loss=policy_loss.detach(),
            entropy_bonus=entropy_sums * weights.entropy,
            value_loss=value_loss.detach(),
            kl=kl,
            entropy=entropy_sums,
            clipped=is_clipped.sum((0, 1)).float(),
            ratio=ratio.masked_fill(~head_mask, 0.0).sum((0, 1)),
            ratio_min=ratio.amin((0, 1)),
            ratio_max=ratio.amax((0, 1)),
        )
    return loss, stats
