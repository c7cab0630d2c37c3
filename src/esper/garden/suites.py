"""Suites: named lists of contexts to learn in, and of others to be judged in.

A suite's file has a `name`, a table `[[training]]` for each context, and a table
`[[heldout.GROUP]]` for each context of a held-out group; `code` names Python files that register
families of yours. docs/garden.md shows one. Two are shipped, in `data`:
`garden` on the 1-D convolutional host, `garden_mlp` on the dense one. Waiting is right in about a
quarter of their contexts: with labels that are mostly noise, with few samples and noisy labels,
and with glyphs that never move there is nothing to gain.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from esper.archive.files import as_toml, read_toml, write_whole
from esper.garden.contexts import Context, check_label, table_of, wrong_type
from esper.garden.greenhouse import VALIDATION, Greenhouse
from esper.garden.own_code import run_file
from esper.leyline.errors import DataError, DuplicateNameError, EsperError, place_of, require_known

TRAINING = "training"
CODE = "a list of Python files, beside the suite's or with their whole path"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Contexts to train in, and held-out ones in groups that say in what they differ."""

    name: str
    training: tuple[Context, ...]
    heldout: Mapping[str, tuple[Context, ...]] = field(default_factory=dict, hash=False)
    code: tuple[str, ...] = ()  # Python files that are run first: they register families

    def __post_init__(self) -> None:
        check_label("name of a suite", self.name)
        if not isinstance(self.heldout, Mapping):
            valid = "a table [[heldout.GROUP]] for each context"
            raise wrong_type("heldout in a suite", self.heldout, valid)
        object.__setattr__(self, "training", _contexts(TRAINING, self.training))
        groups = {name: _contexts(f"heldout.{name}", each) for name, each in self.heldout.items()}
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
        # What is held out must not have been trained in; names and keys must tell apart.
        keys: dict[str, str] = {}
        what = f"Two contexts of suite {self.name!r}"
        for context in self:
            if (twin := context.name) in keys.values():
                fix = "rename one of them"
                raise DuplicateNameError(f"{what} have one name", given=repr(twin), fix=fix)
            if (other := keys.setdefault(context.key, twin)) != twin:
                raise DuplicateNameError(
                    f"{what} differ in nothing but their name",
                    given=f"{other!r} and {twin!r}",
                    fix="change one of them, or give its source another seed",
                )

    def groups(self) -> dict[str, tuple[Context, ...]]:
        """All contexts, by group; `training` is the first."""
        return {TRAINING: self.training, **self.heldout}

    def __iter__(self) -> Iterator[Context]:
        """Every context, the training ones first."""
        for contexts in self.groups().values():
            yield from contexts

    def find(self, name: str) -> Context:
        """The context of that name, in any group."""
        contexts = list(self)
        names = [context.name for context in contexts]
        return contexts[place_of(f"context of suite {self.name!r}", name, names)]

    def __str__(self) -> str:
        lines = [f"suite {self.name}"]
        for name, contexts in self.groups().items():
            lines.append(f"  {name if name == TRAINING else f'held out: {name}'}")
            lines += [f"    {context}" for context in contexts]
        return "\n".join(lines)

    def fingerprints(self) -> dict[str, str]:
        """Of all data to train on, by where it comes from."""
        sources = (each for context in self.training for each in (context.source, context.drift))
        return {str(each): each.load().fingerprint() for each in sources if each is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` reads them."""
        groups = {
            name: [context.to_dict() for context in contexts]
            for name, contexts in self.groups().items()
        }
        record = {"name": self.name, TRAINING: groups.pop(TRAINING)}
        others = {"code": list(self.code), "heldout": groups}
        return record | {name: value for name, value in others.items() if value}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        given = table_of(cls, "suite", given)
        code = given.pop("code", [])
        if not isinstance(code, list) or not all(isinstance(file, str) for file in code):
            raise wrong_type("code in a suite", code, CODE)
        for file in code:
            if not Path(file).is_file():
                raise EsperError("There is no Python file for the suite", given=file, valid=CODE)
            run_file(Path(file))
        return cls(**given, code=tuple(code))


def _contexts(group: str, given: object) -> tuple[Context, ...]:
    """Contexts, or tables that describe them."""
    if not isinstance(given, list | tuple):
        raise wrong_type(f"{group} in a suite", given, f"a table [[{group}]] for each context")
    contexts = []
    for number, each in enumerate(given, start=1):
        name = each.get("name") if isinstance(each, Mapping) else None
        place = repr(name) if isinstance(name, str) else f"number {number}"
        with _errors_of(f"{group} context {place}"):
            contexts.append(each if isinstance(each, Context) else Context.from_dict(each))
    return tuple(contexts)


@contextmanager
def _errors_of(place: str) -> Iterator[None]:
    """Errors within say where they were made."""
    try:
        yield
    except EsperError as error:
        what = f"{place}: {error.what}"
        raise type(error)(what, given=error.given, valid=error.valid, fix=error.fix) from error


# --- files ---------------------------------------------------------------------------------


def load_suite(path: Path | str) -> Suite:
    """The suite in a TOML file."""
    given = read_toml(Path(path), "suite file")
    if isinstance(given.get("code"), list):
        home = Path(path).resolve().parent
        given["code"] = [str(home / file) for file in map(str, given["code"])]
    with _errors_of(f"Suite file {str(path)!r}"):
        return Suite.from_dict(given)


def save_suite(suite: Suite, path: Path | str) -> None:
    """Write a suite so that `load_suite` reads an equal one."""
    write_whole(Path(path), as_toml(suite.to_dict()))


# --- shipped -------------------------------------------------------------------------------

SUITES = ("garden", "garden_mlp")
GREENHOUSE = "greenhouse"


@lru_cache
def _shipped(name: str) -> Suite:
    return load_suite(Path(__file__).parent / "data" / f"{name}.toml")


def find_suite(name_or_path: str | Path) -> Suite:
    """A shipped suite by its name, or one of your own by the path of its TOML file."""
    name = str(name_or_path)
    if name == GREENHOUSE:  # which draws: listed are the worlds that choose a run's best agent
        worlds = tuple(plot.contexts[0] for plot in Greenhouse.listed(VALIDATION))
        return Suite(name=GREENHOUSE, training=worlds)
    if name not in SUITES and (Path(name).suffix == ".toml" or Path(name).is_file()):
        return load_suite(name)
    require_known("suite", name, SUITES, "or give the path of a TOML file of your own")
    return _shipped(name)
