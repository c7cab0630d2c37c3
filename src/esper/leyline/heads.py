"""Action heads are data: one table of each head's name, size and causal relevance.

Network, buffer, masks, PPO, metrics and telemetry derive their heads from a `HeadTable`. The
first head of a table is the *op*; `matters_for` names the ops for which a head matters, and
`given` the earlier heads on whose choice its legality depends. A head that does not matter for
the chosen op has only its canonical action 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.errors import AgreementError, place_of
from esper.leyline.ops import Blend, LifecycleOp
from esper.leyline.settings import of_json

CANONICAL_ACTION = 0


@dataclass(frozen=True, kw_only=True)
class Head:
    name: str
    size: Callable[[BlueprintCatalogue], int]
    matters_for: frozenset[int]
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadTable:
    """An ordered list of heads over the ops of one enum; validated when it is made."""

    ops: type[IntEnum]
    heads: tuple[Head, ...]

    def __post_init__(self) -> None:
        ops = frozenset(int(op) for op in self.ops)
        assert ops == frozenset(range(len(ops))), "ops are numbered from 0 without gaps"
        assert len(set(self.names)) == len(self.names), "heads have names of their own"
        missing = sorted(self.ops(op).name for op in ops - self.heads[0].matters_for)
        if missing:
            raise AgreementError(
                f"The head table leaves out ops (head {self.heads[0].name!r} must matter for all)",
                given=f"missing {', '.join(missing)}",
                fix="list the op in the table for every head it uses",
            )
        for position, head in enumerate(self.heads):
            assert head.matters_for <= ops, "heads matter for ops that there are"
            later = [name for name in head.given if name not in self.names[:position]]
            if later:
                raise AgreementError(
                    f"Head {head.name!r} depends on heads that are not chosen before it",
                    given=later,
                    valid=self.names[:position],
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(head.name for head in self.heads)

    def resolve(self, catalogue: BlueprintCatalogue) -> "ActionSpace":
        """The heads with their sizes for one slot configuration and catalogue."""
        return ActionSpace(
            names=self.names,
            sizes=tuple(head.size(catalogue) for head in self.heads),
            relevance=self.relevance,
            given=tuple(head.given for head in self.heads),
        )

    @property
    def relevance(self) -> tuple[tuple[bool, ...], ...]:
        """Causal relevance, [op][head]: does this head matter for this op?"""
        return tuple(
            tuple(int(op) in head.matters_for for head in self.heads) for op in sorted(self.ops)
        )


@dataclass(frozen=True, kw_only=True)
class ActionSpace:
    """Heads with their sizes: all that a network, a buffer or a mask needs to know of them."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    relevance: tuple[tuple[bool, ...], ...]  # [op][head]
    given: tuple[tuple[str, ...], ...]  # earlier heads that condition each head's legality

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.sizes):
            raise AgreementError(
                "Every head needs at least one action",
                given=dict(zip(self.names, self.sizes, strict=True)),
            )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_always_relevant(self) -> bool:
        """Whether every head is relevant for every op."""
        return all(all(row) for row in self.relevance)

    def index(self, name: str) -> int:
        return place_of("action head", name, self.names)

    def size(self, name: str) -> int:
        return self.sizes[self.index(name)]

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "ActionSpace":
        """The space that was written as JSON."""
        return of_json(cls, stored)


_O = LifecycleOp

HEADS = HeadTable(
    LifecycleOp,
    (
        Head(
            name="op",
            size=lambda catalogue: len(LifecycleOp),
            matters_for=frozenset({_O.WAIT, _O.GERMINATE, _O.ADVANCE, _O.FOSSILIZE, _O.PRUNE}),
        ),
        Head(
            name="slot",
            size=lambda catalogue: len(catalogue.slots),
            matters_for=frozenset({_O.GERMINATE, _O.ADVANCE, _O.FOSSILIZE, _O.PRUNE}),
            given=("op",),
        ),
        Head(
            name="blueprint",
            size=lambda catalogue: len(catalogue.names),
            matters_for=frozenset({_O.GERMINATE}),
            given=("slot",),
        ),
        Head(
            name="blend",
            size=lambda catalogue: len(Blend),
            matters_for=frozenset({_O.GERMINATE}),
            given=("slot", "blueprint"),
        ),
    ),
)

HEAD_NAMES = HEADS.names
