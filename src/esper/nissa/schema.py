"""What the fields of events are: how each is kept, and which columns of a run's file it becomes.

An event names the kind of each field in its annotation. Tables, what is inserted and what is read
follow from that, so a column is stated once.

Shapes: `N` environments, `W` watched ones (the first), `K` those that were active, `M` rows of an
event, `H` heads, `A` actions of the largest head, `F` features.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from numpy.typing import NDArray

from esper.leyline import AgreementError, SeedStage
from esper.leyline.ops import Blend, LifecycleOp, cause_name
from esper.leyline.settings import of_json

if TYPE_CHECKING:
    from esper.leyline.catalogue import BlueprintCatalogue
    from esper.leyline.heads import ActionSpace

Array = Any  # given as a tensor on the CPU, an array or a list; kept as a numpy array


@dataclass(frozen=True)
class RunLayout:
    """What the columns of a run mean: names in the order of the arrays that events carry."""

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
    ) -> "RunLayout":
        """From a space of actions; heads that nobody named have actions 0, 1, 2, ...

        With a catalogue slots and blueprints have their names, ops and blends those of leyline.
        """
        slots, blueprints = (catalogue.slots.names, catalogue.names) if catalogue else ((), ())
        known = {"slot": slots, "blueprint": blueprints}
        if catalogue:
            known["op"] = tuple(op.name for op in LifecycleOp)
            known["blend"] = tuple(blend.name for blend in Blend)
        actions = tuple(
            known.get(head) or tuple(map(str, range(size)))
            for head, size in zip(space.names, space.sizes, strict=True)
        )
        for head, names, size in zip(space.names, actions, space.sizes, strict=True):
            _require_as_many(f"names of head {head!r}", len(names), size)
        return cls(space.names, actions, space.relevance, tuple(features), slots, blueprints)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(names) for names in self.actions)

    def by_action(self, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Values of all heads' actions, one after another, by head and action."""
        ends = accumulate(self.sizes)
        return {
            head: dict(zip(names, values[end - len(names) : end], strict=True))
            for head, names, end in zip(self.heads, self.actions, ends, strict=True)
        }

    def names(self) -> list[tuple[str, int, str]]:
        """(kind, place, name) of everything, as the table `names` holds it."""
        kinds: dict[str, Sequence[str]] = {"head": self.heads, "observation": self.features}
        kinds |= dict(zip(self.heads, self.actions, strict=True))
        return [
            (kind, place, name) for kind, names in kinds.items() for place, name in enumerate(names)
        ]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "RunLayout":
        return of_json(cls, json.loads(text))


def _require_as_many(what: str, given: int, valid: int) -> None:
    if given != valid:
        raise AgreementError(f"There is another number of {what}", given=given, valid=valid)


# --- kinds of fields -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Field:
    """What a field of an event is: a column of its name, or none where `sql` is empty.

    As it is: one value, the same in all rows of the event.
    """

    sql: str = ""  # the column's type
    encode: Callable[[Any], Any] = lambda value: value

    def kept(self, name: str, value: Any, rows: int | None) -> Any:
        """The event's own copy, refused if it is not where or what it should be."""
        return value

    def columns(self, name: str, layout: RunLayout) -> dict[str, str]:
        """The names of its columns, with their types in SQL."""
        return {name: self.sql} if self.sql else {}

    def stored(self, name: str, value: Any, layout: RunLayout) -> dict[str, Any]:
        """The values of every column, one for each row."""
        return {name: self.encode(value)} if self.sql else {}


class Numbers(Field):
    """Numbers by name, a row each."""

    def kept(self, name: str, value: Mapping[str, Any], rows: int | None) -> dict[str, float]:
        return {key: float(number) for key, number in value.items()}

    def columns(self, name: str, layout: RunLayout) -> dict[str, str]:
        return {"name": "TEXT", "value": "REAL"}

    def stored(self, name: str, value: Mapping[str, float], layout: RunLayout) -> dict[str, Any]:
        return {"name": list(value), "value": list(value.values())}


class Text(Field):
    """[M] texts."""

    def kept(self, name: str, value: Sequence[str], rows: int | None) -> tuple[str, ...]:
        texts = tuple(map(str, value))
        if isinstance(value, str) or len(texts) != rows:
            raise AgreementError(
                f"{name!r} of an event needs one text for each row", given=len(texts), valid=rows
            )
        return texts


@dataclass(frozen=True)
class Numeric(Field):
    """An array, one row for each of the event's: a column, or for [N, H] a column for each head.

    [N, H] with a name for its column is that of the sum over heads.
    """

    dtype: str
    axes: int = 1
    column: str | None = ""  # its name; "": as the field's, or as the heads'; None: it has none
    named: Callable[[RunLayout, int], str | None] | None = None  # in place of numbers, their names
    blob: "Blob | None" = None  # what is stored of the watched environments
    watched: bool = False  # [N or W, ...]: of those only

    def kept(self, name: str, value: Array, rows: int | None) -> NDArray[Any]:
        return owned(name, value, self.dtype, self.axes, None if self.watched else rows)

    def columns(self, name: str, layout: RunLayout) -> dict[str, str]:
        number = "INTEGER" if "i" in self.dtype else "REAL"
        names = layout.heads if self.axes == 2 and not self.column else (self.column or name,)
        return {} if self.column is None else dict.fromkeys(names, "TEXT" if self.named else number)

    def stored(self, name: str, value: NDArray[Any], layout: RunLayout) -> dict[str, Any]:
        columns = list(self.columns(name, layout))
        if not columns:
            return {}
        if self.named:
            found = value.tolist()
            names = {number: self.named(layout, number) for number in set(found)}
            return {name: [names[number] for number in found]}
        if self.axes == 2 and self.column == "":
            _require_as_many("heads", value.shape[1], len(columns))
            return dict(zip(columns, value.T, strict=True))
        return dict.fromkeys(columns, value if self.axes == 1 else value.astype("<f8").sum(1))


@dataclass(frozen=True)
class Measures(Field):
    """[N] of each name: columns of a step's table that come into being when they are first used."""

    prefix: str = ""

    def kept(self, name: str, value: Mapping[str, Array], rows: int | None) -> dict[str, Any]:
        for key in value:
            if not _COLUMN.fullmatch(key):
                raise AgreementError(
                    "A measurement's name becomes a column",
                    given=repr(key),
                    valid="small letters, digits and underscores; round, step, env and reward are "
                    "taken",
                )
        return {
            key: owned(f"{name}[{key!r}]", array, "<f8", 1, rows) for key, array in value.items()
        }

    def stored(self, name: str, value: Mapping[str, Array], layout: RunLayout) -> dict[str, Any]:
        return {f"{self.prefix}{key}": array for key, array in value.items()}


@dataclass(frozen=True)
class Blob:
    """An array of the watched environments as a column of `observations`, and by name.

    [W, H, A] is stored without the padding, as [W, actions of all heads].
    """

    column: str
    dtype: str  # ?: bits
    names: Callable[[RunLayout], Sequence[str]] | None = None  # of its numbers; None: all actions
    read_as: str = ""  # where people call it otherwise

    def encode(self, given: NDArray[Any], layout: RunLayout) -> NDArray[Any]:
        """[W, bytes or numbers]"""
        if self.names is None:
            _require_as_many("heads", given.shape[1], len(layout.heads))
            _require_as_many("actions", min(given.shape[2], max(layout.sizes)), max(layout.sizes))
            parts = [given[:, head, :size] for head, size in enumerate(layout.sizes)]
            given = np.concatenate(parts, axis=1)
        else:
            _require_as_many("features", given.shape[1], len(self.names(layout)))
        if self.dtype == "?":
            return np.packbits(given, axis=1, bitorder="little")
        with np.errstate(over="ignore"):  # beyond the range of float16 is infinite
            return given.astype(self.dtype)

    def decode(self, blob: bytes, layout: RunLayout) -> dict[str, Any]:
        """Of one environment, by name; of bits the names."""
        if self.names is not None:
            values = np.frombuffer(blob, self.dtype).tolist()
            return dict(zip(self.names(layout), values, strict=True))
        if self.dtype != "?":
            return layout.by_action(np.frombuffer(blob, self.dtype).tolist())
        bits = np.unpackbits(np.frombuffer(blob, np.uint8), bitorder="little").tolist()
        heads = layout.by_action(bits)
        return {head: tuple(name for name, bit in of.items() if bit) for head, of in heads.items()}


def fields_of(event: type[Any]) -> dict[str, Field]:
    """The fields that the annotations of a class declare."""
    found = {}
    for name, annotation in inspect.get_annotations(event).items():
        parts = (annotation, *get_args(annotation))  # of `... | None` also what is inside
        said = [extra for part in parts for extra in getattr(part, "__metadata__", ())]
        said += [Field(sql=_SQL[part]) for part in parts if part in _SQL]
        if said:
            found[name] = said[0]
    return found


_SQL = {int: "INTEGER", bool: "INTEGER", float: "REAL", str: "TEXT"}
_COLUMN = re.compile(r"(?!(round|step|env|reward)$|reward_)[a-z_][a-z0-9_]*")


def owned(name: str, value: Array, dtype: str, axes: int, rows: int | None) -> NDArray[Any]:
    """A copy of an array, refused if it is not where or what it should be."""
    if hasattr(value, "detach"):
        if not value.is_cpu:
            raise AgreementError(
                f"Events take what is on the CPU, and {name!r} is elsewhere",
                given=str(value.device),
                fix="fetch a step's tensors together, once",
            )
        try:
            value = value.detach().numpy()
        except TypeError:  # numpy has no bfloat16
            value = value.detach().float().numpy()
    array = np.array(value, dtype=dtype)
    if array.ndim != axes or (rows is not None and len(array) != rows):
        raise AgreementError(
            f"{name!r} of an event has the wrong shape",
            given=list(array.shape),
            valid=f"{axes} axes" + ("" if rows is None else f", {rows} rows"),
        )
    return array


# --- annotations -----------------------------------------------------------------------------


def _name(names: Sequence[str], index: int) -> str | None:
    if index < 0:
        return None
    return names[index] if index < len(names) else str(index)


JsonMapping = Annotated[
    Mapping[str, Any], Field(sql="TEXT", encode=json.dumps)
]  # whatever JSON can hold
NamedNumbers = Annotated[Mapping[str, float], Numbers()]
Texts = Annotated[Sequence[str], Text(sql="TEXT")]  # [M], as all below
Integers = Annotated[Array, Numeric("<i8")]
Reals = Annotated[Array, Numeric("<f8")]
Slots = Annotated[Array, Numeric("<i4", named=lambda layout, slot: _name(layout.slots, slot))]
Blueprints = Annotated[  # below 0: nothing
    Array, Numeric("<i4", named=lambda layout, blueprint: _name(layout.blueprints, blueprint))
]
Stages = Annotated[Array, Numeric("<i4", named=lambda _, stage: SeedStage(stage).name)]
Causes = Annotated[Array, Numeric("<i4", named=lambda _, cause: cause_name(cause))]


def _watched(dtype: str, axes: int, blob: Blob) -> Numeric:
    return Numeric(dtype, axes, None, blob=blob, watched=True)


_OBSERVATION = Blob("observation", "<f2", lambda layout: layout.features)
Observations = Annotated[Array, _watched("<f4", 2, _OBSERVATION)]  # [N or W, F]
Masks = Annotated[Array, _watched("?", 3, Blob("masks", "?", read_as="legal"))]  # [N or W, H, A]
Probabilities = Annotated[Array, _watched("<f4", 3, Blob("probabilities", "<f2"))]  # [N or W, H, A]
LOG_PROBS = Blob("log_probs", "<f4", lambda layout: layout.heads)
