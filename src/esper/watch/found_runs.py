"""Runs below some folders: found as they appear, followed as they are written, and how each stands.

Nothing is opened while nothing has changed: a run's file is looked at from outside first. What is
read is read at once and closed, so that whoever writes the file is never held up.
"""

import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from esper.archive.run_folders import LOCK
from esper.nissa import RunReader
from esper.nissa.store import FILE
from esper.show.terminal import duration

DEPTH = 5  # folders below the one that is named
MOST_RUNS = 1000
SCAN_SECONDS, SCAN_REST = 2.0, 20.0  # between looks for new runs, and in units of what one took
LIFE_SECONDS = 1.0  # between looks whether a process still holds a run
QUIET_SECONDS = 600.0  # without a word, after which a run counts as stale though it is held
UNHELD_SECONDS = 120.0  # and one that nobody can be seen to hold
OF_RESULTS = ".jsonl.sqlite"  # how files beside those of evaluations end
RUNNING, STALE, UNREADABLE = "running", "stale", "unreadable"
ENDED = ("finished", "stopped", "failed")  # what runs say of themselves
_PASSED = re.compile(r"[._]|(checkpoints?|best|report|node_modules)$")  # folders without runs


class FoundRun:
    """One run's file, as far as it has been followed."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self.changed: dict[str, int] = {}  # by kind of events: the look that saw the last one
        self.last, self.round, self.time = 0, 0, 0.0  # number, round and time of the last event
        self.start: dict[str, Any] = {}  # the last start or resumption, with all it told
        self.state, self.why = RUNNING, ""
        self._end: tuple[str, str] | None = None  # how it ended, if it said so since
        self._stamp: object = None
        self._asked = 0.0  # when it was last judged

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.start.get("config", {}))

    @property
    def kind(self) -> str:
        if "epoch" in self.changed or "metric" in self.config:
            return "growth"
        return "evaluation" if "controllers" in self.config else "training"

    def look(self, number: int) -> bool:
        """Follow what was written since; True if anything is new. `number` is that of the look."""
        before, stamp = self.state, self._seen()
        written = stamp != self._stamp
        if written:
            self._stamp = stamp
            try:
                self._follow(number)
                self._judge()
            except Exception as error:  # whatever a damaged file may cause
                self.state, self.why = UNREADABLE, str(error)
        elif before == RUNNING and time.monotonic() - self._asked > LIFE_SECONDS:
            self._judge()
        if self.state != before:
            self.changed["state"] = number
        return written or self.state != before

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
            fresh = reader.query("SELECT DISTINCT kind FROM events WHERE id > ?", (self.last,)).rows
            self.changed |= {kind: number for (kind,) in fresh}
            lately = "SELECT id, round, time FROM events ORDER BY id DESC LIMIT 1"
            for self.last, self.round, self.time in reader.query(lately).rows:
                pass
            if ("run",) in fresh:
                began = "SELECT time FROM events WHERE kind = 'run' ORDER BY id DESC LIMIT 1"
                self.start = {**reader.runs()[-1], "time": reader.query(began).rows[0][0]}
            ends = "SELECT state, text FROM ends WHERE event > ? ORDER BY event DESC LIMIT 1"
            said = reader.query(ends, (self.start.get("event", 0),)).rows
            self._end = next((each for each in said if each[0] in ENDED), None)

    def _judge(self) -> None:
        """Does it go on? What it said counts most, then whether a process holds it."""
        self._asked, silent = time.monotonic(), max(0.0, time.time() - self.time)
        held = _is_held(self.file.parent / LOCK)
        held = held or (None if self.file.name != FILE else held)  # not every evaluation has one
        self.state, self.why = self._end or (RUNNING, "")
        if self._end is None and held is False:
            self.state, self.why = STALE, f"its process is gone, silent for {duration(silent)}"
        elif self._end is None and silent > (QUIET_SECONDS if held else UNHELD_SECONDS):
            self.state, self.why = STALE, f"there was no word for {duration(silent)}"

    def known(self) -> dict[str, Any]:
        """What a browser is told when something has changed."""
        moment = {"round": self.round, "time": self.time, "last": self.last}
        return {"run": self.name, "state": self.state, "why": self.why, **moment}


def _is_held(lock: Path) -> bool | None:
    """Does a process of this machine hold the run? None: there is nothing to hold."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
        self._scan_at = 0.0
        self._lock = threading.Lock()

    def look(self) -> None:
        """Find new runs and follow all of them."""
        with self._lock:
            if (began := time.monotonic()) >= self._scan_at:
                self._scan()
                took = time.monotonic() - began
                self._scan_at = time.monotonic() + max(SCAN_SECONDS, SCAN_REST * took)
            number = self.looks + 1
            news = [run.look(number) for run in self.runs.values()]
            self.looks += any(news)

    def since(self, look: int) -> list[dict[str, Any]]:
        """Every run that has changed since that look, with the kinds of its new events."""
        news = ((run, [*run.changed.items()]) for run in [*self.runs.values()])
        fresh = ((run, [kind for kind, seen in kinds if seen > look]) for run, kinds in news)
        return [{**run.known(), "kinds": kinds} for run, kinds in fresh if kinds]

    def _scan(self) -> None:
        """Names are those of folders, from the root on."""
        runs = {name: run for name, run in self.runs.items() if run.file.exists()}
        files = {run.file for run in runs.values()}
        for root in self.roots:
            for file in _stores(root, DEPTH):
                if file not in files and len(runs) < MOST_RUNS:
                    own = file.parent / file.name.removesuffix(FILE).removesuffix(OF_RESULTS)
                    name = own.relative_to(root).as_posix() if own != root else root.name
                    name = name if name not in runs else f"{name} ({file})"
                    runs[name] = FoundRun(name, file)
        self.runs = runs


def _stores(folder: Path, depth: int) -> Iterator[Path]:
    """Files of runs; no link is followed, so nothing outside is ever read."""
    with suppress(OSError):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_file(follow_symlinks=False):
                if entry.name == FILE or entry.name.endswith(OF_RESULTS):
                    yield Path(entry.path)
            elif entry.is_dir(follow_symlinks=False) and not _PASSED.match(entry.name) and depth:
                yield from _stores(Path(entry.path), depth - 1)
