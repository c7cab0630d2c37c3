"""Python files of yours: run by their path, and their failures told in one line."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from esper.leyline.errors import EsperError


class CodeError(EsperError):
    """A file of yours that is missing, fails, or does not hold what was named."""


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
        raise CodeError(f"{file} cannot be imported", given=spoken(error, str(file))) from error
    return module


def spoken(error: BaseException, file: str) -> str:
    """The error in one line, with the line of the file where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(file).name]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = (error.msg if isinstance(error, SyntaxError) else str(error)).partition("\n")[0]
    return f"{type(error).__name__}: {text}" + (f" (line {line})" if line else "")
