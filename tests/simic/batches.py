"""Small batches of sequences for tests of the losses.

Shapes: `R` sequences, `T` time, `H` heads, `A` actions of the largest head.
"""

import torch
from torch import Tensor

from esper.leyline import CANONICAL_ACTION, ActionSpace
from esper.simic.agent import SequenceBatch
from esper.simic.agent.advantages import relevant_head_mask
from esper.simic.agent.losses import LossWeights, loss_weights
from esper.simic.agent.ppo_config import PPOConfig
from esper.tamiyo import Evaluation, MaskedCategorical


def make_batch(
    space: ActionSpace,
    actions: Tensor,
    action_masks: Tensor,
    advantages: Tensor,
    log_probs: Tensor | None = None,
) -> SequenceBatch:
    """Return a batch without padding, with zero states, values and returns."""
    shape = advantages.shape
    valid = torch.ones(shape, dtype=torch.bool)
    zeros = torch.zeros(shape)
    hidden = torch.zeros(1, len(advantages), 2)
    head_mask = relevant_head_mask(space, actions, action_masks, valid)
    return SequenceBatch(
        states=zeros[..., None],
        actions=actions,
        action_masks=action_masks,
        log_probs=torch.zeros(actions.shape) if log_probs is None else log_probs,
        values=zeros,
        advantages=advantages,
        returns=zeros,
        valid=valid,
        head_mask=head_mask,
        entropy_mask=head_mask,
        starts=torch.zeros(shape, dtype=torch.bool),
        initial_hidden_h=hidden,
        initial_hidden_c=hidden,
    )


def mask_of_sizes(space: ActionSpace) -> Tensor:
    """Return the mask in which only padding is closed, [H, A]."""
    return torch.arange(max(space.sizes)) < torch.tensor(space.sizes)[:, None]


def canonical_actions(space: ActionSpace, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions and resolved masks as acting stores them for these choices."""
    is_relevant = torch.tensor(space.relevance)[actions[..., 0]]
    only_canonical = torch.arange(max(space.sizes)) == CANONICAL_ACTION
    masks = torch.where(is_relevant[..., None], mask_of_sizes(space), only_canonical)
    return torch.where(is_relevant, actions, CANONICAL_ACTION), masks


def random_batch(
    space: ActionSpace, seed: int, rows: int = 6, time: int = 8
) -> tuple[SequenceBatch, Tensor]:
    """Return a batch of random actions, and the logits [R, T, H, A] of its log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    choices = [torch.randint(size, (rows, time), generator=generator) for size in space.sizes]
    actions, masks = canonical_actions(space, torch.stack(choices, -1))
    logits = torch.randn(rows, time, len(space), max(space.sizes), generator=generator)
    log_probs = MaskedCategorical(logits, masks).log_prob(actions)
    advantages = torch.randn(rows, time, generator=generator)
    return make_batch(space, actions, masks, advantages, log_probs), logits


def evaluate(logits: Tensor, batch: SequenceBatch) -> Evaluation:
    """Evaluate the actions of a batch under these logits."""
    distribution = MaskedCategorical(logits.expand(batch.action_masks.shape), batch.action_masks)
    log_probs = distribution.log_prob(batch.actions)
    return Evaluation(log_probs, distribution.entropy(), batch.values)


def head_advantages(batch: SequenceBatch) -> Tensor:
    """Return the advantages of every head, [R, T, H]."""
    return batch.advantages[..., None] * batch.head_mask


def weights_of(batch: SequenceBatch, config: PPOConfig) -> LossWeights:
    """Return the weights of a minibatch that is this batch."""
    head_counts = batch.head_mask.sum((0, 1))
    entropy_counts = batch.entropy_mask.sum((0, 1))
    counts = torch.cat((head_counts, entropy_counts, batch.valid.sum()[None]))
    return loss_weights(counts, config)
