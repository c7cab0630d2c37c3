"""Suites: named lists of contexts to learn in, and of others to be judged in; TOML files of them.

A suite's file has a `name`, a table `[[training]]` for each context, and a table
`[[heldout.GROUP]]` for each context of a held-out group. docs/garden.md shows one.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from esper.garden.contexts import Context, check_label
from esper.leyline.errors import DataError, DuplicateNameError, EsperError, UnknownNameError

TRAINING = "training"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Contexts to train in, and held-out ones in groups that say in what they differ."""

    name: str
    training: tuple[Context, ...]
    heldout: Mapping[str, tuple[Context, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_label("name of a suite", self.name)
        object.__setattr__(self, "training", tuple(self.training))
        groups = {name: tuple(contexts) for name, contexts in self.heldout.items()}
        object.__setattr__(self, "heldout", groups)
        for name in groups:
            check_label("name of a held-out group", name)
        if TRAINING in groups:
            raise EsperError(
                f"A held-out group of suite {self.name!r} cannot be called {TRAINING!r}",
                fix="name it after what differs in it, like task, host or lesion",
            )
        for name, contexts in self.groups().items():
            if not contexts:
                raise DataError(
                    f"Suite {self.name!r} has no contexts in {name!r}",
                    valid="at least one training context, and one in each held-out group",
                )
        self._refuse_twins()

    def groups(self) -> dict[str, tuple[Context, ...]]:
        """All contexts, by group; `training` is the first."""
        return {TRAINING: self.training, **self.heldout}

    def __iter__(self) -> Iterator[Context]:
        """Every context, the training ones first."""
        for contexts in self.groups().values():
            yield from contexts

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def find(self, name: str) -> Context:
        """The context of that name, in any group."""
        named = {context.name: context for context in self}
        if name not in named:
            raise UnknownNameError.of(f"context of suite {self.name!r}", name, named)
        return named[name]

    def __str__(self) -> str:
        lines = [f"suite {self.name}"]
        for name, contexts in self.groups().items():
            lines.append(f"  {name if name == TRAINING else f'held out: {name}'}")
            lines += [f"    {context}" for context in contexts]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` reads them."""
        record: dict[str, Any] = {
            "name": self.name,
            TRAINING: [context.to_dict() for context in self.training],
        }
        if self.heldout:
            record["heldout"] = {
                name: [context.to_dict() for context in contexts]
                for name, contexts in self.heldout.items()
            }
        return record

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        known = ("name", TRAINING, "heldout")
        for key in given:
            if key not in known:
                raise UnknownNameError.of("key of a suite", key, known)
        for key in ("name", TRAINING):
            if key not in given:
                raise DataError(
                    f"A suite lacks its {key}",
                    given=", ".join(given) or "nothing",
                    valid="a name, and a table [[training]] for each context",
                )
        heldout = given.get("heldout", {})
        if not isinstance(heldout, Mapping):
            raise DataError(
                "Wrong type of heldout in a suite",
                given=repr(heldout),
                valid="a table [[heldout.GROUP]] for each context",
            )
        groups = {name: _contexts(f"heldout.{name}", group) for name, group in heldout.items()}
        return cls(
            name=given["name"], training=_contexts(TRAINING, given[TRAINING]), heldout=groups
        )

    def _refuse_twins(self) -> None:
        """What is held out must not have been trained in; names and keys must tell apart."""
        names: set[str] = set()
        keys: dict[str, str] = {}
        for context in self:
            if context.name in names:
                raise DuplicateNameError(
                    f"Two contexts of suite {self.name!r} have one name",
                    given=repr(context.name),
                    fix="rename one of them",
                )
            if context.key in keys:
                raise DuplicateNameError(
                    f"Two contexts of suite {self.name!r} differ in nothing but their name",
                    given=f"{keys[context.key]!r} and {context.name!r}",
                    fix="change one of them, or give its source another seed",
                )
            names.add(context.name)
            keys[context.key] = context.name


def _contexts(group: str, given: object) -> tuple[Context, ...]:
    if not isinstance(given, list):
        raise DataError(
            f"Wrong type of {group} in a suite",
            given=repr(given),
            valid=f"a table [[{group}]] for each context",
        )
    contexts = []
    for number, each in enumerate(given, start=1):
        name = each.get("name") if isinstance(each, Mapping) else None
        place = repr(name) if isinstance(name, str) else f"number {number}"
        try:
            contexts.append(Context.from_dict(each))
        except EsperError as error:
            raise _elsewhere(f"{group} context {place}", error) from error
    return tuple(contexts)


def _elsewhere(place: str, error: EsperError) -> EsperError:
    """The same error, saying where it was made."""
    what = f"{place}: {error.what}"
    return type(error)(what, given=error.given, valid=error.valid, fix=error.fix)


# --- files ---------------------------------------------------------------------------------


def load_suite(path: Path | str) -> Suite:
    """The suite in a TOML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DataError(f"The suite file {str(path)!r} cannot be read", given=reason) from error
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"The suite file {str(path)!r} is not TOML", given=error) from error
    try:
        return Suite.from_dict(given)
    except EsperError as error:
        raise _elsewhere(f"Suite file {str(path)!r}", error) from error


def save_suite(suite: Suite, path: Path | str) -> None:
    """Write a suite so that `load_suite` reads an equal one."""
    record = suite.to_dict()
    blocks = [f"name = {_toml(suite.name)}\n"]
    groups = {TRAINING: record[TRAINING]}
    groups |= {f"heldout.{_toml(name)}": each for name, each in record.get("heldout", {}).items()}
    for name, contexts in groups.items():
        for context in contexts:
            lines = [f"{key} = {_toml(value)}\n" for key, value in context.items()]
            blocks.append(f"[[{name}]]\n" + "".join(lines))
    Path(path).write_text("\n".join(blocks), encoding="utf-8")


def _toml(value: object) -> str:
    """A value of a context, on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)  # strings and numbers are written alike
