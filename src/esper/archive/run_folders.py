"""Folders of runs: known by what is in them, made once, and written by one process at a time.

A training, a network that grows and a study each keep their run in a folder. `KeptFolder` is what
they have in common, and each kind extends it:

    class GrowthFolder(KeptFolder):
        kind = RunKind.GROWTH

    folder = GrowthFolder(out)
    folder.require_fresh(fix="name another directory")  # or .require_run(fix=...) to go on
    with folder.locked():                               # makes the folder, holds RUN/lock
        folder.write("facts.json", {...})               # whole or not at all

Imports no torch.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from esper.archive.files import clear_scratch, unfinished, write_whole
from esper.leyline.errors import EsperError, in_words

LOCK = "lock"
LOCK_SECONDS = 3.0  # that children of a killed run have to end
BEAT_SECONDS = 5.0  # between two beats of the heart of whoever holds a lock
SILENT_BEATS = 4  # missed, after which it has stopped


class RunKind(StrEnum):
    """What a folder holds a run of; the value is the file or folder that makes it one."""

    TRAINING = "config.toml"
    GROWTH = "checkpoint/manifest.json"
    LEARNING = "learning.json"
    STUDY = "study.json"  # written when it is finished


class KeptFolder:
    """The files of one run."""

    kind: ClassVar[RunKind]
    error: ClassVar[type[EsperError]] = EsperError  # what is raised
    beginnings: ClassVar[tuple[str, ...]] = ()  # what is written before the run is one

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: os.stat_result | None = None  # while this process holds it

    @classmethod
    def next_in(cls, home: Path, stem: str) -> Path:
        """A name that is not taken: the stem and a number."""
        number = 1
        while not cls(home / f"{stem}-{number}").is_fresh:
            number += 1
        return home / f"{stem}-{number}"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def holds_run(self) -> bool:
        return (self.path / self.kind).exists()

    def require_run(self, what: str, *, fix: str) -> None:
        """Refuse a folder that holds no run; `what` it should be, as in "is not a run"."""
        if not self.holds_run:
            given = f"no {self.kind} in it" if self.path.exists() else "no such directory"
            raise self.error(f"{self.path} {what}", given=given, fix=fix)

    @property
    def is_fresh(self) -> bool:
        """Is it absent, empty, or what is left of a run that was never made?"""
        if not self.path.is_dir():
            return not self.path.exists()
        ours = {LOCK, *self.beginnings}
        ours |= {unfinished(self.path / each).name for each in (*self.beginnings, self.kind)}
        return not self.holds_run and {each.name for each in self.path.iterdir()} <= ours

    def require_fresh(self, *, fix: str) -> None:
        """Refuse a folder, or a file, that holds something already."""
        if not self.is_fresh:
            raise self.error(f"{self.path} is not empty", fix=fix)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the folder, made if need be; refused while another process does.

        A lock does not outlive the processes that hold it; those of a run that was killed need a
        moment to notice, which is waited for. On a folder that machines share, a lock of another
        one counts for as long as its heart beats. Yields the lock's descriptor.
        """
        clear_scratch()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # A link is not followed: it may lead to a file of another's.
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            fix = "name a directory that can be made and written to"
            raise self.error(f"{error.filename} cannot be made", given=error, fix=fix) from error
        with os.fdopen(lock, "r+", encoding="utf-8") as stream:
            until = time.monotonic() + LOCK_SECONDS
            while not _taken(stream.fileno()):
                if time.monotonic() > until:
                    raise self._held()
                time.sleep(0.05)
            self._require_silence()
            self._lock, ended = os.fstat(lock), threading.Event()
            beating = threading.Thread(target=self._beat, args=(lock, ended), daemon=True)
            _write(lock, f"{_holder()}, 0\n")
            self.require_held()
            beating.start()
            try:
                yield lock
            finally:
                ended.set()
                beating.join()
                if self._is_ours():
                    with suppress(OSError):
                        _write(lock, "")

    def _held(self) -> EsperError:
        given = f"process {self._noted().partition(',')[0] or 'unknown'}"
        what = f"{self.path} is being trained by another process"
        return self.error(what, given=given, fix="wait for it or stop it")

    def _noted(self) -> str:
        """Who holds the lock, and how often its heart has beaten."""
        try:
            return (self.path / LOCK).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""

    def _is_ours(self) -> bool:
        return self._noted().partition(",")[0] == _holder()

    def _require_silence(self) -> None:
        """Of another machine, whose lock nothing here can see: its heart must have stopped."""
        noted, until = self._noted(), time.monotonic() + SILENT_BEATS * BEAT_SECONDS
        if noted.partition(",")[0].partition(" on ")[2] not in ("", socket.gethostname()):
            while time.monotonic() < until:
                time.sleep(BEAT_SECONDS / 10)
                if self._noted() != noted:
                    raise self._held()

    def _beat(self, lock: int, ended: threading.Event) -> None:
        beats = 0
        while not ended.wait(BEAT_SECONDS) and self._is_ours():
            beats += 1
            with suppress(OSError):  # whoever writes the run's files will tell
                _write(lock, f"{_holder()}, {beats}\n")

    def require_held(self) -> None:
        """Refuse to write any more where a folder is not the one that was locked."""
        lock = self.path / LOCK
        there = self._lock is None or (os.path.lexists(lock) and self._is_ours())
        if not there or (self._lock and not os.path.samestat(self._lock, os.lstat(lock))):
            raise self.error(
                f"{self.path} is no longer the folder that this run began in",
                given="it was moved, deleted or replaced, or its lock was, or taken over",
                fix="nothing was written since: put it back, and go on with esper resume",
            )

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep what JSON can hold; a reader finds the file as it was or as it is now."""
        write_whole(self.path / name, json.dumps(dict(content), indent=1) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        """What was kept under this name."""
        with in_words(f"{self.path / name} cannot be read", error=self.error):
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise self.error(
                f"{self.path / name} is damaged", given=type(found).__name__, valid="dict"
            )
        return found


def _holder() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, os.pwrite(descriptor, text.encode(), 0))
    os.fsync(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
