"""The matrix: every operation, disturbed at every place where it changes its folder.

Places are found by tracing: Python announces every folder that is made, every file that is opened
to be written, every rename and every removal. A cell is (operation, place, fault). It runs in a
fork of this process; then what its message advises is done, in other forks without a fault, and
must come to what the undisturbed operation came to.
"""

import contextlib
import errno
import functools
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.programs import esper_here

PARTIAL = 24  # bytes that are written of a file before the disk is full, or the writer is killed
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
ADVICE = 4  # commands that may follow one another until all is well


class Place(NamedTuple):
    """The number of a change, what it does, and to what."""

    number: int
    event: str
    name: str


def changed(event: str, given: tuple[Any, ...], root: str) -> str | None:
    """The path that an announced event changes, if it is one of ours."""
    if event == "open":
        path, _, flags = given
        if not isinstance(flags, int) or not flags & WRITING:
            return None
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.rename"):
        path = given[0]
    else:
        return None
    if isinstance(path, int) or not isinstance(path, (str, bytes, os.PathLike)):
        return None
    text = os.path.abspath(os.fsdecode(path))
    return text if text.startswith(root) else None


# --- faults: each hears of every change, and strikes from the one with its number on -----------


def kill(number: int, place: Place) -> None:
    if place.number == number:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_in_write(number: int, place: Place) -> None:
    """The kernel ends whoever writes more than these bytes."""
    if place.number == number:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PARTIAL, resource.RLIM_INFINITY))


def full(number: int, place: Place) -> None:
    if place.number >= number and place.event != "os.remove" and place.event != "os.rmdir":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place.name)


def full_in_write(number: int, place: Place) -> None:
    """Nobody can write more than these bytes into a file from here on, telemetry included."""
    if place.number == number:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PARTIAL, resource.RLIM_INFINITY))


def read_only(number: int, place: Place) -> None:
    if place.number >= number:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), place.name)


FAULTS: dict[str, Callable[[int, Place], None]] = {
    "killed": kill,
    "killed in a write": kill_in_write,
    "disk full": full,
    "disk full in a write": full_in_write,
    "read-only": read_only,
}
IN_WRITES = ("killed in a write", "disk full in a write")  # only where a file is opened


# --- operations ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """A command, what stands before it, and what must be the same whatever happened to it."""

    name: str
    words: Callable[[Path], list[object]]
    prepare: Callable[[Path], None]
    result: Callable[[Path], Any]
    home: Path = field(compare=False)

    def folder(self, name: str) -> Path:
        """A folder in which it can be run; all of them have the same length."""
        place = self.home / f"{self.name}-{name}"
        place.mkdir()
        self.prepare(place)
        return place


class Ended(NamedTuple):
    code: int  # below 0: killed by that signal
    said: str
    places: list[Place]
    modules: list[str]  # that it imported


def run(words: list[object], root: Path, strike: Callable[[Place], None] | None = None) -> Ended:
    """Run `esper words...` in a fork; what it changes below `root` is traced."""
    said, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(said)
        code = 70
        try:
            places, before = list[Place](), set(sys.modules)
            _trace(os.path.abspath(root), places, strike)
            ended = esper_here(*words)
            code = ended.returncode
            modules = [name for name in sys.modules if name not in before]
            text = json.dumps([ended.stdout[-8000:], ended.stderr[-8000:], places, modules])
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            with os.fdopen(told, "w") as stream:
                stream.write(text)
        finally:
            os._exit(code)
    os.close(told)
    with os.fdopen(said) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    out, err, found, modules = json.loads(text) if text else ("", "", [], [])
    places = [Place(*each) for each in found]
    return Ended(os.waitstatus_to_exitcode(status), f"{out}\n{err}", places, modules)


class Undisturbed(NamedTuple):
    folder: Path
    result: Any
    places: list[Place]


@functools.cache
def undisturbed(operation: Operation) -> Undisturbed:
    """What it comes to without a fault, and where it changes its folder."""
    folder = operation.folder("undist")
    whole = run(operation.words(folder), folder)
    assert whole.code == 0, whole.said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that a library keeps for others
        for name in whole.modules:  # once, in place of in every fork
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    return Undisturbed(folder, operation.result(folder), whole.places)


def _trace(root: str, places: list[Place], strike: Callable[[Place], None] | None) -> None:
    busy = False

    def hear(event: str, given: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy or not (event == "open" or event.startswith("os.")):
            return
        busy = True
        try:
            path = changed(event, given, root)
            if path is not None:
                place = Place(len(places), event, path)
                places.append(place)
                if strike is not None:
                    strike(place)
        finally:
            busy = False

    sys.addaudithook(hear)


# --- cells ---------------------------------------------------------------------------------------


class Cell(NamedTuple):
    operation: str
    place: Place
    fault: str


def cells_of(operation: Operation, places: list[Place]) -> Iterator[Cell]:
    for place in places:
        for fault in FAULTS:
            if place.event == "open" or fault not in IN_WRITES:
                yield Cell(operation.name, place, fault)


def advised(said: str, folder: Path, words: list[object]) -> list[object]:
    """The command that a message names for this folder; where it names none, the same again."""
    path = re.escape(str(folder))
    found = re.findall(rf"esper resume ({path}\S*?)[.,;]?(?:\s|$)", said)
    if found and words[0] in ("grow", "train"):
        return ["resume", found[-1], "--quiet"]
    return words


def try_cell(operation: Operation, cell: Cell, number: int) -> str | None:
    """What went wrong in this cell; None: nothing."""
    wanted = undisturbed(operation).result
    folder = operation.folder(f"{number:06d}")
    words = operation.words(folder)
    try:
        strike = FAULTS[cell.fault]
        ended = run(words, folder, lambda place: strike(cell.place.number, place))
        problem = _wrong_words(ended, cell.fault)
        if problem:
            return problem
        for _ in range(ADVICE):
            if ended.code == 0 and operation.result(folder) == wanted:
                return None
            again = advised(ended.said, folder, words)
            if ended.code != 0 or again != words:
                words_now = again
            else:
                break
            ended = run(words_now, folder)
            problem = _wrong_words(ended, "nothing")
            if problem:
                return f"then, by {words_now[0]}: {problem}"
        found = operation.result(folder)
        return None if found == wanted else f"it came to something else: {_apart(found, wanted)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _apart(found: Any, wanted: Any) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
        return ", ".join(map(str, names[:4]))
    return f"{str(found)[:150]} in place of {str(wanted)[:150]}"


def _wrong_words(ended: Ended, fault: str) -> str | None:
    """An end that no person should see: no sentence, or more than one line of an error."""
    if ended.code < 0:
        return None if "kill" in fault else f"signal {-ended.code}"
    if "Traceback" in ended.said:
        return "a traceback: " + ended.said.strip().splitlines()[-1]
    if ended.code not in (0, 2, 130):
        return f"exit code {ended.code}: {ended.said[-300:]}"
    if ended.code == 2 and "esper: " not in ended.said:
        return f"no sentence: {ended.said[-300:]}"
    return None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Pictures are made but not painted, which takes the time."""
    from esper.show import theme

    alone = theme.render
    theme.render = lambda draw, look: bytes(bool(draw(look)))
    try:
        yield
    finally:
        theme.render = alone
