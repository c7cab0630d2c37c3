"""The losses of one step of PPO, head by head, as sums that micro-batches can be added up from.

Shapes: `R` sequences, `T` time, `H` heads.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.constants import (
    DEFAULT_ENTROPY_TARGET,
    HEAD_COUNT_FLOOR,
    LOG_RATIO_CLAMP,
)
from esper.leyline.heads import ActionSpace
from esper.simic.agent.advantages import compute_per_head_advantages
from esper.simic.agent.types import PPOConfig, SequenceBatch
from esper.tamiyo.network import Evaluation


@dataclass(frozen=True)
class Shares:
    """What one step weighs in an average: one over the count of the *whole* batch.

    Taken before the batch is split, so that the result does not depend on the split.
    """

    head: Tensor  # [H] for the surrogate and the entropy of a head
    mattered: Tensor  # [H] for averages over the steps where the head mattered
    step: Tensor  # [] for averages over all steps


class Terms(NamedTuple):
    """Contributions of a (micro-)batch; those of its parts add up, extremes apart."""

    policy: Tensor  # [H]
    entropy: Tensor  # [H]
    kl: Tensor  # [H]
    clipped: Tensor  # [H]
    ratio: Tensor  # [H]
    value: Tensor  # []
    ratio_min: Tensor  # [H]
    ratio_max: Tensor  # [H]

    def plus(self, other: "Terms") -> "Terms":
        return Terms(
            policy=self.policy + other.policy,
            entropy=self.entropy + other.entropy,
            kl=self.kl + other.kl,
            clipped=self.clipped + other.clipped,
            ratio=self.ratio + other.ratio,
            value=self.value + other.value,
            ratio_min=torch.minimum(self.ratio_min, other.ratio_min),
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
        )


def mattered(space: ActionSpace, batch: SequenceBatch) -> Tensor:
    """[R, T, H] bool: steps taken in which the head was relevant and had a choice at all."""
    relevance = torch.tensor(space.relevance, device=batch.actions.device)
    relevant = relevance[batch.actions[..., 0]] & (batch.masks.sum(-1) > 1)
    return relevant & batch.valid[..., None]


def shares(matters: Tensor, valid: Tensor, config: PPOConfig) -> Shares:
    """Weights for a batch with these steps; a count has a floor, so a lone step weighs little."""
    steps = valid.sum().clamp(min=1)
    counts = matters.sum((0, 1))  # [H]
    floored = counts.clamp(min=1).maximum(steps * HEAD_COUNT_FLOOR)
    per_head = floored if config.head_average == "relevant" else steps.expand_as(counts)
    return Shares(1.0 / per_head, 1.0 / counts.clamp(min=1), 1.0 / steps)


def entropy_coefficients(
    entropies: Tensor, matters: Tensor, space: ActionSpace, config: PPOConfig
) -> Tensor:
    """[H]: the configured coefficient divided among the heads; 0 where a target is met.

    `entropies` are relative to the legal actions of each step, so a target of 0.3 asks for 30 %
    of what the real masks allow. Decided once an update, from all its steps.
    """
    mean = entropies.masked_fill(~matters, 0.0).sum((0, 1)) / matters.sum((0, 1)).clamp(min=1)
    targets = [config.entropy_targets.get(name, DEFAULT_ENTROPY_TARGET) for name in space.names]
    below = mean < torch.tensor(targets, device=mean.device)
    return below * (config.entropy_coef / len(space))


def ppo_terms(
    space: ActionSpace,
    batch: SequenceBatch,
    evaluation: Evaluation,
    share: Shares,
    return_scale: Tensor,
    config: PPOConfig,
) -> Terms:
    """Clipped surrogate and entropy of each head, value loss, and what is reported of them.

    `batch.log_probs` and `batch.values` are the reference from before the first step.
    """
    matters = mattered(space, batch)

    def summed(values: Tensor) -> Tensor:
        return values.masked_fill(~matters, 0.0).sum((0, 1))  # [H]

    log_ratio = (evaluation.log_probs - batch.log_probs).masked_fill(~matters, 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = log_ratio.exp()
    near = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    by_head = compute_per_head_advantages(batch.advantages, batch.actions[..., 0], space)
    advantages = torch.stack(list(by_head.values()), -1)
    surrogate = -torch.minimum(ratio * advantages, near * advantages)

    values, before = evaluation.values / return_scale, batch.values / return_scale
    targets = batch.returns / return_scale
    moved = before + (values - before).clamp(-config.value_clip, config.value_clip)
    squares = torch.maximum((values - targets).square(), (moved - targets).square())

    with torch.no_grad():
        kl = summed(ratio - 1 - log_ratio) * share.step
        clipped = summed((ratio != near).float()) * share.mattered
        mean = summed(ratio) * share.mattered
        low = torch.where(matters, ratio, 1.0).amin((0, 1))
        high = torch.where(matters, ratio, 1.0).amax((0, 1))
    return Terms(
        policy=summed(surrogate) * share.head,
        entropy=summed(evaluation.entropies) * share.head,
        kl=kl,
        clipped=clipped,
        ratio=mean,
        value=0.5 * squares.masked_fill(~batch.valid, 0.0).sum() * share.step,
        ratio_min=low,
        ratio_max=high,
    )


def total_loss(terms: Terms, entropy_coefs: Tensor, config: PPOConfig) -> Tensor:
    bonus = (entropy_coefs * terms.entropy).sum()
    return terms.policy.sum() + config.value_coef * terms.value - bonus
