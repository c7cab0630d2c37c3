"""The blueprint catalogue of one host: which seeds fit which slot, and what each costs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntFlag, auto
from functools import cached_property

import torch
from torch import Tensor

from esper.leyline.errors import UnknownNameError, place_of
from esper.leyline.slots import SlotConfig

# S slots, P blueprints, K blends

NOT_APPLICABLE = -1
LOOKS_BEYOND = -2  # it would see positions that a seed in this slot must not see
_BEYOND = (
    ", where it would see positions that are out of sight: a causal model stays causal, and one "
    "that decodes with a cache sees only what is new (if yours never does, switch it off first)"
)


class Trait(IntFlag):
    """What a blueprint is like, whatever its name: how a policy knows one it never met."""

    KNOWN = auto()  # somebody said what it is like; else only PLAIN says something
    LOCAL = auto()  # combines places beside each other
    GLOBAL = auto()  # combines places however far apart
    CHANNELS = auto()  # combines channels
    CONTENT = auto()  # how it combines depends on what passes
    NORMALISES = auto()  # brings what passes to a common size
    BENDS = auto()  # is not linear
    PLAIN = auto()  # capacity of a kind that hosts have anyway


@dataclass(frozen=True)
class Removal:
    """The release that removed a name, and the last release and commit that read it."""

    removed_in: str
    last_release: str
    last_commit: str


REMOVED_BLUEPRINTS: Mapping[str, Removal] = {
    "twin": Removal(removed_in="0.2.0", last_release="0.1.x", last_commit="28b7a14"),
}


def refuse_removed_blueprints(names: Iterable[str]) -> None:
    """Refuse blueprint names that only earlier releases have.

    Args:
        names: Blueprint names that are not registered or not in the catalogue.

    Raises:
        UnknownNameError: A name is in `REMOVED_BLUEPRINTS`.
    """
    for name in names:
        removal = REMOVED_BLUEPRINTS.get(name)
        if removal is not None:
            raise UnknownNameError(
                f"Blueprint {name!r} was removed in Esper {removal.removed_in}",
                fix=f"load a run or controller that names it with Esper {removal.last_release} "
                f"(commit {removal.last_commit}), or choose another blueprint",
            )


@dataclass(frozen=True)
class BlueprintCatalogue:
    """Names, costs and traits, known before anything is planted."""

    slots: SlotConfig
    names: tuple[str, ...]
    costs: tuple[tuple[int, ...], ...]  # [S][P] parameters; negative where it does not fit
    blend_costs: tuple[tuple[int, ...], ...]  # [S][K] parameters the blend itself adds
    host_params: int
    traits: tuple[tuple[int, ...], ...] = ()  # [S][P] a `Trait` each; nothing said: none known

    def index(self, name: str) -> int:
        """Return the index of a blueprint; a name that is not in the catalogue is refused."""
        if name not in self.names:
            refuse_removed_blueprints([name])
        return place_of("blueprint", name, self.names)

    def misfit(self, slot: int, blueprint: int) -> str:
        """Why this blueprint cannot be planted there."""
        reason = f"blueprint {self.names[blueprint]!r} does not fit slot {self.slots.names[slot]!r}"
        return reason + (_BEYOND if self.costs[slot][blueprint] == LOOKS_BEYOND else "")

    def encoded_names(self) -> Tensor:
        """The names as bytes, to be saved beside arrays of indices."""
        return torch.tensor(list("\n".join(self.names).encode()), dtype=torch.uint8)

    def translated(self, indices: Tensor, encoded_names: Tensor) -> Tensor:
        """Translate saved blueprint indices into indices of this catalogue.

        Args:
            indices: Saved blueprint indices; negative in empty slots.
            encoded_names: The names of the saved catalogue, from `encoded_names`.

        Raises:
            UnknownNameError: The saved catalogue has a blueprint that was removed, or an index is
                of a blueprint that this catalogue does not have.
        """
        saved_names = bytes(encoded_names.tolist()).decode().split("\n")
        # Measurements of shadows and memory of controllers are saved by position in the catalogue.
        # A removed name would shift them, so it is refused even if no slot holds that blueprint.
        refuse_removed_blueprints(name for name in saved_names if name not in self.names)
        translated = indices.clone()
        for index in indices[indices >= 0].unique().tolist():
            translated[indices == index] = self.index(saved_names[index])
        return translated

    def has(self, trait: Trait) -> Tensor:
        """[S, P] bool: which seeds are like that?"""
        traits = self.traits or ((0,) * len(self.names),) * len(self.slots)
        return (torch.tensor(traits, dtype=torch.int64) & int(trait)) != 0

    @cached_property
    def total_costs(self) -> Tensor:
        """Parameters of each seed, [S, P, K]; NOT_APPLICABLE where it does not fit."""
        bodies = torch.tensor(self.costs, dtype=torch.int64)[:, :, None]  # [S, P, 1]
        blends = torch.tensor(self.blend_costs, dtype=torch.int64)[:, None, :]  # [S, 1, K]
        return torch.where(bodies < 0, NOT_APPLICABLE, bodies + blends)
