"""A captured graph as lines of Python that call torch and nothing else.

Every operation is one line, `relu = torch.relu(conv2d)`. Headings name the module it came from,
and at the end of such a section what nobody needs any more is deleted, as a function that
returns would do. Operations that have no name of their own in torch are spelled
`torch.ops.aten.name.overload`, which is always right.
"""

import builtins
import keyword
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from esper.leyline.errors import ExportError

INDENT = "    "
WEIGHTS, DEVICE = "w", "device"  # the names under which the lines find them
# What a line of the written file may mean by these names.
RESERVED = frozenset(
    {"self", "torch", "F", "nn", "math", "operator", WEIGHTS, DEVICE}
    | {"require", "require_value", "read_weights", "namedtuple", "OrderedDict", "Path", "json"}
    | {"Model", "BUFFERS", "FROZEN", "DTYPES"}
    | set(keyword.kwlist)
    | set(dir(builtins))
)

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
_TENSOR_INFIX = {"add.Tensor": "+", "sub.Tensor": "-", "mul.Tensor": "*", "div.Tensor": "/"}
# Python functions of torch.nn.functional whose arguments are those of the operation.
_FUNCTIONAL = {"adaptive_avg_pool2d", "hardswish", "leaky_relu", "silu", "elu", "mish", "hardtanh"}
# Methods that are Python functions with the operation's arguments, and others that are not.
_METHODS = {"unflatten.int", "split.Tensor", "to.dtype", "to.device", "to.other"}
_NO_METHODS = {"to"}
# Recorded while the graph was made; the inputs are checked where they come in.
_DROPPED = {"_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size"}
_WHOLE = 2**63 - 1  # the end of a slice that has none


def refuse(reason: str, fix: str = "the format pt2 has no such limit") -> ExportError:
    return ExportError("The network cannot be written as Python", given=reason, fix=fix)


class Lines:
    """Writes graphs; remembers which name stands for which node."""

    def __init__(self, names: Mapping[fx.Node, str], taken: set[str], root: fx.GraphModule) -> None:
        self.lines: list[str] = []
        self._names = dict(names)
        self._taken = set(taken)
        self._root = root
        self._heading = ""

    def write(self, graph: fx.Graph, *, keep: Sequence[fx.Node] = ()) -> None:
        """Every operation of the graph, in order; values in `keep` are never deleted."""
        last = _last_uses(graph, keep)
        waiting: list[str] = []  # names that a section leaves behind
        for node in graph.nodes:
            if node.op == "get_attr":
                continue  # the body of a block: written where it is entered
            if node.op not in ("call_function", "placeholder", "output"):
                raise refuse(f"its graph holds a {node.op} of {node.target}")
            if node.op != "call_function":
                continue
            if _heading(node) not in ("", self._heading):
                self._delete(waiting)
                self._heading = _heading(node)
                self.lines.append(f"{INDENT * 2}# {self._heading}")
            self._operation(node)
            waiting += [self._names[dead] for dead in last.get(node, ()) if dead in self._names]
        self._delete(waiting)

    def text(self, value: object) -> str:
        """An argument as it is written."""
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, (list, tuple)):
            inside = ", ".join(self.text(each) for each in value)
            comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{comma})"
        if isinstance(value, torch.device):
            return DEVICE
        if isinstance(value, float) and not math.isfinite(value):
            return "math.nan" if math.isnan(value) else f"{'-' if value < 0 else ''}math.inf"
        plain = (bool, int, float, complex, str, type(None))
        if type(value) in plain or isinstance(
            value, (torch.dtype, torch.layout, torch.memory_format)
        ):
            return repr(value)
        raise refuse(f"an operation takes a {type(value).__name__}")

    # --- operations ----------------------------------------------------------------------

    def _operation(self, node: fx.Node) -> None:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            self._block(node, target.name())
            return
        if isinstance(target, torch._ops.OpOverload):
            if target._schema.name.partition("::")[2] in _DROPPED:
                return
            expression = self._torch_call(node, target)
        else:
            assert callable(target)
            expression = self._python_call(node, target)
        self._assign(node, expression)

    def _assign(self, node: fx.Node, expression: str) -> None:
        if node.users:
            self._names[node] = self._free(node.name)
            expression = f"{self._names[node]} = {expression}"
        self.lines.append(INDENT * 2 + expression)

    def _python_call(self, node: fx.Node, target: Callable[..., Any]) -> str:
        """Arithmetic on sizes, and picking from a tuple."""
        given = [self.text(each) for each in node.args]
        if target is operator.getitem:
            return f"{given[0]}[{given[1]}]"
        if target in _INFIX:
            return f"{given[0]} {_INFIX[target]} {given[1]}"
        name = getattr(target, "__name__", "")
        for home, prefix in ((math, "math"), (operator, "operator"), (torch, "torch")):
            if getattr(home, name, None) is target:
                return f"{prefix}.{name}({', '.join(given)})"
        raise refuse(f"it calls {name or target}")

    def _torch_call(self, node: fx.Node, target: torch._ops.OpOverload) -> str:
        namespace, _, name = target._schema.name.partition("::")
        args = [self.text(each) for each in node.args]
        keywords = [
            f"{key}={self.text(value)}"
            for key, value in node.kwargs.items()
            if (key, value) != ("pin_memory", False)
        ]
        call = ", ".join([*args, *keywords])
        if namespace != "aten":
            raise refuse(f"it uses the operation {target}, which torch itself does not have")
        overload = f"{name}.{target._overloadname}"
        if overload in _TENSOR_INFIX and len(args) == 2 and not keywords:
            return f"{args[0]} {_TENSOR_INFIX[overload]} {args[1]}"
        if overload == "sym_size.int":
            return f"{args[0]}.shape[{args[1]}]"
        axis = node.args[1] if overload == "slice.Tensor" and len(node.args) > 1 else None
        if isinstance(axis, int) and axis >= 0 and not keywords:
            return f"{args[0]}[{self._slice(node)}]"
        if getattr(torch._C._nn, name, None) is getattr(F, name, 0) or name in _FUNCTIONAL:
            return f"F.{name}({call})"
        if isinstance(getattr(torch, name, None), types.BuiltinFunctionType):
            return f"torch.{name}({call})"
        own = isinstance(getattr(torch._C.TensorBase, name, None), types.MethodDescriptorType)
        if overload in _METHODS or (own and name not in _NO_METHODS):
            return f"{args[0]}.{name}({', '.join([*args[1:], *keywords])})"
        return f"torch.ops.aten.{name}.{target._overloadname}({call})"

    def _slice(self, node: fx.Node) -> str:
        given: list[Any] = [*node.args, *[None] * (5 - len(node.args))]
        axis, start, end, step = given[1:]
        bounds = ["" if start in (None, 0) else self.text(start)]
        bounds.append("" if end in (None, _WHOLE) else self.text(end))
        if step not in (None, 1):
            bounds.append(self.text(step))
        return ", ".join([":"] * axis + [":".join(bounds)])

    def _block(self, node: fx.Node, name: str) -> None:
        """`with torch.autocast(...)` and `with torch.no_grad()` of the model's own code."""
        settings, body, given = _parts_of_block(node)
        if name == "wrap_with_autocast":
            device, dtype, enabled, cached = (self.text(each) for each in settings)
            opening = f"torch.autocast({device}, {dtype}, {enabled}, {cached})"
        elif name == "wrap_with_set_grad_enabled":
            opening = f"torch.set_grad_enabled({self.text(settings[0])})"
        else:
            raise refuse(f"it uses {name}, control flow that depends on data")
        inner = getattr(self._root, str(body.target))
        assert isinstance(inner, fx.GraphModule)
        places = inner.graph.find_nodes(op="placeholder")
        outer = {place: self.text(value) for place, value in zip(places, given, strict=True)}
        lines = Lines(self._names | outer, self._taken, inner)
        results = inner.graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        lines.write(inner.graph, keep=[each for each in results if isinstance(each, fx.Node)])
        self._taken |= lines._taken
        self.lines.append(f"{INDENT * 2}with {opening}:")
        self.lines += [INDENT + line for line in lines.lines]
        self._assign(node, lines.text(tuple(results)))

    # --- names ---------------------------------------------------------------------------

    def _free(self, name: str) -> str:
        while name in self._taken or name in RESERVED:
            name += "_"
        self._taken.add(name)
        return name

    def _delete(self, names: list[str]) -> None:
        if names:
            self.lines.append(f"{INDENT * 2}del {', '.join(names)}")
            names.clear()


def _parts_of_block(node: fx.Node) -> tuple[list[Any], fx.Node, list[Any]]:
    """Its settings, the graph that is its body, and what that is given."""
    for place, value in enumerate(node.args):
        if isinstance(value, fx.Node) and value.op == "get_attr":
            return list(node.args[:place]), value, list(node.args[place + 1 :])
    raise refuse(f"it uses {node.target}")


def _last_uses(graph: fx.Graph, keep: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By node: the values that nobody needs after it."""
    kept = {*keep, *graph.output_node().all_input_nodes}
    order = {node: place for place, node in enumerate(graph.nodes)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.users and node not in kept:
            found.setdefault(max(node.users, key=order.__getitem__), []).append(node)
    return found


def _heading(node: fx.Node) -> str:
    """The innermost module that an operation belongs to; its path is a name that anyone chose."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    if not isinstance(kind, str):
        kind = getattr(kind, "__name__", "")
    kind = kind.rpartition(".")[2]
    if path.startswith("_empty_nn_module_stack"):
        return ""
    return f"{ascii(path)[1:-1] or 'the model'}: {kind if kind.isidentifier() else 'a module'}"


def paths_to_leaves(value: Any, text: str) -> Iterator[tuple[str, Any]]:
    """Each leaf of a nested argument, with the expression that reaches it."""
    if type(value) in (list, tuple):
        for index, each in enumerate(value):
            yield from paths_to_leaves(each, f"{text}[{index}]")
    elif type(value) is dict:
        for key, each in value.items():
            yield from paths_to_leaves(each, f"{text}[{key_text(key)}]")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for index, each in enumerate(value):
            yield from paths_to_leaves(each, f"{text}[{index}]")
    else:
        yield text, value


def key_text(key: object) -> str:
    if type(key) not in (str, int, bool):
        raise refuse(f"a dict has {type(key).__name__} keys", fix="use text or numbers")
    return repr(key)
