"""Folders of runs: known by what is in them, made once, and written by one process at a time.

A training, a network that grows and a study each keep their run in a folder. `KeptFolder` is what
they have in common, and each kind extends it:

    class GrowthFolder(KeptFolder):
        kind, error = RunKind.GROWTH, GrowError

    folder = GrowthFolder(out)
    folder.require_fresh(fix="name another directory")  # or .require_run(fix=...) to go on
    with folder.locked():                               # makes the folder, holds RUN/lock
        folder.write("facts.json", {...})               # whole or not at all

Imports no torch.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from esper.archive.files import clear_scratch, unfinished, write_whole
from esper.leyline.errors import EsperError

LOCK = "lock"
LOCK_SECONDS = 3.0  # that children of a killed run have to end


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
        moment to notice, which is waited for. Yields the lock's descriptor, for children to hold.
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
                    stream.seek(0)
                    raise self.error(
                        f"{self.path} is being trained by another process",
                        given=f"process {stream.read().strip() or 'unknown'}",
                        fix="wait for it or stop it",
                    )
                time.sleep(0.05)
            stream.seek(0)
            stream.truncate()
            stream.write(f"{os.getpid()}\n")
            stream.flush()
            self._lock = os.fstat(lock)
            self.require_held()
            yield lock

    def require_held(self) -> None:
        """Refuse to write any more where a folder is not the one that was locked."""
        lock = self.path / LOCK
        there = self._lock is None or os.path.lexists(lock)
        if not there or (self._lock and not os.path.samestat(self._lock, os.lstat(lock))):
            raise self.error(
                f"{self.path} is no longer the folder that this run began in",
                given="it was moved, deleted or replaced, or its lock was",
                fix="nothing was written since: put it back, and go on with esper resume",
            )

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep what JSON can hold; a reader finds the file as it was or as it is now."""
        write_whole(self.path / name, json.dumps(dict(content), indent=1) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        """What was kept under this name."""
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self.error(f"{self.path / name} cannot be read", given=error) from error
        if not isinstance(found, dict):
            raise self.error(
                f"{self.path / name} is damaged", given=type(found).__name__, valid="dict"
            )
        return found


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
