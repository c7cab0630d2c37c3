"""Code of yours, named on the command line as `file.py:name`."""

import ast
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from esper.leyline.errors import EsperError, UnknownNameError


class CodeError(EsperError):
    """A file of yours that is missing, fails, or does not hold what was named."""


def absolute(text: str) -> str:
    """`file.py:name` with the whole path, so that it means the same from anywhere."""
    file, colon, name = text.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if colon else text


def load_named(text: str, what: str) -> object:
    """What `file.py:name` names, after the file was run; `what` says what is looked for."""
    file_text, colon, name = text.rpartition(":")
    if not colon:
        file_text, name = text, ""
    file = Path(file_text)
    if file.suffix != ".py" or not file.is_file():
        raise CodeError(
            f"There is no Python file for the {what}",
            given=text,
            valid=f"FILE.py:NAME, such as my_{what}.py:Net",
            fix=_similar(file),
        )
    if not name:
        raise CodeError(
            f"Say which part of {file} is the {what}",
            given=text,
            valid=", ".join(f"{file}:{each}" for each in _defined(file)) or "FILE.py:NAME",
        )
    module = _run(file)
    if not hasattr(module, name):
        raise UnknownNameError.of(f"name in {file}", name, _defined(file))
    return getattr(module, name)


def build_model(text: str, seed: int) -> nn.Module:
    """The model that `file.py:name` names: a class or a function without arguments, or the model
    itself. Its first weights follow from the seed."""
    thing = load_named(text, "model")
    if isinstance(thing, nn.Module):
        return thing
    if not callable(thing):
        raise CodeError(
            f"{text} is not a model",
            given=type(thing).__name__,
            valid="a subclass of nn.Module, a function that returns one, or one itself",
        )
    torch.manual_seed(seed)
    model = call_named(thing, text, "returns the model")
    if not isinstance(model, nn.Module):
        raise CodeError(
            f"{text} does not give a model", given=type(model).__name__, valid="an nn.Module"
        )
    return model


def call_named(thing: object, text: str, purpose: str) -> object:
    """Call a function or class of yours that takes no arguments."""
    assert callable(thing)
    try:
        needed = [
            each.name
            for each in inspect.signature(thing).parameters.values()
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # something built in
        needed = []
    if needed:
        file, _, name = text.rpartition(":")
        raise CodeError(
            f"{name} needs arguments",
            given=", ".join(needed),
            fix=f"write a function without arguments in {file} that {purpose}, and name that",
        )
    try:
        return thing()
    except EsperError:
        raise
    except Exception as error:
        raise CodeError(f"{text} fails", given=spoken(error, text.rpartition(":")[0])) from error


def _run(file: Path) -> ModuleType:
    folder, known = str(file.resolve().parent), sys.modules.get(file.stem)
    home = getattr(known, "__file__", None)
    if known is not None and home is not None and Path(home).resolve() == file.resolve():
        return known
    # A file may be called like a package that is imported already.
    name = file.stem if known is None and file.stem.isidentifier() else f"own_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # it may import what lies beside it, now or later
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


def _similar(file: Path) -> str | None:
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    found = sorted(each.name for each in file.parent.glob("*.py"))[:5]
    return f"in {file.parent.resolve().name} there are {', '.join(found)}" if found else None


def _defined(file: Path) -> list[str]:
    """Classes and functions at the top of a file, found without running it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
