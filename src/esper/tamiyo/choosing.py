"""How a composite action is chosen: head after head, each open to what the earlier ones allow.

All heads live on one axis, padded to the largest: logits and masks are [N, H, A]. A resolved
mask says what a head could take *in that step*: padding is closed, and a head that did not matter
for the chosen op has its canonical action only, hence log-prob 0, entropy 0 and no gradient.

Shapes: `N` rows, `H` heads, `A` actions of the largest head.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.errors import AgreementError
from esper.leyline.heads import ActionSpace
from esper.leyline.legality import Legality
from esper.tamiyo.distributions import MaskedCategorical, gumbel, most_likely, require_choice


class Choice(NamedTuple):
    """What was chosen, among what, and how probable each head's choice was."""

    actions: Tensor  # [N, H] int64
    masks: Tensor  # [N, H, A] bool, resolved
    log_probs: Tensor  # [N, H] float32


def independent_heads(sizes: Sequence[int]) -> ActionSpace:
    """A space whose heads always matter and do not condition each other (`MultiDiscrete`)."""
    if not sizes:
        raise AgreementError("An action space needs at least one head", given=list(sizes))
    return ActionSpace(
        names=tuple(f"action{index}" for index in range(len(sizes))),
        sizes=tuple(int(size) for size in sizes),
        relevance=((True,) * len(sizes),) * int(sizes[0]),
        given=((),) * len(sizes),
    )


@lru_cache
def padded_sizes(space: ActionSpace, device: torch.device) -> Tensor:
    """[H, A] bool: which places of the padded axis are actions at all."""
    places = torch.arange(max(space.sizes), device=device)
    return places < torch.tensor(space.sizes, device=device)[:, None]


def choose(
    logits: Tensor,
    legality: Legality,
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    validate: bool = True,
) -> Choice:
    """Draw a composite action for each row of logits [N, H, A], or take the likeliest."""
    scores = logits.float()
    if not greedy:
        scores = scores + gumbel(scores, generator)
    if _is_independent(legality.space):
        masks = _stacked_masks(logits, legality)
        actions = most_likely(scores, masks)
    else:
        actions, masks = _choose_in_order(scores, legality)
    if validate:
        require_choice(masks, legality.space.names)
    return Choice(actions, masks, MaskedCategorical(logits, masks, False).log_prob(actions))


def _is_independent(space: ActionSpace) -> bool:
    return not any(space.given) and all(map(all, space.relevance))


def _stacked_masks(logits: Tensor, legality: Legality) -> Tensor:
    """[N, H, A] bool, for heads that do not condition each other."""
    space = legality.space
    masks = padded_sizes(space, logits.device).expand(logits.shape)
    if legality.masks:
        masks = masks.clone()
    for name, mask in legality.masks.items():
        head = space.index(name)
        masks[:, head, : space.sizes[head]] = mask.to(logits.device, non_blocking=True)
    return masks


def _choose_in_order(scores: Tensor, legality: Legality) -> tuple[Tensor, Tensor]:
    """Actions [N, H] and resolved masks [N, H, A]; each head's mask follows the earlier choices."""
    space = legality.space
    actions = torch.zeros(scores.shape[:2], dtype=torch.int64, device=scores.device)
    masks = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    for head, (name, size) in enumerate(zip(space.names, space.sizes, strict=True)):
        masks[:, head, :size] = legality.mask(name, actions)
        actions[:, head] = most_likely(scores[:, head], masks[:, head])
    return actions, masks
