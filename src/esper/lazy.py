"""Lazy package exports, so that importing a package does not import torch.

A package's `__init__.pyi` lists what it exports (`from .module import name as name`): type
checkers read it directly, and `attach` reads it at run time, so the list exists once.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def attach(
    package: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for `package`, from its `__init__.pyi`."""
    module = sys.modules[package]
    assert module.__file__ is not None
    stub = Path(module.__file__).with_suffix(".pyi")
    homes: dict[str, str] = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                homes[alias.name] = f"{package}.{node.module}"
    # Importing a submodule would overwrite an export of the same name.
    assert not any(stub.with_name(f"{name}.py").exists() for name in homes)

    def getattr_(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    names = sorted(homes)
    return getattr_, lambda: names, names
