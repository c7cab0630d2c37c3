"""What a browser is shown of a run: answers to the questions of `questions.toml`, as JSON.

An answer is made once for all who ask, and not again before something that it depends on is
written; one that took long is kept for longer, so that looking costs a bounded share of a core.
"""

import json
import math
import threading
import time
import tomllib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from esper.leyline.errors import EsperError
from esper.nissa import RunReader, Thresholds
from esper.show.run_facts import control_of, read_controls
from esper.watch.found_runs import FoundRun

POINTS = 300  # of a curve
LARGEST = 2**53  # number in an address
REST = 10.0  # times as long as it took to make, an answer is kept
KEPT_ANSWERS, KEPT_BYTES = 512, 64 << 20
LAID_OUT = ("environments", "episode", "growth")  # views that need names of slots and actions
TOLD = ("suite", "rounds", "epochs", "controller", "controllers", "episodes", "envs", "horizon")

Numbers = Mapping[str, int]  # from the address


class QuestionError(EsperError):
    """An address that asks for nothing that there is."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A part of the page."""

    kinds: frozenset[str]  # of events, after which it is another
    needs: frozenset[str]  # numbers that the address must have
    may: frozenset[str]  # and those that it may
    answers: Mapping[str, Mapping[str, str]]  # by kind of run, "" for all: SQL by name

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "View":
        parts = {name.partition("_of_")[::2]: part for name, part in said.items()}
        own = {kind: part for (name, kind), part in parts.items() if name == "answers"}
        needs, may = (frozenset(said.get(name, ())) for name in ("needs", "may"))
        return cls(kinds=frozenset(said["kinds"].split()), needs=needs, may=may, answers=own)

    def numbers(self, given: Mapping[str, str]) -> dict[str, int]:
        """The numbers of an address, refused if they are not the ones that are needed."""
        names, known = given.keys() - {"view", "run"}, self.needs | self.may
        sound = self.needs <= names <= known
        if not sound or not all(given[name].isdecimal() for name in names):
            raise QuestionError(
                "The address asks with other numbers",
                given=", ".join(sorted(names))[:200],
                valid=", ".join(sorted(known)) or "none",
            )
        return {name: min(int(given[name][:17]), LARGEST) for name in names}


VIEWS = {
    name: View.of(said)
    for name, said in tomllib.loads(
        Path(__file__).with_name("questions.toml").read_text(encoding="utf-8")
    ).items()
}


def answered(name: str, run: FoundRun, numbers: Numbers) -> dict[str, Any]:
    """A view of a run."""
    config = run.start.get("config", {})
    model = config.get("model", {})
    shown: dict[str, Any] = {**run.known(), "kind": run.kind, "began": run.start.get("time")}
    shown["began_at"] = run.start.get("round", 0)
    shown["about"] = {each: config[each] for each in TOLD if each in config}
    shown["about"]["model"] = model.get("name")
    shown["kinds"] = sorted(VIEWS[name].kinds)
    wide = max(1, math.ceil((run.round + 1) / (POINTS if name != "summary" else 48)))
    with RunReader(run.file) as reader:
        known = {"round": run.round, "first": 0, "wide": wide, **numbers}
        for kind, questions in VIEWS[name].answers.items():
            for asked, sql in questions.items() if kind in ("", run.kind) else ():
                found = reader.query(sql, known)
                rows = [[plain(value) for value in row] for row in found.rows]
                shown[asked] = {"columns": found.columns, "rows": rows}
        shown["layout"] = asdict(reader.layout) if name in LAID_OUT else None
        if name == "decision":
            shown["decision"] = _decision(reader, numbers)
            heads, actions = reader.layout.heads, reader.layout.actions
            shown["names"] = dict(zip(heads, actions, strict=True))
        if name == "episode":
            shown["control"] = _control(run, reader, known)
    if name in ("training", "growth", "evaluation"):
        shown |= {"config": config, "versions": run.start.get("versions", {})}
        shown["thresholds"] = asdict(Thresholds())
    return shown | {"round": known["round"], "wide": wide}


def _control(run: FoundRun, reader: RunReader, numbers: Numbers) -> list[float] | None:
    """The curve of the same case, never grown; None while that is not known."""
    curve = None
    for row in reader.query(VIEWS["episode"].answers[""]["ended"], numbers):
        curve = control_of(row, read_controls(run.file.parent))
    return None if curve is None else plain(curve.tolist())


def _decision(reader: RunReader, numbers: Numbers) -> dict[str, Any] | None:
    """With all that was known when it was taken."""
    known = reader.decisions(numbers["round"], numbers["env"])
    found = next((each for each in known if each.step == numbers["step"]), None)
    return None if found is None else plain(asdict(found))


def plain(value: Any) -> Any:
    """As JSON can hold it, numbers with six digits; what is no number is nothing."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in value]
    return f"{len(value)} bytes" if isinstance(value, bytes) else value


# --- answers that are kept -----------------------------------------------------------------------


@dataclass
class _Kept:
    version: object
    until: float  # it is not made anew before
    text: bytes


class Answers:
    """Views as JSON, kept for all who ask; the oldest ones are forgotten."""

    def __init__(self) -> None:
        self._kept: OrderedDict[object, _Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._making: dict[object, threading.Lock] = {}

    def ask(self, name: str, run: FoundRun, numbers: Numbers) -> tuple[bytes, bool]:
        """The view as JSON, and whether it is as it is now, or was a moment ago."""
        key = (name, run.name, *sorted(numbers.items()))
        with self._alone(key):
            version = [run.changed.get(kind, 0) for kind in sorted(VIEWS[name].kinds)]
            with self._lock:
                found = self._kept.get(key)
            now = time.monotonic()
            if found is not None and (found.version == version or now < found.until):
                return found.text, found.version == version
            text = json.dumps(answered(name, run, numbers), allow_nan=False).encode()
            done = time.monotonic()
            self._keep(key, _Kept(version, done + REST * (done - now), text))
            return text, True

    @contextmanager
    def _alone(self, key: object) -> Iterator[None]:
        """One at a time makes an answer; the others wait for it and take it."""
        with self._lock:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            yield
        with self._lock:
            if not lock.locked():
                self._making.pop(key, None)

    def _keep(self, key: object, kept: _Kept) -> None:
        with self._lock:
            old = self._kept.pop(key, None)
            self._kept[key] = kept
            self._bytes += len(kept.text) - (0 if old is None else len(old.text))
            while len(self._kept) > KEPT_ANSWERS or self._bytes > KEPT_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1].text)
