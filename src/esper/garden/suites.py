"""Suites: named lists of contexts to learn in, and of others to be judged in.

A suite's file has a `name`, a table `[[training]]` for each context, and a table
`[[heldout.GROUP]]` for each context of a held-out group; `code` names Python files that register
families of yours. docs/garden.md shows one. Two are shipped:
`garden` on the 1-D convolutional host, `garden_mlp` on the dense one. Waiting is right in about a
quarter of their contexts: with labels that are mostly noise, with few samples and noisy labels,
and with glyphs that never move there is nothing to gain.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

from esper.archive.files import as_toml, read_toml, write_whole
from esper.garden.contexts import Context, Lesion, Source, check_label, table_of
from esper.garden.own_code import CodeError, run_file
from esper.leyline.errors import DataError, DuplicateNameError, EsperError, UnknownNameError

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
        if self.code:
            record["code"] = list(self.code)
        if self.heldout:
            record["heldout"] = {
                name: [context.to_dict() for context in contexts]
                for name, contexts in self.heldout.items()
            }
        return record

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        given = table_of(cls, "suite", given)
        code = given.get("code", [])
        if not isinstance(code, list) or not all(isinstance(file, str) for file in code):
            raise DataError("Wrong type of code in a suite", given=repr(code), valid=CODE)
        for file in code:
            if not Path(file).is_file():
                raise CodeError("There is no Python file for the suite", given=file, valid=CODE)
            run_file(Path(file))
        heldout = given.get("heldout", {})
        if not isinstance(heldout, Mapping):
            raise DataError(
                "Wrong type of heldout in a suite",
                given=repr(heldout),
                valid="a table [[heldout.GROUP]] for each context",
            )
        groups = {name: _contexts(f"heldout.{name}", group) for name, group in heldout.items()}
        return cls(
            name=given["name"],
            training=_contexts(TRAINING, given[TRAINING]),
            heldout=groups,
            code=tuple(code),
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
    given = read_toml(Path(path), "suite file")
    if isinstance(given.get("code"), list):
        home = Path(path).resolve().parent
        given["code"] = [str(home / file) for file in map(str, given["code"])]
    try:
        return Suite.from_dict(given)
    except EsperError as error:
        raise _elsewhere(f"Suite file {str(path)!r}", error) from error


def save_suite(suite: Suite, path: Path | str) -> None:
    """Write a suite so that `load_suite` reads an equal one."""
    write_whole(Path(path), as_toml(suite.to_dict()))


# --- shipped -------------------------------------------------------------------------------

# Points of accuracy that count as 1: the net gain of the best arm, averaged over the contexts of a
# family, at least MIN_REWARD_SCALE; from the shipped atlas.
SCALES = {
    "conv1d": {
        "mnist1d": 10.0,
        "gain": 20.0,
        "xor": 55.0,
        "shuffled": 3.0,
        "noise": 3.0,
        "small": 3.0,
        "fixed": 3.0,
        "lesion": 9.0,
        "drift": 9.0,
        "drift_xor": 28.5,
    },
    "mlp": {
        "mnist1d": 32.0,
        "gain": 37.0,
        "xor": 13.0,
        "noise": 3.0,
        "fixed": 3.0,
        "lesion": 11.5,
        "drift": 26.5,
    },
}


def _context(
    name: str,
    source: Source,
    *,
    family: str | None = None,
    lesion: str | None = None,
    drift: Source | None = None,
    host: str = "conv1d",
    sizes: tuple[tuple[str, int], ...] = (),
) -> Context:
    """A context with its family's scale; `lesion` is written like narrow-0."""
    harm = None
    if lesion is not None:
        kind, stage = lesion.split("-")
        harm = Lesion(kind=kind, stage=int(stage))
    special = "lesion" if harm else "drift" if drift else source.family
    family = family or special
    return Context(
        name=name,
        family=family,
        source=source,
        lesion=harm,
        drift=drift,
        host=host,
        host_sizes=sizes,
        scale=SCALES[host][family],
    )


def _glyphs(**parameters: float) -> Source:
    return _source("mnist1d", **parameters)


def _source(family: str, **parameters: float) -> Source:
    return Source(family=family, **parameters)  # type: ignore[arg-type]  # checked by Source


def _garden() -> Suite:
    training = (
        _context("mnist1d-4000", _glyphs()),
        _context("mnist1d-1000", _glyphs(samples=1000)),
        _context("mnist1d-clear", _glyphs(noise=0.1)),
        _context("mnist1d-near", _glyphs(translation=8)),
        _context("gain-1.0", _source("gain", gain=1.0)),
        _context("gain-3.0", _source("gain", gain=3.0)),
        _context("xor-0.05", _source("xor", noise=0.05)),
        _context("xor-0.2", _source("xor", noise=0.2)),
        _context("shuffled-0", _source("shuffled", order=0)),
        _context("noise-70", _glyphs(samples=2000, label_noise=0.7), family="noise"),
        _context("noise-80", _glyphs(label_noise=0.8), family="noise"),
        _context("xor-noise-80", _source("xor", label_noise=0.8), family="noise"),
        _context("shuffled-noise-80", _source("shuffled", label_noise=0.8), family="noise"),
        _context("small-20", _glyphs(samples=500, label_noise=0.2), family="small"),
        _context("small-40", _glyphs(samples=500, label_noise=0.4), family="small"),
        _context("fixed-0.25", _source("fixed")),
        _context("tap-0", _glyphs(), lesion="tap-0"),
        _context("narrow-1", _glyphs(), lesion="narrow-1"),
        _context("tap-2", _glyphs(), lesion="tap-2"),
        _context("gain-narrow-0", _source("gain"), lesion="narrow-0", family="gain"),
        _context("mnist1d-to-gain", _glyphs(), drift=_source("gain")),
        _context("fixed-to-mnist1d", _source("fixed"), drift=_glyphs()),
        _context("fixed-to-xor", _source("fixed"), drift=_source("xor"), family="drift_xor"),
        _context("noise-to-gain", _glyphs(label_noise=0.6), drift=_source("gain")),
    )
    task = (
        _context("mnist1d-2500", _glyphs(samples=2500, amplitude=0.8, seed=1)),
        _context("gain-2.0", _source("gain", gain=2.0, samples=3000, seed=1)),
        _context("xor-0.12", _source("xor", noise=0.12, samples=3000, seed=1)),
        _context("shuffled-2", _source("shuffled", order=2, seed=1)),
        _context("noise-75", _glyphs(label_noise=0.75, seed=1), family="noise"),
        _context("small-30", _glyphs(samples=600, label_noise=0.3, seed=1), family="small"),
        _context("fixed-0.35", _source("fixed", noise=0.35, seed=1)),
        _context("clear-to-gain", _glyphs(noise=0.1, seed=1), drift=_source("gain", seed=1)),
    )
    host = tuple(
        _context(f"{label}-{kind}", source, family=family, sizes=(size,))
        for kind, size in (
            ("c6", ("channels", 6)),
            ("c12", ("channels", 12)),
            ("k3", ("kernel", 3)),
            ("k7", ("kernel", 7)),
        )
        for label, family, source in (
            ("mnist1d", None, _glyphs()),
            ("gain", None, _source("gain")),
            ("xor", None, _source("xor")),
            ("noise", "noise", _glyphs(label_noise=0.8)),
        )
    )
    lesion = (
        _context("narrow-0", _glyphs(), lesion="narrow-0"),
        _context("tap-1", _glyphs(), lesion="tap-1"),
        _context("narrow-2", _glyphs(), lesion="narrow-2"),
        _context("xor-tap-1", _source("xor"), lesion="tap-1", family="xor"),
    )
    return Suite(
        name="garden",
        training=training,
        heldout={"task": task, "host": host, "lesion": lesion},
    )


def _garden_mlp() -> Suite:
    context = partial(_context, host="mlp")
    training = (
        context("mnist1d-4000", _glyphs()),
        context("mnist1d-1000", _glyphs(samples=1000)),
        context("gain-2.0", _source("gain")),
        context("xor-0.2", _source("xor", noise=0.2)),
        context("xor-0.05", _source("xor", noise=0.05), family="fixed"),
        context("noise-80", _glyphs(label_noise=0.8), family="noise"),
        context("xor-noise-80", _source("xor", label_noise=0.8), family="noise"),
        context("fixed-0.25", _source("fixed")),
        context("fixed-narrow-1", _source("fixed"), lesion="narrow-1"),
        context("xor-narrow-1", _source("xor"), lesion="narrow-1"),
        context("mnist1d-to-gain", _glyphs(), drift=_source("gain")),
        context("fixed-to-mnist1d", _source("fixed"), drift=_glyphs()),
    )
    task = (
        context("mnist1d-2500", _glyphs(samples=2500, amplitude=0.8, seed=1)),
        context("gain-1.5", _source("gain", gain=1.5, seed=1)),
        context("noise-70", _glyphs(samples=2000, label_noise=0.7, seed=1), family="noise"),
    )
    host = tuple(
        replace(each, name=f"{each.name}-w{width}", host_sizes=(("width", width),))
        for width in (12, 24)
        for each in (training[0], training[5])
    )
    lesion = (
        context("narrow-1", _glyphs(), lesion="narrow-1"),
        context("narrow-2", _glyphs(), lesion="narrow-2"),
    )
    return Suite(
        name="garden_mlp",
        training=training,
        heldout={"task": task, "host": host, "lesion": lesion},
    )


_BUILD: dict[str, Callable[[], Suite]] = {"garden": _garden, "garden_mlp": _garden_mlp}


def suite_names() -> tuple[str, ...]:
    """The suites that are shipped."""
    return tuple(_BUILD)


@lru_cache
def _shipped(name: str) -> Suite:
    return _BUILD[name]()


def find_suite(name_or_path: str | Path) -> Suite:
    """A shipped suite by its name, or one of your own by the path of its TOML file."""
    name = str(name_or_path)
    if name in _BUILD:
        return _shipped(name)
    if Path(name).suffix == ".toml" or Path(name).is_file():
        return load_suite(name)
    raise UnknownNameError.of(
        "suite", name, suite_names(), fix="or give the path of a TOML file of your own"
    )
