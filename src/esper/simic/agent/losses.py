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
from esper.simic.agent.advantages import credited
from esper.simic.agent.processes import ALONE, Processes
from esper.simic.agent.settings import PPOConfig
from esper.simic.agent.types import SequenceBatch
from esper.tamiyo.network import Evaluation


@dataclass(frozen=True)
class Shares:
    """What one step weighs in an average: one over the count of the *whole* batch.

    Taken over all processes and before the batch is split, so that the result depends on neither.
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

    @classmethod
    def nothing(cls, heads: int, device: torch.device) -> "Terms":
        """The contributions of no steps at all."""
        none, one = torch.zeros(heads, device=device), torch.ones(heads, device=device)
        return cls(none, none, none, none, none, none[0], one, one)

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


def step_counts(batch: SequenceBatch) -> Tensor:
    """[R, H + 1]: in how many steps of each sequence a head mattered; last, all its steps."""
    return torch.cat((batch.matters, batch.valid[..., None]), -1).sum(1)


def shares(step_counts: Tensor, config: PPOConfig) -> Shares:
    """Weights from the counts [H + 1] of a batch; a floor lets a lone step weigh little."""
    counts, steps = step_counts[:-1], step_counts[-1].clamp(min=1)
    floored = counts.clamp(min=1).maximum(steps * HEAD_COUNT_FLOOR)
    per_head = floored if config.head_average == "relevant" else steps.expand_as(counts)
    return Shares(1.0 / per_head, 1.0 / counts.clamp(min=1), 1.0 / steps)


def entropy_coefficients(
    entropies: Tensor,
    matters: Tensor,
    space: ActionSpace,
    config: PPOConfig,
    processes: Processes = ALONE,
) -> Tensor:
    """[H]: the configured coefficient divided among the heads; 0 where a target is met.

    `entropies` are relative to the legal actions of each step, so a target of 0.3 asks for 30 %
    of what the real masks allow. Decided once an update, from all its steps.
    """
    kept = torch.stack((entropies.masked_fill(~matters, 0.0), matters.to(entropies)))
    total = processes.sum_(kept.sum((1, 2)))  # [2, H]
    mean = total[0] / total[1].clamp(min=1)
    targets = [config.entropy_targets.get(name, DEFAULT_ENTROPY_TARGET) for name in space.names]
    below = mean < torch.tensor(targets).to(mean.device, non_blocking=True)
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
    closed = ~batch.matters
    log_ratio = (evaluation.log_probs - batch.log_probs).masked_fill(closed, 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = log_ratio.exp()
    near = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    advantages = credited(batch.advantages, batch.actions[..., 0], space)
    surrogate = -torch.minimum(ratio * advantages, near * advantages)

    values, before = evaluation.values / return_scale, batch.values / return_scale
    targets = batch.returns / return_scale
    moved = before + (values - before).clamp(-config.value_clip, config.value_clip)
    squares = torch.maximum((values - targets).square(), (moved - targets).square())

    with torch.no_grad():
        low, high = ratio.flatten(0, 1).aminmax(dim=0)  # 1 where the head did not matter
        observed = torch.stack((ratio - 1 - log_ratio, (ratio != near).float(), ratio))
        kl, clipped, mean = observed.masked_fill_(closed, 0.0).sum((1, 2)).unbind()
    learned = torch.stack((surrogate, evaluation.entropies)).masked_fill(closed, 0.0)
    policy, entropy = (learned.sum((1, 2)) * share.head).unbind()
    return Terms(
        policy=policy,
        entropy=entropy,
        kl=kl * share.step,
        clipped=clipped * share.mattered,
        ratio=mean * share.mattered,
        value=0.5 * squares.masked_fill(~batch.valid, 0.0).sum() * share.step,
        ratio_min=low,
        ratio_max=high,
    )


def total_loss(terms: Terms, entropy_coefs: Tensor, config: PPOConfig) -> Tensor:
    bonus = (entropy_coefs * terms.entropy).sum()
    return terms.policy.sum() + config.value_coef * terms.value - bonus
