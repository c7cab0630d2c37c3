"""Lazy package exports, so that importing a package does not import torch.

A package's `__init__.py` imports what it exports under `if TYPE_CHECKING:`; type checkers read that
directly, and `attach` reads it at run time, so the list exists once.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def attach(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for `package`, from its `__init__.py`."""
    module = sys.modules[package]
    assert module.__file__ is not None
    source = Path(module.__file__)
    homes: dict[str, str] = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            homes |= {alias.name: f"{package}.{node.module}" for alias in node.names}
    # Importing a submodule would overwrite an export of the same name.
    assert not any(source.with_name(f"{name}.py").exists() for name in homes)

    def getattr_(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    names = sorted(homes)
    return getattr_, lambda: names, names
