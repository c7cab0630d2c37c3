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
    """Return `__getattr__`, `__dir__` and `__all__` for `package`, from its `__init__.py`.

    Names imported under `if TYPE_CHECKING:` are exported: `from .module import name` exports a name
    of this package, `from esper.other import name` a name of another one, and
    `from . import module` a submodule.
    """
    module = sys.modules[package]
    assert module.__file__ is not None
    source = Path(module.__file__)
    modules: dict[str, str] = {}  # exported name -> module that defines it
    submodules: set[str] = set()  # submodules that are exported themselves
    for node in _type_checking_imports(ast.parse(source.read_text(encoding="utf-8"))):
        for alias in node.names:
            if node.module is None:
                submodules.add(alias.name)
            elif node.level == 0:
                modules[alias.name] = node.module
            else:
                modules[alias.name] = f"{package}.{node.module}"
    # Importing a submodule would overwrite an export of the same name.
    assert not any(source.with_name(f"{name}.py").exists() for name in modules)

    def getattr_(name: str) -> object:
        value: object
        if name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        elif name in modules:
            value = getattr(importlib.import_module(modules[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(module, name, value)
        return value

    names = sorted({*modules, *submodules})
    return getattr_, lambda: names, names


def _type_checking_imports(tree: ast.Module) -> list[ast.ImportFrom]:
    """Return the `from ... import` statements under `if TYPE_CHECKING:`."""
    imports = []
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports += [inner for inner in node.body if isinstance(inner, ast.ImportFrom)]
    return imports
