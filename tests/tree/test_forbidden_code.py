"""What may not appear in src/: unsafe calls anywhere, torch.nn in leyline.

The syntax tree is searched rather than the text, so prose and `model.eval()` are no findings.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "esper"

UNSAFE_NAMES = {"eval", "exec"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_ATTRIBUTES = {"torch.load", "builtins.eval", "builtins.exec"}
UNSAFE_KEYWORDS = {"shell", "allow_pickle"}
EVERY_INTERFACE = "0.0.0.0"  # noqa: S104


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for such an expression, and an empty string for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def mentions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and dotted name of everything imported and of every attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield node.lineno, name


def prose(tree: ast.AST) -> set[ast.expr]:
    """Return the strings that stand alone as statements: docstrings."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def unsafe_code(source: str) -> list[str]:
    """Return `line: what` for everything in `source` that could run or expose foreign code."""
    tree = ast.parse(source)
    found = [
        (line, name)
        for line, name in mentions(tree)
        if name in UNSAFE_ATTRIBUTES or name.split(".")[0] in UNSAFE_MODULES
    ]
    docstrings = prose(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name in UNSAFE_NAMES:
                found.append((node.lineno, name))
            case ast.keyword(value=ast.Constant(value=False)):
                continue
            case ast.keyword(arg=name) if name in UNSAFE_KEYWORDS:
                found.append((node.lineno, f"{name}="))
            case ast.Constant(value=str(text)) if EVERY_INTERFACE in text:
                if node not in docstrings:
                    found.append((node.lineno, EVERY_INTERFACE))
    return [f"{line}: {what}" for line, what in sorted(found)]


def neural_modules(source: str) -> list[str]:
    """Return `line: name` for every use of torch.nn in `source`."""
    return [
        f"{line}: {name}"
        for line, name in sorted(mentions(ast.parse(source)))
        if name == "torch.nn" or name.startswith("torch.nn.")
    ]


def test_the_sources_hold_no_unsafe_code() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): unsafe
        for path in SOURCE.rglob("*.py")
        if (unsafe := unsafe_code(path.read_text(encoding="utf-8")))
    }
    assert not found


def test_leyline_does_not_use_neural_network_modules() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): uses
        for path in (SOURCE / "leyline").rglob("*.py")
        if (uses := neural_modules(path.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "run = exec",
        "import builtins\nbuiltins.eval('1')",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=chosen)",
        "numpy.load(path, allow_pickle=True)",
        "torch.load(path)",
        "from torch import load",
        "serve(host='0.0.0.0')",
        "url = f'http://0.0.0.0:{port}'",
    ],
)
def test_unsafe_code_is_found(source: str) -> None:
    assert unsafe_code(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""No pickle here, no eval( and no torch.load(; never bind 0.0.0.0."""',
        "model.eval()",
        "state.load(path)",
        "subprocess.run(command, shell=False)",
        "serve(host='127.0.0.1')",
    ],
)
def test_harmless_code_is_not_found(source: str) -> None:
    assert not unsafe_code(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.nn",
        "import torch.nn.functional as F",
        "from torch import nn",
        "from torch.nn import Module",
        "import torch\nlayer = torch.nn.Linear(1, 1)",
    ],
)
def test_a_neural_network_module_is_found(source: str) -> None:
    assert neural_modules(source)


def test_plain_torch_is_not_a_neural_network_module() -> None:
    assert not neural_modules("import torch\nfrom torch import Tensor\ntorch.zeros(3)")
