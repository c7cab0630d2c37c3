"""Actions of a whole population, and which of them are legal."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from esper.leyline.errors import ActionError
from esper.leyline.heads import CANONICAL_ACTION, ActionSpace
from esper.leyline.slots import require_form

# N hosts, H heads, A actions of the largest head


@lru_cache
def relevance_table(relevance: tuple[tuple[bool, ...], ...], device: torch.device) -> Tensor:
    """[ops, H] bool on that device, made once: a transfer would have to be waited for."""
    return torch.tensor(relevance, device=device)


@lru_cache
def _canonical_only(size: int, device: torch.device) -> Tensor:
    """[size] bool: open for the canonical action alone."""
    return torch.arange(size, device=device) == CANONICAL_ACTION


@dataclass(frozen=True)
class Actions:
    """One composite action a host: a column of `values` [N, H] for each head, in table order."""

    space: ActionSpace
    values: Tensor  # [N, H] int64

    def __post_init__(self) -> None:
        heads = ", ".join(self.space.names)
        what = f"Actions have the wrong type, shape or number of heads ({heads})"
        shape = (*self.values.shape[:1], len(self.space))
        require_form(what, self.values, shape, torch.int64, error=ActionError)
        bad = (self.values < 0) | (self.values >= torch.tensor(self.space.sizes))
        if bool(bad.any()):
            host, head = (int(index) for index in bad.nonzero()[0])
            raise ActionError(
                f"Host {host} got an action out of range for head {self.space.names[head]!r}",
                given=int(self.values[host, head]),
                valid=f"0 to {self.space.sizes[head] - 1}",
            )

    @classmethod
    def of(cls, space: ActionSpace, hosts: int = 1, **chosen: "Tensor | int") -> "Actions":
        """Actions by head name; heads that are not named take their canonical action."""
        values = torch.full((hosts, len(space)), CANONICAL_ACTION, dtype=torch.int64)
        for name, choice in chosen.items():
            values[:, space.index(name)] = torch.as_tensor(choice, dtype=torch.int64)
        return cls(space, values)

    def __getitem__(self, head: str) -> Tensor:
        return self.values[:, self.space.index(head)]

    def __len__(self) -> int:
        return int(self.values.shape[0])

    def relevant(self) -> Tensor:
        """[N, H] bool: did this head matter for the op that was chosen?"""
        return relevance_table(self.space.relevance, self.values.device)[self.values[:, 0]]

    def canonical(self) -> "Actions":
        """The same decisions with every head that did not matter at its canonical action."""
        return Actions(self.space, torch.where(self.relevant(), self.values, CANONICAL_ACTION))


@dataclass(frozen=True)
class Legality:
    """Which actions are open: one boolean mask a head, conditioned on earlier heads' choices.

    The mask of a head has shape [N, *sizes of the heads in `given`, size]. A head without a
    mask may take any of its actions.
    """

    space: ActionSpace
    hosts: int
    masks: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name, mask in self.masks.items():
            position = self.space.index(name)
            given = (self.space.size(earlier) for earlier in self.space.given[position])
            expected = [self.hosts, *given, self.space.sizes[position]]
            what = f"The mask of head {name!r} has the wrong shape"
            require_form(what, mask, expected, torch.bool, error=ActionError)

    def mask(self, head: str, values: Tensor) -> Tensor:
        """[N, size]: what `head` may take, given the choices of earlier heads in `values` [N, H].

        Where the head does not matter for the chosen op only the canonical action is open.
        """
        position = self.space.index(head)
        size = self.space.sizes[position]
        device = values.device
        if head in self.masks:
            mask = self.masks[head].to(device, non_blocking=True)
            if self.space.given[position]:
                given = [values[:, self.space.index(name)] for name in self.space.given[position]]
                mask = mask[(torch.arange(self.hosts, device=device), *given)]
        else:
            mask = torch.ones(self.hosts, size, dtype=torch.bool, device=device)
        if position == 0:
            return mask
        matters = relevance_table(self.space.relevance, device)[:, position][values[:, 0]]
        return torch.where(matters[:, None], mask, _canonical_only(size, device))

    def resolved(self, values: Tensor) -> Tensor:
        """[N, H, A]: what every head could take, given the choices [N, H], padded with False."""
        sizes = self.space.sizes
        masks = torch.zeros(*values.shape, max(sizes), dtype=torch.bool, device=values.device)
        for head, (name, size) in enumerate(zip(self.space.names, sizes, strict=True)):
            masks[:, head, :size] = self.mask(name, values)
        return masks

    def rows(self, index: Tensor) -> "Legality":
        """The hosts in `index`, in that order."""
        masks = {name: mask[index] for name, mask in self.masks.items()}
        return Legality(self.space, len(index), masks)

    def permits(self, actions: Actions) -> Tensor:
        """[N] bool: is the whole composite action legal? Heads that do not matter are ignored."""
        values = actions.canonical().values
        permitted = torch.ones(len(actions), dtype=torch.bool)
        for position, name in enumerate(self.space.names):
            mask = self.mask(name, values)
            permitted &= mask.gather(1, values[:, position : position + 1])[:, 0]
        return permitted
