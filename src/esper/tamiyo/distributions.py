"""Masked categorical distributions and the factored choice of an action, head after head.

The op is drawn first. Every later head is drawn from the actions that are legal given the earlier
choices. A *resolved* mask holds the actions that a head could take in one step: padding is closed,
and a head that is irrelevant for the chosen op has only its canonical action. Such a head has
log-probability 0, entropy 0 and no gradient.

A network may also make the logits of a head depend on the earlier choices. The logits of such a
head are a table with one axis for each head in `ActionSpace.given`, as its masks are.

Shapes: `...` any batch shape, `N` rows, `H` heads, `A` actions of the largest head.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from esper.leyline import MASK_VALUE, ActionError, ActionSpace, AgreementError, EsperError, Legality
from esper.leyline.legality import relevance_table
from esper.leyline.slots import require_form

Logits = Mapping[str, Tensor]  # by head: [..., actions], or a table [..., earlier choices, actions]
EnvSlice = tuple[int, int]  # first environment of this process, number of all environments


class InvalidStateMachineError(EsperError):
    """A state in which an action head has no legal action."""


class MaskedCategorical:
    """Categorical distribution over the legal actions; illegal actions have probability 0.

    All arithmetic is in float32, for logits of any dtype. The largest legal logit is shifted to 0
    and illegal logits are replaced by a finite value, so that nothing overflows and no gradient is
    NaN.
    """

    def __init__(self, logits: Tensor, mask: Tensor, validate: bool = True) -> None:
        """Create the distribution.

        Args:
            logits: Unnormalised log-probabilities, [..., A].
            mask: Legal actions, [..., A] bool.
            validate: Raise an error for a row without a legal action. This reads the values of the
                mask, which breaks a compiled graph and waits for a GPU.

        Raises:
            ActionError: The mask has another shape or dtype.
            InvalidStateMachineError: A row has no legal action.
        """
        what = "A mask must have a boolean for each logit"
        require_form(what, mask, logits.shape, torch.bool, error=ActionError)
        if validate:
            _validate_action_mask(mask)
        self.mask = mask
        self._illegal = ~mask

        # Shift the largest legal logit to 0, then normalise over the legal actions.
        logits = logits.float()
        lowest = torch.finfo(logits.dtype).min
        peak = logits.detach().masked_fill(self._illegal, lowest).amax(-1, keepdim=True)  # [..., 1]
        shifted = (logits - peak).masked_fill(self._illegal, MASK_VALUE)
        self.log_probs = shifted.log_softmax(-1)  # [..., A]

    @property
    def probs(self) -> Tensor:
        """Probability of every action, [..., A]."""
        return self.log_probs.exp()

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return the log-probability [...] of the actions [...]."""
        return self.log_probs.gather(-1, actions[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropy divided by the log of the number of legal actions, [...].

        It is 1 for a uniform distribution over any mask, and exactly 0 for a single legal action.
        """
        num_legal = self.mask.sum(-1, dtype=torch.float32)  # [...]
        # Mask before the product: 0 times a large negative log-probability has a gradient.
        legal_log_probs = self.log_probs.masked_fill(self._illegal, 0.0)
        negative_entropy = (self.probs * legal_log_probs).sum(-1)
        return negative_entropy / -num_legal.clamp(min=2).log()

    def sample(
        self, generator: torch.Generator | None = None, env_slice: EnvSlice | None = None
    ) -> Tensor:
        """Draw actions [...] int64 by the Gumbel-max method; an illegal action is never drawn.

        Args:
            generator: Random generator on the device of the logits.
            env_slice: Position of these rows among the rows of all processes. Each row then gets
                the same random numbers as if one process drew for all rows.
        """
        first, total = env_slice or (0, len(self.log_probs))
        shape = (total, *self.log_probs.shape[1:])
        exponential = self.log_probs.new_empty(shape).exponential_(generator=generator)
        gumbel = -exponential[first : first + len(self.log_probs)].log()
        return self._argmax(self.log_probs + gumbel)

    def mode(self) -> Tensor:
        """Return the most probable legal action, [...] int64."""
        return self._argmax(self.log_probs)

    def _argmax(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self._illegal, -math.inf).argmax(-1)


def _validate_action_mask(mask: Tensor, head_names: Sequence[str] | None = None) -> None:
    """Raise an error if a row of the mask [..., A] has no legal action.

    Args:
        mask: Legal actions, [..., A] bool, or [..., H, A] with `head_names`.
        head_names: Names of the heads, if the last but one axis is the head.

    Raises:
        InvalidStateMachineError: Names the first row, and the head, without a legal action.
    """
    is_empty = ~mask.any(-1)
    if not bool(is_empty.any()):
        return
    index = is_empty.nonzero()[0].tolist()
    if head_names is None:
        problem, row = "No action is legal", f"row {index}"
    else:
        problem = f"Head {head_names[index[-1]]!r} has no legal action"
        row = f"row {index[:-1] or index}"
    raise InvalidStateMachineError(
        problem,
        given=f"{row}, the first of {int(is_empty.sum())} without one",
        valid="at least one legal action in every row",
        fix="leave an action that is always legal, such as WAIT",
    )


def independent_heads(sizes: Sequence[int]) -> ActionSpace:
    """Return an action space whose heads are always relevant and independent (`MultiDiscrete`)."""
    if not sizes:
        raise AgreementError("An action space needs at least one head", given=list(sizes))
    return ActionSpace(
        names=tuple(f"action{index}" for index in range(len(sizes))),
        sizes=tuple(int(size) for size in sizes),
        relevance=((True,) * len(sizes),) * int(sizes[0]),
        given=((),) * len(sizes),
    )


def condition_index(space: ActionSpace, head: str, actions: Tensor) -> Tensor:
    """Return the row of a head's logit table that belongs to the earlier choices.

    Args:
        space: The action space.
        head: Name of the head.
        actions: Choices of all heads, [..., H]; only the earlier ones are read.

    Returns:
        Index [...] int64 into the axes of the earlier choices, flattened to one.
    """
    index = torch.zeros_like(actions[..., 0])
    for earlier in space.given[space.index(head)]:
        index = index * space.size(earlier) + actions[..., space.index(earlier)]
    return index


def select_row(table: Tensor, index: Tensor) -> Tensor:
    """Return logits [..., size] from a table, at the flattened index [...] of the earlier choices.

    Logits that do not depend on earlier choices, [..., size], are returned as they are.
    """
    if table.ndim == index.ndim + 1:
        return table
    size = table.shape[-1]
    rows = table.reshape(*index.shape, -1, size)
    position = index[..., None, None].expand(*index.shape, 1, size)
    return rows.gather(-2, position).squeeze(-2)


def select_head_logits(logits: Logits, space: ActionSpace, head: str, actions: Tensor) -> Tensor:
    """Return the logits of one head [..., size of the head], given the choices [..., H]."""
    return select_row(logits[head], condition_index(space, head, actions))


def stack_logits(logits: Logits, space: ActionSpace, actions: Tensor) -> Tensor:
    """Stack the logits of all heads, given the choices [..., H]; padding has the mask value.

    Returns:
        Logits [..., H, A].
    """
    return _stack([select_head_logits(logits, space, head, actions) for head in space.names])


def stack_conditional_logits(logits: Logits, space: ActionSpace, conditions: Tensor) -> Tensor:
    """Stack the logits of all heads at given rows of their tables.

    Args:
        logits: Logits of every head.
        space: The action space.
        conditions: Flattened index of the earlier choices for each head, [..., H] int64.

    Returns:
        Logits [..., H, A]; padding has the mask value.
    """
    rows = zip(space.names, conditions.unbind(-1), strict=True)
    return _stack([select_row(logits[head], index) for head, index in rows])


def _stack(head_logits: list[Tensor]) -> Tensor:
    """Pad the logits of all heads to the largest head and stack them, [..., H, A]."""
    widest = max(logits.shape[-1] for logits in head_logits)
    padded = []
    for logits in head_logits:
        if logits.shape[-1] < widest:
            logits = pad(logits, (0, widest - logits.shape[-1]), value=MASK_VALUE)
        padded.append(logits)
    return torch.stack(padded, -2)


class SampledActions(NamedTuple):
    """One composite action for every row, with the masks and log-probabilities of its heads."""

    actions: Tensor  # [N, H] int64
    masks: Tensor  # [N, H, A] bool, resolved
    log_probs: Tensor  # [N, H] float32
    # See `entropy_masks_of`; None if they are not wanted or every head is relevant for every op.
    entropy_masks: Tensor | None  # [N, H, A] bool
    entropy_conditions: Tensor | None  # [N, H] int64


def sample_actions(
    logits: Logits,
    legality: Legality,
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    env_slice: EnvSlice | None = None,
    validate: bool = True,
    with_entropy_masks: bool = True,
) -> SampledActions:
    """Choose a composite action for every row, one head after the other.

    Args:
        logits: Logits of every head for `N` rows.
        legality: Legal actions of the same rows.
        greedy: Take the most probable action of every head instead of sampling.
        generator: Random generator on the device of the logits.
        env_slice: Position of the rows among those of all processes; see
            `MaskedCategorical.sample`.
        validate: Raise an error for a head without a legal action.
        with_entropy_masks: Return the masks of `entropy_masks_of`.

    Raises:
        InvalidStateMachineError: A head has no legal action.
    """
    space = legality.space
    device = logits[space.names[0]].device
    actions = torch.zeros(legality.hosts, len(space), dtype=torch.int64, device=device)
    masks = torch.zeros(
        legality.hosts, len(space), max(space.sizes), dtype=torch.bool, device=device
    )
    log_probs = torch.zeros(legality.hosts, len(space), device=device)
    for position, (head, size) in enumerate(zip(space.names, space.sizes, strict=True)):
        mask = legality.mask(head, actions)  # given the choices so far
        head_logits = select_head_logits(logits, space, head, actions)
        distribution = MaskedCategorical(head_logits, mask, validate=False)
        if greedy:
            choice = distribution.mode()
        else:
            choice = distribution.sample(generator, env_slice)
        actions[:, position] = choice
        masks[:, position, :size] = mask
        log_probs[:, position] = distribution.log_prob(choice)
    if validate and legality.masks:  # without masks every action is legal
        _validate_action_mask(masks, space.names)
    entropy_masks, entropy_conditions = None, None
    if with_entropy_masks and not space.is_always_relevant:
        entropy_masks, entropy_conditions = entropy_masks_of(
            logits, legality, actions, masks, generator=generator, env_slice=env_slice
        )
    return SampledActions(actions, masks, log_probs, entropy_masks, entropy_conditions)


def entropy_masks_of(
    logits: Logits,
    legality: Legality,
    actions: Tensor,
    masks: Tensor,
    *,
    generator: torch.Generator | None = None,
    env_slice: EnvSlice | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the masks with which the entropy of each head counts.

    A head whose op becomes rare would lose its entropy bonus and its gradient, and would never
    recover. Its entropy therefore counts in every step in which a legal op makes it relevant. If
    the head is irrelevant for the chosen op, its mask is the one that it would have for such an op:
    the legal op with the most relevant heads. Earlier heads are then sampled from the policy.

    Args:
        logits: Logits of every head for `N` rows.
        legality: Legal actions of the same rows.
        actions: Chosen actions, [N, H].
        masks: Resolved masks of the chosen actions, [N, H, A].
        generator: Random generator on the device of the logits.
        env_slice: Position of the rows among those of all processes.

    Returns:
        Masks [N, H, A], with a single legal action where the head cannot become relevant; and the
        flattened index of the earlier choices for each head, [N, H].
    """
    space = legality.space
    conditions = torch.stack([condition_index(space, head, actions) for head in space.names], -1)
    entropy_masks = masks.clone()
    relevance = relevance_table(space.relevance, actions.device)  # [ops, H]
    num_relevant = relevance.sum(1)  # [ops]
    is_legal_op = masks[:, 0, : space.sizes[0]]  # [N, ops]
    is_relevant = relevance[actions[:, 0]]  # [N, H]

    # Heads that are relevant for the same ops share one hypothetical choice.
    for heads in _heads_by_relevance(space):
        makes_relevant = relevance[:, heads[0]]  # [ops]
        usable = is_legal_op & makes_relevant
        op = torch.where(usable, num_relevant, -1).argmax(-1)  # [N]
        hypothetical = torch.zeros_like(actions)
        hypothetical[:, 0] = op
        for position in range(1, heads[-1] + 1):
            head, size = space.names[position], space.sizes[position]
            mask = legality.mask(head, hypothetical)
            index = condition_index(space, head, hypothetical)
            if position in heads:
                is_replaced = ~is_relevant[:, position] & usable.any(-1)
                old_mask = entropy_masks[:, position, :size]
                entropy_masks[:, position, :size] = torch.where(
                    is_replaced[:, None], mask, old_mask
                )
                conditions[:, position] = torch.where(is_replaced, index, conditions[:, position])
            if position < heads[-1]:
                head_logits = select_row(logits[head], index)
                distribution = MaskedCategorical(head_logits, mask, validate=False)
                hypothetical[:, position] = distribution.sample(generator, env_slice)
    return entropy_masks, conditions


@lru_cache
def _heads_by_relevance(space: ActionSpace) -> list[list[int]]:
    """Group the positions of the heads that some op makes irrelevant by the ops that use them."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for position in range(1, len(space)):
        ops = tuple(row[position] for row in space.relevance)
        if not all(ops):
            groups.setdefault(ops, []).append(position)
    return list(groups.values())
