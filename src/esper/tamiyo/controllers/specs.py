"""Settings as one word for the command line: `name:setting=value,setting=value`.

Lists are joined by `+`, blends are written in lower case, `none` turns a setting off.
"""

import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.legality import Actions, Legality
from esper.leyline.ops import Blend
from esper.leyline.signals import Signals


class Settings(Protocol):
    """A frozen dataclass whose fields are what can be set."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


S = TypeVar("S", bound=Settings)

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
_WORDS = {"true": True, "false": False}


def parse_settings(name: str, text: str, kind: type[S]) -> S:
    """The settings in `text`; unknown, missing and malformed ones are refused by name."""
    known = {field.name: field for field in fields(kind) if field.init}
    hints = get_type_hints(kind)
    given: dict[str, object] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if key not in known:
            fix = None if known else f"write it as {name!r} alone"
            raise UnknownNameError.of(f"setting of controller {name!r}", key, known, fix)
        if not equals or not value or key in given:
            raise EsperError(
                f"Setting {key!r} of controller {name!r} needs one value",
                given=repr(text),
                valid=f"{key}=VALUE, once",
            )
        given[key] = _parsed(f"Setting {key!r} of controller {name!r}", value, hints[key])
    missing = [key for key, field in known.items() if key not in given and _is_required(field)]
    if missing:
        raise EsperError(
            f"Controller {name!r} needs more settings",
            given=repr(text),
            valid=f"also {', '.join(missing)}, as in {name}:{missing[0]}=VALUE",
        )
    return kind(**given)


def spec_of(name: str, settings: Settings) -> str:
    """The word that `parse_settings` turns back into these settings; defaults are left out."""
    shown: Mapping[str, str] = {
        field.name: written(value)
        for field in fields(settings)
        if field.init and (value := getattr(settings, field.name)) != field.default
    }
    listed = ",".join(f"{key}={value}" for key, value in shown.items())
    return f"{name}:{listed}" if listed else name


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _parsed(what: str, text: str, kind: Any) -> object:
    if get_origin(kind) is tuple:
        return tuple(_parsed(what, part, get_args(kind)[0]) for part in text.split("+"))
    if get_origin(kind) in (Union, types.UnionType):
        if text == "none":
            return None
        kind = next(option for option in get_args(kind) if option is not types.NoneType)
    if kind is Blend:
        return Blend.named(text)
    if kind is bool and text in _WORDS:
        return _WORDS[text]
    try:
        if kind is not bool:
            value: object = kind(text)
            return value
    except ValueError:
        pass
    raise EsperError(f"{what} has the wrong form", given=repr(text), valid=_KINDS[kind])


def written(value: object) -> str:
    """A setting's value as it stands in a description."""
    if isinstance(value, tuple):
        return "+".join(map(written, value))
    if isinstance(value, Enum):
        return value.name.lower()
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


class OwnSettings(ABC):
    """A controller that is its own settings; its name is the word that makes it again."""

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str:
        return spec_of(self.kind, self)

    @abstractmethod
    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions: ...
