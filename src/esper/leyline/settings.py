"""Settings: ranges that their values must lie in, and values from outside, checked by type."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from esper.leyline.errors import DataError, EsperError, require_known

NONE = "none"  # how a file says that there is no value

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Finite numbers between two ends; each end belongs to it unless `open_` says otherwise."""

    least: float = -math.inf
    most: float = math.inf
    open_: bool = False  # is the lower end itself left out?
    whole: bool = False
    optional: bool = False  # is None allowed?

    def holds(self, value: object) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        above = value > self.least if self.open_ else value >= self.least
        return math.isfinite(value) and above and value <= self.most

    def __str__(self) -> str:
        parts = ["a whole number" if self.whole else "a number"]
        if self.least > -math.inf:
            parts.append(f"{'above' if self.open_ else 'from'} {self.least:g}")
        if self.most < math.inf:
            parts.append(f"up to {self.most:g}")
        return " ".join(parts) + (", or none" if self.optional else "")


COUNT = Range(least=1, whole=True)
WHOLE = Range(least=0, whole=True)
POSITIVE = Range(least=0, open_=True)
NOT_NEGATIVE = Range(least=0)
SHARE = Range(least=0, most=1)

# Types of fields that `require_settings` checks.
Finite = Annotated[float, Range()]
Count = Annotated[int, COUNT]
Whole = Annotated[int, WHOLE]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Share = Annotated[float, SHARE]


def require(
    what: str, value: object, range_: Range, *, error: type[EsperError] = EsperError
) -> None:
    """Refuse a value outside its range."""
    if not range_.holds(value):
        raise error(f"{what} is out of range", given=repr(value), valid=range_)


def require_settings(owner: object, whose: str, *, error: type[EsperError] = EsperError) -> None:
    """Refuse an object whose fields are outside the ranges of their types: for `__post_init__`."""
    for name, range_ in _annotated_ranges(type(owner)).items():  # type: ignore[arg-type]
        require(f"{whose} {name!r}", getattr(owner, name), range_, error=error)


@lru_cache
def _annotated_ranges(kind: type) -> dict[str, Range]:
    """The ranges in a class's annotations: those of `Count`, `Share | None` and the like."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        optional = type(None) in get_args(hint)
        for option in get_args(hint) if optional else (hint,):
            for mark in getattr(option, "__metadata__", ()):
                if isinstance(mark, Range):
                    found[name] = replace(mark, optional=optional)
    return found


def filled(base: T, given: Mapping[str, Any], what: str) -> T:
    """A dataclass with the given settings in place of its own; each checked for name and type."""
    hints = get_type_hints(type(base))
    known = [each.name for each in fields(base)]  # type: ignore[arg-type]
    changed: dict[str, Any] = {}
    for name, value in given.items():
        require_known(what, name, known)
        own = getattr(base, name)
        if is_dataclass(own):
            if not isinstance(value, Mapping):
                raise DataError(f"{name!r} is a table of settings", given=repr(value))
            changed[name] = filled(own, value, f"setting of {name!r}")
        else:
            changed[name] = typed(name, value, hints[name])
    return replace(base, **changed)  # type: ignore[type-var]


def of_json(kind: type[T], stored: Mapping[str, Any]) -> T:
    """A dataclass that was written as JSON, which has lists for tuples; each value of its type."""
    hints = get_type_hints(kind)
    return kind(**{name: typed(name, stored[name], hint) for name, hint in hints.items()})


def typed(name: str, value: object, hint: Any) -> object:
    """The value as the setting's type; refused if it is another one's."""
    if isinstance(hint, UnionType) and type(value) in get_args(hint) and value != NONE:
        return value
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if type(None) in kinds and value == NONE:
        return None
    wanted = next(kind for kind in kinds if kind is not type(None))
    origin = get_origin(wanted) or wanted
    inner = get_args(wanted)
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(typed(name, each, inner[0]) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: typed(f"{name}.{key}", each, inner[1]) for key, each in value.items()}
    if origin is float and type(value) is int:
        return float(value)
    if origin in (int, float, str, bool) and type(value) is origin:
        return value
    raise DataError(
        f"{name!r} has the wrong type or value", given=repr(value), valid=_spoken(wanted)
    )


def _spoken(kind: Any) -> str:
    """A type in the words of a file."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is UnionType:
        return " or ".join(map(_spoken, inner))
    if origin is tuple:
        return f"a list, each {_spoken(inner[0])}"
    if origin is Mapping:
        return f"a table, each {_spoken(inner[1])}"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return words[origin]
