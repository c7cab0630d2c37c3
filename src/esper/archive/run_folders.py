"""Folders of runs: known by what is in them, made once, and written by one process at a time.

A training, a network that grows and a study each keep their run in a folder. `KeptFolder` is what
they have in common, and each kind extends it:

    class GrowthFolder(KeptFolder):
        kind = RunKind.GROWTH

    folder = GrowthFolder(out)
    folder.require_fresh(fix="name another directory")  # or .require_run(fix=...) to go on
    with folder.locked():                               # creates the folder, locks RUN/lock
        folder.write("facts.json", {...})               # whole or not at all

Imports no torch.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from esper.archive.files import unfinished, write_whole
from esper.leyline.errors import EsperError, in_words

LOCK = "lock"
LAUNCH = "launch.json"  # the launch of several processes that started the run
LOCK_SECONDS = 3.0  # time in which the child processes of a killed run have to end
LOCK_RETRY_SECONDS = 0.05  # between two attempts to lock


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
        self._lock: os.stat_result | None = None  # the lock file, while this process holds it

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
        beginnings = (LAUNCH, *self.beginnings)
        ours = {LOCK, *beginnings}
        ours |= {unfinished(self.path / name).name for name in (*beginnings, self.kind)}
        return not self.holds_run and {each.name for each in self.path.iterdir()} <= ours

    def require_fresh(self, *, fix: str) -> None:
        """Refuse a folder, or a file, that holds something already."""
        if not self.is_fresh:
            raise self.error(f"{self.path} is not empty", fix=fix)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Create the folder if necessary and hold its lock.

        The lock is a file lock (flock), which the system releases when its process ends. Child
        processes of a killed run may hold the lock a moment longer, so locking is retried for
        `LOCK_SECONDS`. The lock protects a folder from other processes of the same machine. Two
        machines that share a disk are not protected from each other.

        Yields:
            The descriptor of the lock file.

        Raises:
            EsperError: The folder cannot be created, or another process holds the lock.
        """
        with os.fdopen(self._open_lock_file(), "r+", encoding="utf-8") as lock_file:
            descriptor = lock_file.fileno()
            self._acquire_lock(descriptor)
            self._lock = os.fstat(descriptor)
            try:
                # The text is information for people. Nothing compares it.
                _overwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n")
                self.require_held()
                yield descriptor
            finally:
                self._lock = None
                with suppress(OSError):
                    _overwrite(descriptor, "")

    def _open_lock_file(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # A symbolic link is not followed: it may lead to a file outside of the folder.
            return os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            fix = "name a directory that can be made and written to"
            raise self.error(f"{error.filename} cannot be made", given=error, fix=fix) from error

    def _acquire_lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise self.error(
                    f"{self.path} is being trained by another process",
                    given=f"process {_read_lock_holder(descriptor) or 'unknown'}",
                    fix="wait for it or stop it",
                )
            time.sleep(LOCK_RETRY_SECONDS)

    def require_held(self) -> None:
        """Refuse to write if the folder at this path is not the folder that was locked.

        Raises:
            EsperError: The lock file at this path is missing or is another file.
        """
        if self._lock is not None and not _is_same_file(self.path / LOCK, self._lock):
            raise self.error(
                f"{self.path} is no longer the folder in which this run started",
                given="the folder or its lock file was moved, deleted or replaced",
                fix="nothing was written since then: restore it and continue with esper resume",
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


def _read_lock_holder(descriptor: int) -> str:
    """Return the process and host that the lock file names, or an empty string."""
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip()


def _overwrite(descriptor: int, text: str) -> None:
    length = os.pwrite(descriptor, text.encode(), 0)
    os.ftruncate(descriptor, length)
    os.fsync(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_same_file(path: Path, expected: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), expected)
    except OSError:
        return False
