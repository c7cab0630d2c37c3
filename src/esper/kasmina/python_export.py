"""The grown network as a file of Python that needs torch alone, and its weights beside it.

Every operation of the captured graph is one line, `relu = torch.ops.aten.relu.default(conv2d)`, as
torch itself writes graphs; headings name the module it came from.
"""

import copy
import hashlib
import inspect
import keyword
import re
import textwrap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.node import map_aggregate
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from esper.kasmina import export_files
from esper.kasmina.export_files import Written
from esper.kasmina.isolation import randomness_kept
from esper.kasmina.program_export import batches, captured
from esper.kasmina.slotted import SlottedModel
from esper.kasmina.watching import Sample, arguments_of
from esper.leyline.errors import ExportError

CODE_FILE, WEIGHTS_FILE = "model.py", "weights.safetensors"
_TEMPLATE = Path(__file__).parent / "templates" / "model.txt"
_VALUES = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
# What the written file means by these names.
RESERVED = frozenset(
    {"self", "torch", "nn", "hashlib", "json", "math", "operator", "inf", "nan", "Path"}
    | {"require", "require_value", "read_weights", "namedtuple", "OrderedDict", "found", "held"}
    | {"Model", "HELD", "BUFFERS", "FROZEN", "DTYPES", "SHA256"}
    | set(keyword.kwlist)
)
# Recorded while the graph was made; the inputs are checked where they come in.
_DROPPED = {"_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size"}
_BLOCKS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")  # `with` of the model's own code


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
    folder = Path(folder)
    export_files.require_place(folder, "folder")
    found = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
    foreign = sorted(found - {CODE_FILE, WEIGHTS_FILE, "__pycache__"})
    beginning = re.escape(_TEMPLATE.read_bytes().partition(b"\n")[0])
    if CODE_FILE in found and not export_files.begins_with(folder / CODE_FILE, beginning):
        foreign.append(CODE_FILE)  # the folder must be new, empty, or hold an earlier export
    if foreign:
        what, fix = f"{folder} holds other files", "name a new folder, or an empty one"
        raise ExportError(what, given=", ".join(foreign[:3]), fix=fix)
    model, sample, program = captured(host, sample, dynamic_batch)
    source, tensors = _source(model, program, sample)
    with export_files.writing(folder, folder / CODE_FILE) as code:
        with export_files.failing("The weights cannot be written"):
            data = save({key: each.detach().clone().contiguous() for key, each in tensors.items()})
        seal = hashlib.sha256(data).hexdigest()  # that the file's reader compares
        code.write_text(source.replace("@SHA256@", seal), encoding="utf-8")
        code.with_name(WEIGHTS_FILE).write_bytes(data)
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
    return Written(folder, difference)


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
    graph, signature = program.graph, program.graph_signature
    kinds = {spec.kind for spec in signature.output_specs}
    if kinds != {OutputKind.USER_OUTPUT}:
        raise _refuse(f"its graph returns {', '.join(sorted(kind.name for kind in kinds))}")
    specs = zip(graph.find_nodes(op="placeholder"), signature.input_specs, strict=True)
    inputs, held = [], dict[str, InputKind]()
    for place, spec in list(specs):
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(place)
        elif place.users:
            held[str(spec.target)] = spec.kind
        else:
            graph.erase_node(place)
    if odd := [name for name, kind in held.items() if kind not in _VALUES]:
        raise _refuse(f"it holds {odd[0]}, which is no tensor")
    values = {**program.constants, **program.state_dict}
    buffers = [name for name, kind in held.items() if kind is not InputKind.PARAMETER]
    frozen = [name for name in held if name not in buffers and not values[name].requires_grad]
    arguments, leaves = _arguments(model, sample)
    checks = [_check(place, *leaf) for place, leaf in zip(inputs, leaves, strict=True)]
    classes: dict[str, Sequence[str]] = {}
    [results] = graph.output_node().args
    assert isinstance(results, (tuple, list))
    texts = [f"found[{index}]" for index in range(len(results))]
    returned = _structure(tree_unflatten(texts, program.call_spec.out_spec), classes)
    facts = [f"HELD = {list(held)!r}", f"BUFFERS = {buffers!r}", f"FROZEN = {frozen!r}"]
    fillings = {
        "FACTS": "\n".join(facts + [f"{n} = namedtuple({n!r}, {f!r})" for n, f in classes.items()]),
        "ARGUMENTS": ", ".join(["self", *arguments]),
        "CHECKS": textwrap.indent("\n".join(checks), " " * 8),
        "GIVEN": ", ".join(["*(held[name] for name in HELD)", *(text for text, _ in leaves)]),
        "RETURNED": returned,
        "FUNCTIONS": "\n\n".join(_methods("run", program.graph_module)),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for mark, filling in fillings.items():
        text = text.replace(f"@{mark}@", filling)
    return text, {name: values[name] for name in held}


def _methods(name: str, module: fx.GraphModule) -> Iterator[str]:
    """A graph as a method of the class, after those of the blocks in it."""
    graph, here, made = fx.Graph(), None, dict[fx.Node, fx.Node]()

    def inside(value: Any) -> Any:  # devices: where the network is when it runs, not where it was
        return here if isinstance(value, torch.device) else made.get(value, value)

    for node in module.graph.nodes:
        target = node.target
        if here is None and node.op != "placeholder":
            here = graph.create_node("get_attr", "device")
        if node.op == "get_attr":  # a block
            target = f"{name}_{target}"
            yield from _methods(target, getattr(module, node.target))
        elif isinstance(target, torch._ops.OpOverload):
            if target.namespace != "aten":
                raise _refuse(f"it uses the operation {target}, which torch itself does not have")
            if target._schema.name.partition("::")[2] in _DROPPED:
                continue
        elif isinstance(target, torch._ops.HigherOrderOperator) and target.name() not in _BLOCKS:
            raise _refuse(f"it uses {target.name()}, control flow that depends on data")
        args, kwargs = (map_aggregate(each, inside) for each in (node.args, node.kwargs))
        made[node] = graph.create_node(node.op, target, args, kwargs, name=node.name)
    if here is not None and not here.users:
        graph.erase_node(here)
    code = graph.python_code("self")
    used = {each for each in code.globals if re.search(rf"(?<!\.)\b{each}\b", code.src)}
    if foreign := used - RESERVED - {"device"}:  # which is the name of an argument
        raise _refuse(f"it calls {', '.join(sorted(foreign))}")
    called = (pair for pair in made.items() if pair[0].op == "call_function")
    headings = {copied.name: _heading(node) for node, copied in called}
    lines, last = [], ""
    for line in code.src.strip().replace("def forward(", f"def {name}(", 1).splitlines():
        heading = headings.get(line.partition(" = ")[0].strip(), "")
        if heading not in ("", last):
            lines.append(f"    # {heading}")
            last = heading
        lines.append(line)
    yield textwrap.indent("\n".join(lines), "    ")


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
        if name in RESERVED or not name.isidentifier():
            raise _refuse(f"an argument of its forward is called {name!r}", fix="rename it")
    found: list[tuple[Any, object]] = tree_flatten_with_path(given)[0]
    return list(given), [(f"{path[0].key}{keystr(path[1:])}", leaf) for path, leaf in found]


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
        inside = ", ".join(_structure(each, classes) for each in value)
        return f"[{inside}]" if type(value) is list else f"({inside}{',' * (len(value) == 1)})"
    if type(value) in (dict, OrderedDict):
        if odd := [type(key).__name__ for key in value if type(key) not in (str, int, bool)]:
            raise _refuse(f"a dict has {odd[0]} keys", fix="use text or numbers")
        pairs = (f"{key!r}: {_structure(each, classes)}" for key, each in value.items())
        text = "{" + ", ".join(pairs) + "}"
        return text if type(value) is dict else f"OrderedDict({text})"
    name, fields = type(value).__name__, list(getattr(value, "_fields", ()))
    known = isinstance(value, tuple) and fields and name.isidentifier() and name not in RESERVED
    if known and classes.setdefault(name, fields) == fields:
        return f"{name}({', '.join(_structure(each, classes) for each in value)})"
    fix = "return tensors in tuples, named tuples, lists or dicts"
    raise _refuse(f"it returns a {name}", fix)


def _heading(node: fx.Node) -> str:
    """The innermost module that an operation belongs to; its path is a name that anyone chose."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    kind = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    if path.startswith("_empty_nn_module_stack"):
        return ""
    return f"{ascii(path)[1:-1] or 'the model'}: {kind if kind.isidentifier() else 'a module'}"
