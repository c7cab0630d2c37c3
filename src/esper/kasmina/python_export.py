"""The grown network as a file of Python that needs torch alone, and its weights beside it."""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import tree_leaves, tree_map_only, tree_unflatten

from esper.kasmina.export import export_module, largest_difference, require_equal, set_evaluating
from esper.kasmina.export_files import (
    Written,
    call_of,
    capture,
    doubled,
    origin_of,
    tolerance_of,
)
from esper.kasmina.isolation import randomness_kept
from esper.kasmina.probe import Sample
from esper.kasmina.python_source import INDENT, RESERVED, Lines, key_text, paths_to_leaves, refuse
from esper.kasmina.slotted import SlottedModel
from esper.kasmina.source_folder import filled, load_source, writing
from esper.leyline.errors import ExportError

CODE_FILE = "model.py"
_VALUES = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


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
    model = export_module(host, sample).cpu()
    set_evaluating(model)
    sample = tree_map_only(Tensor, Tensor.cpu, sample)
    program = capture(model, sample, dynamic_batch)
    source, tensors = _source(model, program, sample)
    with writing(Path(folder), CODE_FILE, source, tensors) as code:
        difference = _compare(model, sample, dynamic_batch, code)
    return Written(Path(folder), difference)


# --- the source ------------------------------------------------------------------------------


def _source(
    model: nn.Module, program: ExportedProgram, sample: Sample
) -> tuple[str, dict[str, Tensor]]:
    """The text of the file, and the tensors it needs."""
    names, inputs, tensors, facts = _weights(program)
    arguments, leaves = _arguments(model, sample)
    checks: list[str] = []
    for place, (expression, value) in zip(inputs, leaves, strict=True):
        names[place] = expression
        checks.append(INDENT * 2 + _check(place, expression, value))
    lines = Lines(names, {name.partition("=")[0] for name in arguments}, program.graph_module)
    kinds = {spec.kind for spec in program.graph_signature.output_specs}
    if kinds != {OutputKind.USER_OUTPUT}:
        raise refuse(f"its graph returns {', '.join(sorted(kind.name for kind in kinds))}")
    lines.write(program.graph)
    [results] = program.graph.output_node().args
    assert isinstance(results, (tuple, list))
    classes: dict[str, Sequence[str]] = {}
    texts = [_Text(lines.text(each)) for each in results]
    returned = _structure(tree_unflatten(texts, program.call_spec.out_spec), classes)
    body = "\n".join([*checks, *lines.lines, f"{INDENT * 2}return {returned}"])
    definitions = [f"{name} = namedtuple({name!r}, {fields!r})" for name, fields in classes.items()]
    fillings = {
        "FACTS": "\n".join([*facts, *definitions]),
        "ARGUMENTS": ", ".join(["self", *arguments]),
        "BODY": body,
    }
    return filled("model", fillings), tensors


def _weights(
    program: ExportedProgram,
) -> tuple[dict[fx.Node, str], list[fx.Node], dict[str, Tensor], list[str]]:
    """What stands for each weight, the nodes that are inputs, the tensors, and lines of facts."""
    names: dict[fx.Node, str] = {}
    inputs: list[fx.Node] = []
    tensors: dict[str, Tensor] = {}
    buffers: list[str] = []
    frozen: list[str] = []
    places = program.graph.find_nodes(op="placeholder")
    for place, spec in zip(places, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(place)
            continue
        if spec.kind not in _VALUES:
            raise refuse(f"it holds {spec.target}, which is no tensor")
        name = str(spec.target)
        names[place] = f"w[{name!r}]"
        if not place.users:
            continue
        value = program.state_dict.get(name, program.constants.get(name))
        assert isinstance(value, Tensor)
        if spec.kind is not InputKind.PARAMETER:
            buffers.append(name)
        elif not value.requires_grad:
            frozen.append(name)
        tensors[name] = value
    facts = [f"BUFFERS = {buffers!r}", f"FROZEN = {frozen!r}"]
    return names, inputs, tensors, facts


def _arguments(model: nn.Module, sample: Sample) -> tuple[list[str], list[tuple[str, object]]]:
    """The parameters of the written forward, and an expression and value for every leaf of them."""
    args, kwargs = call_of(sample)
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(len(args) - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    given = dict(zip(names, args, strict=False)) | kwargs
    for name in given:
        if name in RESERVED - {"input"} or not name.isidentifier():
            raise refuse(f"an argument of its forward is called {name!r}", fix="rename it")
    leaves = [leaf for name, value in given.items() for leaf in paths_to_leaves(value, name)]
    if len(leaves) != len(tree_leaves((args, kwargs))):
        kinds = {type(value).__name__ for _, value in leaves}
        raise refuse(
            f"its arguments are {', '.join(sorted(kinds))}",
            fix="pass tensors, or tuples, lists and dicts of them",
        )
    return list(given), leaves


def _check(place: fx.Node, expression: str, value: object) -> str:
    """The line that refuses another input than the graph was made for."""
    if isinstance(value, Tensor):
        sizes = place.meta["val"].shape
        shape = tuple(size if isinstance(size, int) else None for size in sizes)
        return f"require({expression!r}, {expression}, {value.dtype!r}, {shape!r})"
    if type(value) not in (bool, int, float, str, type(None)):
        raise refuse(f"its argument {expression} is a {type(value).__name__}")
    return f"require_value({expression!r}, {expression}, {value!r})"


class _Text(str):
    """An expression, as a leaf of what is returned."""


def _structure(value: Any, classes: dict[str, Sequence[str]]) -> str:
    """What the network returns, as an expression; named tuples are defined in `classes`."""
    if isinstance(value, _Text):
        return str(value)
    if type(value) in (list, tuple):
        inside = ", ".join(_structure(each, classes) for each in value)
        comma = "," if type(value) is tuple and len(value) == 1 else ""
        return f"[{inside}]" if type(value) is list else f"({inside}{comma})"
    if type(value) in (dict, OrderedDict):
        pairs = (f"{key_text(k)}: {_structure(v, classes)}" for k, v in value.items())
        text = "{" + ", ".join(pairs) + "}"
        return text if type(value) is dict else f"OrderedDict({text})"
    name, fields = type(value).__name__, list(getattr(value, "_fields", ()))
    known = isinstance(value, tuple) and fields and name.isidentifier() and name not in RESERVED
    if known and classes.setdefault(name, fields) == fields:
        return f"{name}({', '.join(_structure(each, classes) for each in value)})"
    raise refuse(
        f"it returns a {name}",
        fix="return tensors in tuples, named tuples, lists or dicts",
    )


# --- checking --------------------------------------------------------------------------------


def _compare(model: nn.Module, sample: Sample, dynamic_batch: bool, code: Path) -> float:
    """Run the file beside the model; the largest difference, if it is small enough."""
    largest = 0.0
    rounds = [[sample, sample], [doubled(sample)]] if dynamic_batch else [[sample, sample]]
    for inputs in rounds:
        try:
            given = _replay(load_model(code), inputs)
        except Exception as error:  # whatever an operation may raise
            raise ExportError("The written file does not run", given=origin_of(error)) from error
        wanted = _replay(copy.deepcopy(model), inputs)
        for number, (one, other) in enumerate(zip(wanted, given, strict=True)):
            what = (
                "The network remembers something between calls, so the file"
                if number
                else "The file"
            )
            require_equal(one, other, tolerance_of(model), what)
            largest = max(largest, largest_difference(one, other))
    return largest


def load_model(code: Path) -> nn.Module:
    """The network of a written file."""
    model = load_source(code).Model()
    assert isinstance(model, nn.Module)
    return model


def _replay(module: nn.Module, inputs: Sequence[Sample]) -> list[list[object]]:
    """The leaves of what it returns, call after call; what it remembers, it remembers."""
    with randomness_kept(module, stream=0), torch.no_grad():
        outputs: list[list[object]] = []
        for each in inputs:
            args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), call_of(each))
            outputs.append(copy.deepcopy(tree_leaves(module(*args, **kwargs))))
        return outputs
