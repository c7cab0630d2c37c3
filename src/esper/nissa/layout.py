"""What the columns of a run mean: names of features, heads and actions, kept once in its file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from esper.leyline.errors import AgreementError
from esper.leyline.ops import Blend, LifecycleOp

if TYPE_CHECKING:
    from esper.leyline.catalogue import BlueprintCatalogue
    from esper.leyline.heads import ActionSpace


@dataclass(frozen=True)
class Layout:
    """Names in the order of the arrays that events carry."""

    heads: tuple[str, ...]
    actions: tuple[tuple[str, ...], ...]  # of each head
    relevance: tuple[tuple[bool, ...], ...]  # [op][head]: does this head matter for this op?
    features: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    blueprints: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        space: "ActionSpace",
        features: Sequence[str] = (),
        catalogue: "BlueprintCatalogue | None" = None,
        ops: Sequence[str] = (),
    ) -> "Layout":
        """From a space of actions; heads that nobody named have actions 0, 1, 2, ...

        With a catalogue the slots and blueprints have their names, and ops those of LifecycleOp.
        """
        known: dict[str, Sequence[str]] = {space.names[0]: ops} if ops else {}
        slots: tuple[str, ...] = ()
        blueprints: tuple[str, ...] = ()
        if catalogue is not None:
            slots, blueprints = catalogue.slots.names, catalogue.names
            known = {**_names_of_heads(catalogue), **known}
        actions = tuple(
            tuple(known.get(name, ())) or tuple(str(place) for place in range(size))
            for name, size in zip(space.names, space.sizes, strict=True)
        )
        for head, names, size in zip(space.names, actions, space.sizes, strict=True):
            if len(names) != size:
                raise AgreementError(
                    f"Head {head!r} has another number of actions than names",
                    given=", ".join(names),
                    valid=f"{size} names",
                )
        return cls(space.names, actions, space.relevance, tuple(features), slots, blueprints)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(names) for names in self.actions)

    def named(self, head: str, action: int) -> str:
        """The name of an action of a head."""
        return self.actions[self.heads.index(head)][action]

    def slot(self, index: int) -> str:
        return self.slots[index] if index < len(self.slots) else str(index)

    def blueprint(self, index: int) -> str | None:
        if index < 0:
            return None
        return self.blueprints[index] if index < len(self.blueprints) else str(index)

    def names(self) -> list[tuple[str, int, str]]:
        """(kind, place, name) of everything, as the table `names` holds it."""
        kinds: dict[str, Sequence[str]] = {"head": self.heads, "observation": self.features}
        kinds |= dict(zip(self.heads, self.actions, strict=True))
        return [
            (kind, place, name) for kind, names in kinds.items() for place, name in enumerate(names)
        ]

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in _FIELDS}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        found = json.loads(text)
        return cls(**{name: _frozen(found[name]) for name in _FIELDS})


_FIELDS = ("heads", "actions", "relevance", "features", "slots", "blueprints")


def _names_of_heads(catalogue: "BlueprintCatalogue") -> Mapping[str, Sequence[str]]:
    """For people; a head that is not here has numbered actions."""
    return {
        "op": [op.name for op in LifecycleOp],
        "slot": catalogue.slots.names,
        "blueprint": catalogue.names,
        "blend": [blend.name for blend in Blend],
    }


def _frozen(value: Any) -> Any:
    """Lists as tuples, also inside."""
    return tuple(_frozen(inner) for inner in value) if isinstance(value, list) else value
