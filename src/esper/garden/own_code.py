"""Python files of yours: run by their path, and their failures told in one line.

A run's folder may come from anywhere, and so may the code that it names. What you started a run
with is remembered outside of all of them, by its path and its hash.
"""

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from esper.archive.files import append_lines
from esper.leyline.errors import EsperError


def remember(files: Iterable[str]) -> None:
    """Let these files, as they are, be run again by what a run's folder says."""
    with suppress(OSError):  # then it is asked for each time
        _memory().parent.mkdir(parents=True, exist_ok=True)
        append_lines(_memory(), map(_mark, _unknown(files)))


def allow_code(files: Iterable[str], run: Path, *, quiet: bool = True) -> None:
    """Refuse code that a run's folder names unless it is known, or agreed to if it is asked."""
    named = list(dict.fromkeys(files))
    if _unknown(named) and not quiet:
        print(f"{run} names code that is not known: {', '.join(_unknown(named))}")
        print("Type yes to run it: ", end="", flush=True)
        if sys.stdin is not None and sys.stdin.readline().strip() == "yes":
            remember(named)
    if unknown := _unknown(named):
        what = f"{run} names code that no run was started with from here, as it is now"
        fix = "look at it, and type yes when esper resume asks; or name it: --model, --data"
        raise EsperError(what, given=", ".join(unknown), fix=fix)
    if named and not quiet:
        print(f"Running the code in {', '.join(named)}", flush=True)


def _unknown(files: Iterable[str]) -> list[str]:
    known = _memory().read_text(encoding="utf-8").splitlines() if _memory().is_file() else []
    return [file for file in files if Path(file).is_file() and _mark(file) not in known]


def _memory() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "esper" / "code.txt"


def _mark(file: str) -> str:
    return f"{hashlib.sha256(Path(file).read_bytes()).hexdigest()} {Path(file).resolve()}"


def run_file(file: Path) -> ModuleType:
    """The module that a file is, run once; it may import what lies beside it."""
    known = {}
    # A file may be called like a package that is imported already.
    for name in (file.stem, f"own_{file.stem}"):
        known[name] = sys.modules.get(name)
        home = getattr(known[name], "__file__", None)
        if home is not None and Path(home).resolve() == file.resolve():
            return known[name]  # type: ignore[return-value]  # what has a file is there
    free = known[file.stem] is None and file.stem.isidentifier()
    name = file.stem if free else f"own_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # now or later
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a program that reads its own options ends itself
        del sys.modules[name]
        if isinstance(error, EsperError):
            raise
        raise EsperError(f"{file} cannot be imported", given=spoken(error, str(file))) from error
    return module


def spoken(error: BaseException, file: str) -> str:
    """The error in one line, with the line of the file where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(file).name]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = (error.msg if isinstance(error, SyntaxError) else str(error)).partition("\n")[0]
    return f"{type(error).__name__}: {text}" + (f" (line {line})" if line else "")
