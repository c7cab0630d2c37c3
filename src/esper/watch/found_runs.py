"""Runs below some folders: found as they appear, followed as they are written, and how each stands.

Nothing is opened while nothing has changed: a run's file is looked at from outside first. What is
read is read at once and closed, so that whoever writes the file is never held up.
"""

import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from esper.archive.run_folders import LOCK
from esper.leyline.errors import EsperError
from esper.nissa import RunReader, StoreError
from esper.nissa.store import FILE

DEPTH = 5  # folders below the one that is named
MOST_RUNS = 1000
SCAN_SECONDS = 2.0  # between looks for new runs
LIFE_SECONDS = 1.0  # between looks whether a process still holds a run
QUIET_SECONDS = 600.0  # without a word, after which a run counts as stale though it is held
UNHELD_SECONDS = 120.0  # and one that nobody can be seen to hold
_NOT_RUNS = {"checkpoints", "checkpoint", "best", "report", "__pycache__"}


class RunState(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # by a person; it can go on
    FAILED = "failed"
    STALE = "stale"  # it said no end, and nobody is at work on it
    UNREADABLE = "unreadable"


class FoundRun:
    """One run's file, as far as it has been followed."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self.latest: dict[str, int] = {}  # the number of the last event of every kind
        self.changed: dict[str, int] = {}  # and in which look it was first seen
        self.last = 0  # the number of the last event
        self.round, self.step, self.time = 0, None, 0.0  # of the last event
        self.start: Mapping[str, Any] = {}  # the last start or resumption, with all it told
        self.end: tuple[str, str] | None = None  # how it ended, if it said so since
        self.state, self.why = RunState.RUNNING, ""
        self._stamp: object = None
        self._asked = 0.0  # when the lock was last looked at

    @property
    def kind(self) -> str:
        """training, growth or evaluation"""
        if "epoch" in self.latest or "metric" in self.start.get("config", {}):
            return "growth"
        told = "result" in self.latest or "controllers" in self.start.get("config", {})
        return "evaluation" if told else "training"

    def look(self, number: int) -> bool:
        """Follow what was written since; True if anything is new. `number` is that of the look."""
        before, stamp = self.state, self._seen()
        written = stamp != self._stamp
        if written:
            self._stamp = stamp
            try:
                self._follow(number)
                self._judge()
            except (EsperError, OSError) as error:
                self.state, self.why = RunState.UNREADABLE, str(error)
        elif before is RunState.RUNNING and time.monotonic() - self._asked > LIFE_SECONDS:
            self._judge()
        if self.state is not before:
            self.changed["state"] = number
        return written or self.state is not before

    def _seen(self) -> object:
        """What changes from outside whenever something is written."""
        found = []
        for path in (self.file, self.file.with_name(f"{self.file.name}-wal")):
            with suppress(OSError):
                seen = path.stat()
                found += [seen.st_mtime_ns, seen.st_size, seen.st_ino]
        return found

    def _follow(self, number: int) -> None:
        with RunReader(self.file) as reader:
            fresh = reader.query(
                "SELECT kind, max(id) FROM events WHERE id > ? GROUP BY kind", (self.last,)
            )
            known = dict(fresh.rows)
            if not known:
                return
            self.latest |= known
            self.changed |= dict.fromkeys(known, number)
            self.last = max(known.values())
            found = reader.query(
                "SELECT round, step, time FROM events WHERE id = ?", (self.last,)
            ).rows
            if found:
                ((self.round, self.step, self.time),) = found
            if "run" in known:
                self.start, self.end = _last_start(reader), None
            if "end" in known:
                self.end = _last_end(reader, int(self.start.get("event", 0)))

    def _judge(self) -> None:
        """Does it go on? What it said counts most, then whether a process holds it."""
        self._asked = time.monotonic()
        if self.end is not None:
            word, self.why = self.end
            self.state = RunState(word)
            return
        silent = max(0.0, time.time() - self.time)
        held = _is_held(self.file.parent / LOCK)
        held = held or (None if self.file.name != FILE else held)  # not every evaluation has one
        if held is False or silent > (QUIET_SECONDS if held else UNHELD_SECONDS):
            self.state = RunState.STALE
            gone = "its process is gone" if held is False else "its process says nothing"
            self.why = f"{gone}; the last word came {_spoken(silent)} ago"
            return
        self.state, self.why = RunState.RUNNING, ""

    def known(self) -> dict[str, Any]:
        """What a browser is told when something has changed."""
        moment = {"round": self.round, "step": self.step, "time": self.time, "last": self.last}
        return {"run": self.name, "state": self.state, "why": self.why, **moment}


def _last_start(reader: RunReader) -> dict[str, Any]:
    starts = reader.runs()
    if not starts:
        return {}
    last = starts[-1]
    (when,) = reader.query("SELECT time FROM events WHERE id = ?", (last["event"],)).rows
    return {**last, "time": when[0], "starts": len(starts)}


def _last_end(reader: RunReader, since: int) -> tuple[str, str] | None:
    found = reader.query(
        "SELECT state, text FROM ends WHERE event > ? ORDER BY event DESC LIMIT 1", (since,)
    ).rows
    known = [(state, text) for state, text in found if state in list(RunState)]
    return known[0] if known else None


def _spoken(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def _is_held(lock: Path) -> bool | None:
    """Does a process of this machine hold the run? None: there is nothing to hold."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go when it is closed
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


class Lookout:
    """All runs below some folders."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.resolve() for root in roots]
        self.runs: dict[str, FoundRun] = {}
        self.looks = 0  # that found something
        self._scanned = -SCAN_SECONDS
        self._lock = threading.Lock()

    def look(self) -> bool:
        """Find new runs and follow all of them; True if anything has changed."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN_SECONDS:
                self._scan()
                self._scanned = time.monotonic()
            number = self.looks + 1
            news = [run.look(number) for run in self.runs.values()]
            self.looks = number if any(news) else self.looks
            return any(news)

    def since(self, look: int) -> list[dict[str, Any]]:
        """Every run that has changed since that look, with the kinds of its new events."""
        found = []
        for run in list(self.runs.values()):
            kinds = [kind for kind, seen in list(run.changed.items()) if seen > look]
            if kinds:
                found.append({**run.known(), "kinds": sorted(kinds)})
        return found

    def _scan(self) -> None:
        self.runs = {name: run for name, run in self.runs.items() if run.file.exists()}
        files = {str(run.file) for run in self.runs.values()}
        found = [(root, file) for root in self.roots for file in _stores(root, DEPTH)]
        for root, file in found:
            if str(file) in files or len(self.runs) >= MOST_RUNS:
                continue
            if file.name == FILE or _is_store(file):
                name = self._name(root, file)
                self.runs[name] = FoundRun(name, file)

    def _name(self, root: Path, file: Path) -> str:
        """How people call it: its folder, from the root on."""
        place = file.parent if file.name == FILE else file.with_suffix("").with_suffix("")
        parts = place.relative_to(root).parts or (root.name,)
        if len(self.roots) > 1 and place != root:
            parts = (root.name, *parts)
        name = "/".join(parts)
        return name if name not in self.runs else f"{name} ({file.name})"


def _is_store(file: Path) -> bool:
    """Is a file of another name a run's?"""
    with suppress(StoreError), RunReader(file):
        return True
    return False


def _stores(folder: Path, depth: int) -> Iterator[Path]:
    """Files that may hold runs; no link is followed, so nothing outside is ever read."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat(follow_symlinks=False).st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode) and entry.name.endswith(".sqlite"):
            yield Path(entry.path)
        inside = depth and entry.name not in _NOT_RUNS and not entry.name.startswith(".")
        if stat.S_ISDIR(mode) and inside:
            yield from _stores(Path(entry.path), depth - 1)
