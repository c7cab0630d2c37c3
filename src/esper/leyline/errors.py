"""One tree of errors for people: what happened, what was given, what is valid, how to fix it."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Self, TypeVar

V = TypeVar("V")

# The optional dependencies of pyproject.toml that a feature needs.
Extra = Literal[
    "export",
    "gym",
    "lightning",
    "mlflow",
    "report",
    "tensorboard",
    "transformers",
    "wandb",
    "watch",
]


class EsperError(Exception):
    """Base of every error Esper raises on purpose."""

    def __init__(
        self, what: str, *, given: object = None, valid: object = None, fix: str | None = None
    ) -> None:
        self.what, self.given, self.valid, self.fix = what, given, valid, fix
        parts = [what]
        if given is not None:
            parts.append(f"given: {given}")
        if valid is not None:
            parts.append(f"valid: {valid}")
        if fix is not None:
            parts.append(fix)
        sentence = "; ".join(parts)
        super().__init__(sentence if sentence.endswith(("?", ".")) else sentence + ".")


def install_hint(extra: Extra) -> str:
    """Return how to install an optional dependency that is missing.

    Esper is not on a package index, so its extras are installed from a checkout.
    """
    return f"install it from Esper's checkout: pip install '.[{extra}]'"


def first_line(error: BaseException) -> str:
    """Of what another library says, which may run over many lines."""
    return next(iter(str(error).strip().splitlines()), "")


def in_short(error: BaseException) -> str:
    """What others' code raised, in a line; an error that says no more than a key has its name."""
    said: str = getattr(error, "strerror", None) or first_line(error)
    vague = isinstance(error, LookupError) or not said
    return f"{type(error).__name__}: {said}".removesuffix(": ") if vague else said


@contextmanager
def in_words(
    what: str,
    kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
    *,
    given: str = "",
    valid: object = None,
    fix: str | None = None,
    error: type[EsperError] = EsperError,
    say: Callable[[Exception], str] = in_short,
) -> Iterator[None]:
    """What others' code raises inside becomes one sentence.

    Errors that are sentences already stay as they are; `given` stands before what was said.
    """
    try:
        yield
    except EsperError:
        raise
    except kinds as cause:
        raise error(what, given=f"{given}{say(cause)}", valid=valid, fix=fix) from cause


def printable(text: str) -> str:
    """Without what a terminal would obey, in place of showing it: files come from anywhere."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)


class UnknownNameError(EsperError):
    """A name that is not in a registry; suggests the one that was probably meant."""

    @classmethod
    def of(cls, kind: str, name: object, valid: Iterable[str], fix: str | None = None) -> Self:
        known = list(valid)
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else None
        advice = "; ".join(part for part in (fix, hint) if part)
        listed = ", ".join(known) if known else "none are registered"
        return cls(f"Unknown {kind}", given=repr(name), valid=listed, fix=advice or None)


def require_known(kind: str, name: object, known: Iterable[str], fix: str | None = None) -> None:
    """Refuse a name that is not among those that are known."""
    if name not in (names := list(known)):
        raise UnknownNameError.of(kind, name, names, fix)


def require_equal(
    what: str, given: object, valid: object, fix: str, error: type[EsperError] = EsperError
) -> None:
    """Refuse what is not the same as it was before."""
    if given != valid:
        raise error(what, given=given, valid=valid, fix=fix)


def place_of(kind: str, name: str, names: Sequence[str]) -> int:
    """Where a name stands among those that are known; another one is refused."""
    require_known(kind, name, names)
    return names.index(name)


class DuplicateNameError(EsperError):
    """A name registered twice."""


def register(kind: str, name: str, value: V, known: dict[str, V]) -> V:
    """Make something known by a name that nothing else of its kind has."""
    if name in known:
        raise DuplicateNameError(
            f"{kind} {name!r} is already registered",
            valid="a name not among " + ", ".join(known),
            fix="choose another name",
        )
    known[name] = value
    return value


class AgreementError(EsperError):
    """Two parts that must have the same shape do not."""


class IllegalTransitionError(EsperError):
    """A stage change that the transition table does not contain."""


class GateRefusedError(EsperError):
    """An action whose gate does not accept it."""


class ActionError(EsperError):
    """Actions that are malformed: wrong shape, type or range."""


class BlueprintError(EsperError):
    """A blueprint that cannot serve: wrong output shape, no zero point, does not fit the slot."""


class SlotError(EsperError):
    """A place in a model that cannot carry a slot, with the reason."""


class OptimizerMismatchError(EsperError):
    """Optimiser and model do not hold the same parameters."""


class ExportError(EsperError):
    """A grown model that could not be exported, or whose export did not match."""


class DataError(EsperError):
    """Data that is missing, damaged or of the wrong shape."""
