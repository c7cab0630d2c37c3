"""Controllers and what they plant, in words.

Settings are one word for the command line: `name:setting=value,setting=value`. Lists are joined by
`+`, blends are written in lower case, `none` turns a setting off.

An arm is one planned planting (`slot`, `blueprint`, `blend`, `epoch`). A place is written
`slot/blueprint`; `*` stands for every slot in order, or for every blueprint that fits, the cheapest
first.

Shapes: `C` places.
"""

import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from esper.leyline import Actions, Blend, BlueprintCatalogue, EsperError, Legality
from esper.leyline.constants import DEFAULT_MIN_TRAINING_EPOCHS
from esper.leyline.errors import require_known
from esper.leyline.settings import Count, Whole, require_settings
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.proposals import epochs_to_permanence


class Settings(Protocol):
    """A frozen dataclass whose fields are what can be set."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


S = TypeVar("S", bound=Settings)

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
_READERS = {bool: {"true": True, "false": False}.__getitem__, Blend: Blend.named}


def parse_settings(name: str, text: str, kind: type[S]) -> S:
    """The settings in `text`; unknown, missing and malformed ones are refused by name."""
    known = inspect.signature(kind).parameters
    hints = get_type_hints(kind)
    given: dict[str, object] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        fix = None if known else f"write it as {name!r} alone"
        require_known(f"setting of controller {name!r}", key, known, fix)
        if not equals or not value or key in given:
            raise EsperError(
                f"Setting {key!r} of controller {name!r} needs one value",
                given=repr(text),
                valid=f"{key}=VALUE, once",
            )
        given[key] = _parsed(f"Setting {key!r} of controller {name!r}", value, hints[key])
    required = (key for key, each in known.items() if each.default is each.empty)
    missing = [key for key in required if key not in given]
    if missing:
        raise EsperError(
            f"Controller {name!r} needs more settings",
            given=repr(text),
            valid=f"also {', '.join(missing)}, as in {name}:{missing[0]}=VALUE",
        )
    return kind(**given)


def spec_of(name: str, settings: Settings) -> str:
    """The word that `parse_settings` turns back into these settings; defaults are left out."""
    listed = ",".join(
        f"{field.name}={written(value)}"
        for field in fields(settings)
        if field.init and (value := getattr(settings, field.name)) != field.default
    )
    return f"{name}:{listed}" if listed else name


def _parsed(what: str, text: str, kind: Any) -> object:
    if get_origin(kind) is tuple:
        return tuple(_parsed(what, part, get_args(kind)[0]) for part in text.split("+"))
    if get_origin(kind) in (Union, types.UnionType):
        if text == "none":
            return None
        kind = next(option for option in get_args(kind) if option is not types.NoneType)
    try:
        value: object = _READERS.get(kind, kind)(text)
    except (KeyError, ValueError):
        raise EsperError(
            f"{what} has the wrong form", given=repr(text), valid=_KINDS[kind]
        ) from None
    return value


def written(value: object) -> str:
    """A setting's value as it stands in a description."""
    if isinstance(value, tuple):
        return "+".join(map(written, value))
    if isinstance(value, Enum):
        return value.name.lower()
    return str(value).lower() if isinstance(value, bool | None) else str(value)


class RuleSettings:
    """What can be set of a rule; its name is the word that makes the rule again."""

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __post_init__(self) -> None:
        for place in getattr(self, "places", ()):
            slot, _, blueprint = place.partition("/")
            if not slot or not blueprint or "/" in blueprint:
                raise EsperError(
                    "A place is written slot/blueprint",
                    given=repr(place),
                    valid=f"early/conv, {ANY}/conv, early/{ANY} or {ANY}/{ANY}",
                )
        require_settings(self, f"In controller {self.kind!r} setting")

    @property
    def name(self) -> str:
        return spec_of(self.kind, self)


class OwnSettings(RuleSettings, ABC):
    """A controller that is its own settings."""

    @abstractmethod
    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions: ...


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
    epoch: Whole = DEFAULT_ARM_EPOCH  # planted at the decision after that many epochs
    train: Count = DEFAULT_MIN_TRAINING_EPOCHS  # in isolation, unless the blend is immediate

    def __post_init__(self) -> None:
        Blend.named(self.blend)
        require_settings(self, f"Arm {self.slot}/{self.blueprint}'s")

    def __str__(self) -> str:
        return f"{self.slot}/{self.blueprint}/{self.blend}@{self.epoch}"

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Arm":
        for name in stored:
            require_known("setting of an arm", name, sorted(cls.__dataclass_fields__))
        return cls(**stored)

    def place(self, catalogue: BlueprintCatalogue) -> tuple[int, int]:
        """Indices of slot and blueprint; refused if unknown or if one does not fit the other."""
        slot, blueprint = catalogue.slots.index(self.slot), catalogue.index(self.blueprint)
        costs = catalogue.costs[slot]
        if costs[blueprint] < 0:
            fitting = [name for name, cost in zip(catalogue.names, costs, strict=True) if cost >= 0]
            raise EsperError(
                f"B{catalogue.misfit(slot, blueprint)[1:]}",
                given=f"{self.slot}/{self.blueprint}",
                valid=", ".join(fitting) or "no blueprint fits this slot",
            )
        return slot, blueprint

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


@lru_cache(maxsize=256)
def find_places(places: tuple[str, ...], catalogue: BlueprintCatalogue) -> Tensor:
    """[C, 2] indices of slot and blueprint, in order and each once."""
    found: dict[tuple[int, int], None] = {}
    for place in places:
        slot, _, blueprint = place.partition("/")
        for each in catalogue.slots.names if slot == ANY else (slot,):
            row = catalogue.costs[catalogue.slots.index(each)]
            costs = dict(zip(catalogue.names, row, strict=True))
            for kind in sorted(costs, key=costs.__getitem__) if blueprint == ANY else (blueprint,):
                if ANY not in (slot, blueprint) or costs.get(kind, 0) >= 0:
                    found[Arm(slot=each, blueprint=kind).place(catalogue)] = None
    return torch.tensor(list(found), dtype=torch.int64).view(-1, 2)
