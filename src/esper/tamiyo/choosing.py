"""How a composite action is chosen: head after head, each open to what the earlier ones allow.

A head's choice is drawn from a categorical distribution over its legal actions only. All heads
live on one axis, padded to the largest: logits and masks are [N, H, A]. A resolved mask says what
a head could take *in that step*: padding is closed, and a head that did not matter for the chosen
op has its canonical action only, hence log-prob 0, entropy 0 and no gradient.

What a network prefers may also depend on the earlier choices: then its logits are one table a head,
[..., *sizes of the heads in `given`, size] as masks are, of which `logits_given` takes what counts.

Shapes: `...` any batch shape, `N` rows, `H` heads, `A` actions of the largest head.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from esper.leyline import MASK_VALUE, ActionError, ActionSpace, AgreementError, EsperError, Legality
from esper.leyline.slots import require_form

Logits = Tensor | tuple[Tensor, ...]  # [..., H, A], or a table for each head


class InvalidStateMachineError(EsperError):
    """A state in which an action head has no legal action."""


class MaskedCategorical:
    """Probabilities, log-probs and entropy of the legal actions; illegal ones have probability 0.

    All arithmetic is in float32, whatever type the logits have. The largest legal logit is moved
    to 0 and illegal ones to a finite value, so nothing overflows and no gradient is NaN. The
    entropy is divided by the log of the number of legal actions: 1 is uniform, whatever the mask.

    `validate=False` skips the search for a row without a legal action, which needs the values
    and so would break a compiled graph and wait for the device.
    """

    def __init__(self, logits: Tensor, mask: Tensor, validate: bool = True) -> None:
        what = "A mask must have a boolean for each logit"
        require_form(what, mask, logits.shape, torch.bool, error=ActionError)
        if validate:
            require_choice(mask)
        wide = logits.float()
        lowest = torch.finfo(wide.dtype).min
        self.mask, self._closed = mask, ~mask
        peak = wide.detach().masked_fill(self._closed, lowest).amax(-1, keepdim=True)  # [..., 1]
        self.log_probs = (wide - peak).masked_fill(self._closed, MASK_VALUE).log_softmax(-1)

    @property
    def probs(self) -> Tensor:
        """[..., A]"""
        return self.log_probs.exp()

    def log_prob(self, actions: Tensor) -> Tensor:
        """[...]: the log-prob of the actions [...]."""
        return self.log_probs.gather(-1, actions[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        """[...]: from 0 to 1; exactly 0 where only one action is legal."""
        legal = self.mask.sum(-1, dtype=torch.float32)  # [...]
        # Masked before the product: 0 times a very negative number has a gradient of its own.
        found = (self.probs * self.log_probs.masked_fill(self._closed, 0.0)).sum(-1)
        return found / -legal.clamp(min=2).log()  # of a single action it is 0 already

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[...] int64: actions drawn with their probabilities; never an illegal one."""
        return most_likely(self.log_probs + gumbel(self.log_probs, generator), self.mask)

    def mode(self) -> Tensor:
        """[...] int64: the most probable action."""
        return most_likely(self.log_probs, self.mask)


def require_choice(mask: Tensor, heads: tuple[str, ...] | None = None) -> None:
    """Refuse a mask [..., A] in which a row has no legal action; `heads` names the last axis."""
    closed = ~mask.any(-1)
    if bool(closed.any()):
        place = closed.nonzero()[0].tolist()
        row = f"row {place[:-1] or place}" if heads else f"row {place}"
        what = f"Head {heads[place[-1]]!r} has no legal action" if heads else "No action is legal"
        raise InvalidStateMachineError(
            what,
            given=f"{row}, the first of {int(closed.sum())} without one",
            valid="at least one legal action in every row",
            fix="leave an action that is always legal, such as waiting",
        )


Among = tuple[int, int]  # these rows are the ones from the first on, of so many


def gumbel(
    like: Tensor, generator: torch.Generator | None = None, among: Among | None = None
) -> Tensor:
    """Noise of the shape of `like` that makes the largest of (log-prob + noise) a fair draw.

    Rows `among` others get what they would get if all were drawn for at once.
    """
    first, rows = among or (0, len(like))
    noise = like.new_empty((rows, *like.shape[1:])).exponential_(generator=generator)
    return -noise[first : first + len(like)].log()


def most_likely(scores: Tensor, mask: Tensor) -> Tensor:
    """[...] int64: the legal action with the highest score."""
    return scores.masked_fill(~mask, -math.inf).argmax(-1)


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


def head_logits(logits: Logits, space: ActionSpace, head: int, actions: Tensor) -> Tensor:
    """[..., A]: those of one head, given the choices [..., H] of the earlier ones."""
    if isinstance(logits, Tensor):
        return logits[..., head, :]
    table, place = logits[head], torch.zeros_like(actions[..., 0])
    for name in space.given[head]:
        place = place * space.size(name) + actions[..., space.index(name)]
    rows = table.reshape(*place.shape, -1, space.sizes[head])
    picked = place[..., None, None].expand(*place.shape, 1, space.sizes[head])
    own = rows.gather(-2, picked)[..., 0, :]
    return pad(own, (0, max(space.sizes) - space.sizes[head]), value=MASK_VALUE)


def logits_given(logits: Logits, space: ActionSpace, actions: Tensor) -> Tensor:
    """[..., H, A]: those of every head, given the choices [..., H]."""
    if isinstance(logits, Tensor):
        return logits
    return torch.stack([head_logits(logits, space, h, actions) for h in range(len(space))], -2)


def choose(
    logits: Logits,
    legality: Legality,
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    among: Among | None = None,
    validate: bool = True,
) -> Choice:
    """Draw a composite action for each row of logits, or take the likeliest."""
    space = legality.space
    device = (logits if isinstance(logits, Tensor) else logits[0]).device
    noise = torch.zeros(legality.hosts, len(space), max(space.sizes), device=device)
    if not greedy:
        noise = gumbel(noise, generator, among)
    actions = torch.zeros(noise.shape[:2], dtype=torch.int64, device=device)
    masks = torch.zeros_like(noise, dtype=torch.bool)
    for head, (name, size) in enumerate(zip(space.names, space.sizes, strict=True)):
        masks[:, head, :size] = legality.mask(name, actions)
        scores = head_logits(logits, space, head, actions).float() + noise[:, head]
        actions[:, head] = most_likely(scores, masks[:, head])
    if validate and legality.masks:  # else all is open
        require_choice(masks, space.names)
    chances = MaskedCategorical(logits_given(logits, space, actions), masks, False)
    return Choice(actions, masks, chances.log_prob(actions))
