"""Every module minds its own objects, and a name means one thing.

An attribute belongs to the module whose classes declare or assign it. Whoever else assigns it, or
reads one that begins with an underscore, reaches into another module's objects.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "esper"
MODULES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "studies").rglob("*.py")])

# Objects of torch and of the standard library, which offer no other way.
FOREIGN_ROOTS = {"torch", "dynamo", "os", "nn", "ctx"}  # ctx: of an autograd function
FOREIGN_FIELDS = {"grad", "training", "requires_grad", "data", "type", "args", "__doc__"}
FOREIGN_FIELDS |= {"log_severity_level"}  # of onnxruntime's options
FOREIGN_PRIVATE = {"_replace", "_asdict", "_fields"}  # of named tuples, where they are public
FOREIGN_PRIVATE |= {"_modules", "_parameters", "_buffers", "_forward_hooks", "_codegen"}
FOREIGN_PRIVATE |= {"_tracer_cls", "_schema", "_overloadname", "_compiled_call_impl"}
FOREIGN_PRIVATE |= {"_non_persistent_buffers_set", "_state_dict_pre_hooks", "_version"}


def own_fields(tree: ast.Module) -> set[str]:
    """What the classes of a module declare, define or assign to themselves."""
    names = set()
    for class_ in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(class_):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif _is_stored(node) and _is_own(node.value):
                names.add(node.attr)
    return names


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)


def _is_own(value: ast.expr) -> bool:
    """Is it `self`, `cls` or `super()`?"""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _root(node: ast.expr) -> str:
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def reaches(source: str) -> Iterator[str]:
    """Where a module assigns or reads what belongs to another one's objects."""
    tree = ast.parse(source)
    own = own_fields(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or _is_own(node.value):
            continue
        name = node.attr
        if name in own or _root(node) in FOREIGN_ROOTS:
            continue
        private = name.startswith("_") and not name.startswith("__")
        if _is_stored(node) and name not in FOREIGN_FIELDS | FOREIGN_PRIVATE:
            yield f"line {node.lineno} assigns {ast.unparse(node)}"
        elif private and name not in FOREIGN_PRIVATE:
            yield f"line {node.lineno} reads {ast.unparse(node)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_keeps_to_its_own_objects(path: Path) -> None:
    found = list(reaches(path.read_text(encoding="utf-8")))
    assert not found, "give the owner a method that does this"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(host):\n    host.alpha = 1", 1),
        ("def f(host):\n    host.alpha += 1", 1),
        ("def f(host):\n    del host.alpha", 1),
        ("def f(host):\n    a, host.alpha = 1, 2", 1),
        ("def f(host):\n    return host._rows", 1),
        ("def f(host):\n    return host.pool._rows[0]", 1),
        ("class A:\n    _rows: int\ndef f(a):\n    return a._rows", 0),
        (
            "class A:\n    def __init__(self):\n        self.alpha = 0\ndef f(a):\n    a.alpha = 1",
            0,
        ),
        ("def f(tensor):\n    tensor.grad = None", 0),
        ("class A:\n    def f(self):\n        return super()._rows", 0),
    ],
)
def test_reaching_into_others_is_noticed(source: str, found: int) -> None:
    assert len(list(reaches(source))) == found


def test_no_two_modules_have_one_name() -> None:
    homes = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.stem != "__init__":
            homes[path.stem].append(path.relative_to(PACKAGE).as_posix())
    twice = {stem: found for stem, found in homes.items() if len(found) > 1}
    assert not twice


def test_no_two_public_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(PACKAGE).as_posix())
    del homes["EsperCallback"]  # in the words of each library that has callbacks
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not twice
