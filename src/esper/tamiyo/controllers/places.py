"""Where and what to plant, in words: arms (`slot`, `blueprint`, `blend`, `epoch`) and places.

A place is written `slot/blueprint`; `*` stands for every slot in order, or for every blueprint
that fits, the cheapest first.

Shapes: `C` places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.constants import DEFAULT_MIN_TRAINING_EPOCHS
from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.ops import Blend
from esper.tamiyo.controllers.proposals import epochs_to_permanence

ANY = "*"
EVERYWHERE = (f"{ANY}/{ANY}",)
DEFAULT_ARM_BLEND = Blend.IMMEDIATE.name.lower()
DEFAULT_ARM_EPOCH = 5


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One planned planting."""

    slot: str
    blueprint: str
    blend: str = DEFAULT_ARM_BLEND
    epoch: int = DEFAULT_ARM_EPOCH  # planted at the decision after that many epochs
    train: int = DEFAULT_MIN_TRAINING_EPOCHS  # in isolation, unless the blend is immediate

    def __post_init__(self) -> None:
        Blend.named(self.blend)
        require_at_least(0, f"The epoch of arm {self.slot}/{self.blueprint}", self.epoch)
        require_at_least(1, f"The training of arm {self.slot}/{self.blueprint}", self.train)

    def __str__(self) -> str:
        return f"{self.slot}/{self.blueprint}/{self.blend}@{self.epoch}"

    def to_dict(self) -> dict[str, str | int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Arm":
        known = {field.name for field in fields(cls)}
        for name in stored:
            if name not in known:
                raise UnknownNameError.of("setting of an arm", name, sorted(known))
        return cls(**stored)

    def place(self, catalogue: BlueprintCatalogue) -> tuple[int, int]:
        """Indices of slot and blueprint; refused if unknown or if one does not fit the other."""
        return _place(self.slot, self.blueprint, catalogue)

    def require_in_time(self, horizon: int) -> None:
        needed = epochs_to_permanence(Blend.named(self.blend), self.train)
        latest = horizon - 1 - needed
        if self.epoch > latest:
            raise EsperError(
                f"A seed planted as late as {self} cannot become permanent",
                given=f"epoch {self.epoch} of {horizon}",
                valid=f"epochs 0 to {latest} with this blend" if latest >= 0 else None,
                fix=f"train for at least {self.epoch + needed + 1} epochs",
            )


def require_distinct_slots(arms: Sequence[Arm]) -> None:
    """A slot carries one seed in an episode: a second arm there would never be planted."""
    slots = [arm.slot for arm in arms]
    if len(set(slots)) != len(slots):
        raise EsperError(
            "A schedule can plant a slot only once", given=", ".join(str(arm) for arm in arms)
        )


def require_at_least(least: float, what: str, value: float) -> None:
    if not value >= least:
        raise EsperError(f"{what} is too small", given=value, valid=f"at least {least}")


def _place(slot: str, blueprint: str, catalogue: BlueprintCatalogue) -> tuple[int, int]:
    place = catalogue.slots.index(slot), catalogue.index(blueprint)
    if catalogue.costs[place[0]][place[1]] < 0:
        fitting = [
            name
            for name, cost in zip(catalogue.names, catalogue.costs[place[0]], strict=True)
            if cost >= 0
        ]
        raise EsperError(
            f"Blueprint {blueprint!r} does not fit slot {slot!r}",
            given=f"{slot}/{blueprint}",
            valid=", ".join(fitting) or "no blueprint fits this slot",
        )
    return place


def require_places(places: Sequence[str]) -> None:
    """Refuse what is not written as a place."""
    for place in places:
        slot, _, blueprint = place.partition("/")
        if not slot or not blueprint or "/" in blueprint:
            raise EsperError(
                "A place is written slot/blueprint",
                given=repr(place),
                valid=f"early/conv, {ANY}/conv, early/{ANY} or {ANY}/{ANY}",
            )


@lru_cache(maxsize=256)
def find_places(places: tuple[str, ...], catalogue: BlueprintCatalogue) -> Tensor:
    """[C, 2] indices of slot and blueprint, in order and each once."""
    require_places(places)
    found: dict[tuple[int, int], None] = {}
    for place in places:
        slot, _, blueprint = place.partition("/")
        for each in catalogue.slots.names if slot == ANY else (slot,):
            found |= dict.fromkeys(_places_in(each, blueprint, slot == ANY, catalogue))
    return torch.tensor(list(found), dtype=torch.int64).view(-1, 2)


def _places_in(
    slot: str, blueprint: str, any_slot: bool, catalogue: BlueprintCatalogue
) -> list[tuple[int, int]]:
    index = catalogue.slots.index(slot)
    costs = catalogue.costs[index]
    if blueprint == ANY:
        fitting = (kind for kind, cost in enumerate(costs) if cost >= 0)
        return [(index, kind) for kind in sorted(fitting, key=lambda kind: costs[kind])]
    if any_slot and costs[catalogue.index(blueprint)] < 0:
        return []
    return [_place(slot, blueprint, catalogue)]
