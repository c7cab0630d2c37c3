"""The grown network as a file of Python that needs torch alone, and its weights beside it.

Every operation of the captured graph is one line, `relu = torch.relu(conv2d)`. Headings name the
module it came from, and at the end of such a section what nobody needs any more is deleted, as a
function that returns would do. Operations that have no name of their own in torch are spelled
`torch.ops.aten.name.overload`, which is always right.
"""

import builtins
import copy
import inspect
import keyword
import math
import operator
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.utils._pytree import tree_leaves, tree_unflatten

from esper.kasmina import export_files
from esper.kasmina.export_files import Written
from esper.kasmina.isolation import randomness_kept
from esper.kasmina.program_export import batches, captured
from esper.kasmina.slotted import SlottedModel
from esper.kasmina.watching import Sample, arguments_of
from esper.leyline.errors import ExportError

CODE_FILE = "model.py"
_VALUES = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
INDENT = "    "
WEIGHTS, DEVICE = "w", "device"  # the names under which the lines find them
# What a line of the written file may mean by these names.
RESERVED = frozenset(
    {"self", "torch", "F", "nn", "math", "operator", WEIGHTS, DEVICE}
    | {"require", "require_value", "read_weights", "namedtuple", "OrderedDict", "Path", "json"}
    | {"Model", "BUFFERS", "FROZEN", "DTYPES", "SHA256", "hashlib"}
    | set(keyword.kwlist)
    | set(dir(builtins))
)

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
_SIGNS |= {"pow": "**", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INFIX = {getattr(operator, name): sign for name, sign in _SIGNS.items()}
_TENSOR_INFIX = {"add.Tensor": "+", "sub.Tensor": "-", "mul.Tensor": "*", "div.Tensor": "/"}
# Python functions of torch.nn.functional whose arguments are those of the operation.
_FUNCTIONAL = {"adaptive_avg_pool2d", "hardswish", "leaky_relu", "silu", "elu", "mish", "hardtanh"}
# Methods that are Python functions with the operation's arguments, and others that are not.
_METHODS = {"unflatten.int", "split.Tensor", "to.dtype", "to.device", "to.other"}
_NO_METHODS = {"to"}
# Recorded while the graph was made; the inputs are checked where they come in.
_DROPPED = {"_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size"}
_WHOLE = 2**63 - 1  # the end of a slice that has none
_PLAIN = {bool, int, float, complex, str, type(None)}  # whose `repr` makes them
_PLAIN |= {torch.dtype, torch.layout, torch.memory_format}


def export_python(
    host: SlottedModel, sample: Sample, folder: str | Path, *, dynamic_batch: bool = True
) -> Written:
    """Write the committed network in eval mode as `model.py` and `weights.safetensors`.

    `from model import Model; Model()(x)` runs it wherever torch is installed: no Esper, no other
    package, and not the source of your classes. `dynamic_batch` is as in `export_program`; every
    other size, and every argument that is not a tensor, is as in the sample, and the file says so
    when it is given something else.

    Returned is the largest difference between what the file and the network give on the sample,
    twice in a row, and on a batch of twice the size: as a rule 0. Above 1e-5 nothing is written.
    """
    model, sample, program = captured(host, sample, dynamic_batch)
    source, tensors = _source(model, program, sample)
    with export_files.writing_python(Path(folder), CODE_FILE, source, tensors) as code:
        pairs = []
        for inputs in batches(sample, dynamic_batch):
            with export_files.failing("The written file does not run"):
                given = _replay(run_path(str(code))["Model"](), inputs)
            pairs.append(zip(_replay(copy.deepcopy(model), inputs), given, strict=True))
        first, second = zip(*pairs, strict=True)
        remembers = "The network remembers something between calls, so the file"
        difference = max(
            export_files.largest_difference(model, "The file", first),
            export_files.largest_difference(model, remembers, second),
        )
    return Written(Path(folder), difference)


def _refuse(reason: str, fix: str = "the format pt2 has no such limit") -> ExportError:
    return ExportError("The network cannot be written as Python", given=reason, fix=fix)


def _replay(module: nn.Module, inputs: Sample) -> list[list[object]]:
    """The leaves of what it returns, called twice; what it remembers, it remembers."""
    with randomness_kept(module, stream=0), torch.no_grad():
        outputs: list[list[object]] = []
        for _ in range(2):
            args, kwargs = export_files.copied(inputs)
            outputs.append(copy.deepcopy(tree_leaves(module(*args, **kwargs))))
        return outputs


# --- the source ------------------------------------------------------------------------------


def _source(
    model: nn.Module, program: ExportedProgram, sample: Sample
) -> tuple[str, dict[str, Tensor]]:
    """The text of the file, and the tensors it needs."""
    places = program.graph.find_nodes(op="placeholder")
    specs = dict(zip(places, program.graph_signature.input_specs, strict=True))
    inputs = [place for place, spec in specs.items() if spec.kind is InputKind.USER_INPUT]
    held = {place: spec for place, spec in specs.items() if place not in inputs}
    names = {place: f"w[{str(spec.target)!r}]" for place, spec in held.items()}
    tensors, facts = _weights(program, [spec for place, spec in held.items() if place.users])
    arguments, leaves = _arguments(model, sample)
    checks: list[str] = []
    for place, (expression, value) in zip(inputs, leaves, strict=True):
        names[place] = expression
        checks.append(INDENT * 2 + _check(place, expression, value))
    lines = _Lines(names, set(arguments), program.graph_module)
    kinds = {spec.kind for spec in program.graph_signature.output_specs}
    if kinds != {OutputKind.USER_OUTPUT}:
        raise _refuse(f"its graph returns {', '.join(sorted(kind.name for kind in kinds))}")
    lines.write(program.graph)
    [results] = program.graph.output_node().args
    assert isinstance(results, (tuple, list))
    classes: dict[str, Sequence[str]] = {}
    texts = [lines.text(each) for each in results]
    returned = _structure(tree_unflatten(texts, program.call_spec.out_spec), classes)
    body = "\n".join([*checks, *lines.lines, f"{INDENT * 2}return {returned}"])
    definitions = [f"{name} = namedtuple({name!r}, {fields!r})" for name, fields in classes.items()]
    fillings = {
        "FACTS": "\n".join([*facts, *definitions]),
        "ARGUMENTS": ", ".join(["self", *arguments]),
        "BODY": body,
    }
    return export_files.from_template("model", fillings), tensors


def _weights(
    program: ExportedProgram, specs: Sequence[InputSpec]
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors that these name, and lines of facts about them."""
    values: dict[str, Tensor] = {**program.constants, **program.state_dict}
    kinds = {str(spec.target): spec.kind for spec in specs}
    odd = [name for name, kind in kinds.items() if kind not in _VALUES]
    if odd:
        raise _refuse(f"it holds {odd[0]}, which is no tensor")
    buffers = [name for name, kind in kinds.items() if kind is not InputKind.PARAMETER]
    frozen = [name for name in kinds if name not in buffers and not values[name].requires_grad]
    facts = [f"BUFFERS = {buffers!r}", f"FROZEN = {frozen!r}"]
    return {name: values[name] for name in kinds}, facts


def _arguments(model: nn.Module, sample: Sample) -> tuple[list[str], list[tuple[str, object]]]:
    """The parameters of the written forward, and an expression and value for every leaf of them."""
    args, kwargs = arguments_of(sample)
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(len(args) - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    given = dict(zip(names, args, strict=False)) | kwargs
    for name in given:
        if name in RESERVED - {"input"} or not name.isidentifier():
            raise _refuse(f"an argument of its forward is called {name!r}", fix="rename it")
    leaves = [leaf for name, value in given.items() for leaf in _paths_to_leaves(value, name)]
    if len(leaves) != len(tree_leaves((args, kwargs))):
        kinds = ", ".join(sorted({type(value).__name__ for _, value in leaves}))
        fix = "pass tensors, or tuples, lists and dicts of them"
        raise _refuse(f"its arguments are {kinds}", fix)
    return list(given), leaves


def _check(place: fx.Node, expression: str, value: object) -> str:
    """The line that refuses another input than the graph was made for."""
    if isinstance(value, Tensor):
        sizes = place.meta["val"].shape
        shape = tuple(size if isinstance(size, int) else None for size in sizes)
        return f"require({expression!r}, {expression}, {value.dtype!r}, {shape!r})"
    if type(value) not in (bool, int, float, str, type(None)):
        raise _refuse(f"its argument {expression} is a {type(value).__name__}")
    return f"require_value({expression!r}, {expression}, {value!r})"


def _structure(value: Any, classes: dict[str, Sequence[str]]) -> str:
    """What the network returns, as an expression; named tuples are defined in `classes`."""
    if isinstance(value, str):  # the expression for a leaf
        return value
    if type(value) in (list, tuple):
        return _bracketed(value, (_structure(each, classes) for each in value))
    if type(value) in (dict, OrderedDict):
        pairs = (f"{_key_text(k)}: {_structure(v, classes)}" for k, v in value.items())
        text = "{" + ", ".join(pairs) + "}"
        return text if type(value) is dict else f"OrderedDict({text})"
    name, fields = type(value).__name__, list(getattr(value, "_fields", ()))
    known = isinstance(value, tuple) and fields and name.isidentifier() and name not in RESERVED
    if known and classes.setdefault(name, fields) == fields:
        return f"{name}({', '.join(_structure(each, classes) for each in value)})"
    fix = "return tensors in tuples, named tuples, lists or dicts"
    raise _refuse(f"it returns a {name}", fix)


class _Lines:
    """Writes graphs as lines of Python; remembers which name stands for which node."""

    def __init__(self, names: Mapping[fx.Node, str], taken: set[str], root: fx.GraphModule) -> None:
        self.lines: list[str] = []
        self._names = dict(names)
        self._taken = set(taken)
        self._root = root
        self._heading = ""

    def write(self, graph: fx.Graph, *, keep: Sequence[fx.Node] = ()) -> None:
        """Every operation of the graph, in order; values in `keep` are never deleted."""
        kept = {*keep, *graph.output_node().all_input_nodes}
        order = {node: place for place, node in enumerate(graph.nodes)}
        last: dict[fx.Node, list[fx.Node]] = {}  # by node: the values that nobody needs after it
        for node in graph.nodes:
            if node.op == "call_function" and node.users and node not in kept:
                last.setdefault(max(node.users, key=order.__getitem__), []).append(node)
        waiting: list[str] = []  # names that a section leaves behind
        for node in graph.nodes:
            if node.op in ("get_attr", "placeholder", "output"):
                continue  # the body of a block, a get_attr, is written where it is entered
            if node.op != "call_function":
                raise _refuse(f"its graph holds a {node.op} of {node.target}")
            if _heading(node) not in ("", self._heading):
                self._delete(waiting)
                self._heading = _heading(node)
                self.lines.append(f"{INDENT * 2}# {self._heading}")
            target = node.target
            if isinstance(target, torch._ops.HigherOrderOperator):
                self._block(node, target.name())
            elif not isinstance(target, torch._ops.OpOverload):
                self._assign(node, self._python_call(node, target))
            elif target._schema.name.partition("::")[2] not in _DROPPED:
                self._assign(node, self._torch_call(node, target))
            waiting += [self._names[dead] for dead in last.get(node, ()) if dead in self._names]
        self._delete(waiting)

    def text(self, value: object) -> str:
        """An argument as it is written."""
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, (list, tuple)):
            return _bracketed(value, (self.text(each) for each in value))
        if isinstance(value, torch.device):
            return DEVICE
        if isinstance(value, float) and not math.isfinite(value):
            return "math.nan" if math.isnan(value) else f"{'-' if value < 0 else ''}math.inf"
        if type(value) in _PLAIN:
            return repr(value)
        raise _refuse(f"an operation takes a {type(value).__name__}")

    def _assign(self, node: fx.Node, expression: str) -> None:
        if node.users:
            name = node.name
            while name in self._taken or name in RESERVED:
                name += "_"
            self._taken.add(name)
            self._names[node] = name
            expression = f"{name} = {expression}"
        self.lines.append(INDENT * 2 + expression)

    def _python_call(self, node: fx.Node, target: Any) -> str:
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
        raise _refuse(f"it calls {name or target}")

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
            raise _refuse(f"it uses the operation {target}, which torch itself does not have")
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
        bodies = [each for each in node.args if isinstance(each, fx.Node) and each.op == "get_attr"]
        if not bodies:
            raise _refuse(f"it uses {node.target}")
        place = node.args.index(bodies[0])
        settings, given = node.args[:place], node.args[place + 1 :]
        if name == "wrap_with_autocast":
            device, dtype, enabled, cached = (self.text(each) for each in settings)
            opening = f"torch.autocast({device}, {dtype}, {enabled}, {cached})"
        elif name == "wrap_with_set_grad_enabled":
            opening = f"torch.set_grad_enabled({self.text(settings[0])})"
        else:
            raise _refuse(f"it uses {name}, control flow that depends on data")
        inner = getattr(self._root, str(bodies[0].target))
        assert isinstance(inner, fx.GraphModule)
        places = inner.graph.find_nodes(op="placeholder")
        outer = {place: self.text(value) for place, value in zip(places, given, strict=True)}
        lines = _Lines(self._names | outer, self._taken, inner)
        results = inner.graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        lines.write(inner.graph, keep=[each for each in results if isinstance(each, fx.Node)])
        self._taken |= lines._taken
        self.lines.append(f"{INDENT * 2}with {opening}:")
        self.lines += [INDENT + line for line in lines.lines]
        self._assign(node, lines.text(tuple(results)))

    def _delete(self, names: list[str]) -> None:
        if names:
            self.lines.append(f"{INDENT * 2}del {', '.join(names)}")
            names.clear()


def _heading(node: fx.Node) -> str:
    """The innermost module that an operation belongs to; its path is a name that anyone chose."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    kind = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    if path.startswith("_empty_nn_module_stack"):
        return ""
    return f"{ascii(path)[1:-1] or 'the model'}: {kind if kind.isidentifier() else 'a module'}"


def _paths_to_leaves(value: Any, text: str) -> Iterator[tuple[str, Any]]:
    """Each leaf of a nested argument, with the expression that reaches it."""
    is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    if type(value) in (list, tuple) or is_named_tuple:
        for index, each in enumerate(value):
            yield from _paths_to_leaves(each, f"{text}[{index}]")
    elif type(value) is dict:
        for key, each in value.items():
            yield from _paths_to_leaves(each, f"{text}[{_key_text(key)}]")
    else:
        yield text, value


def _bracketed(value: list[Any] | tuple[Any, ...], inside: Iterable[str]) -> str:
    text = ", ".join(inside)
    if isinstance(value, list):
        return f"[{text}]"
    return f"({text},)" if len(value) == 1 else f"({text})"


def _key_text(key: object) -> str:
    if type(key) not in (str, int, bool):
        raise _refuse(f"a dict has {type(key).__name__} keys", fix="use text or numbers")
    return repr(key)
