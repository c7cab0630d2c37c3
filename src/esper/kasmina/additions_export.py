"""What a network has grown as a file of Python that adds it to a model of the user's own class."""

import copy
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from esper.kasmina import export_files
from esper.kasmina.export_files import Written
from esper.kasmina.plain_module import drop_taps, export_module
from esper.kasmina.slotted import SlottedModel, past_results
from esper.kasmina.watching import Sample
from esper.leyline.errors import ExportError

CODE_FILE = "module.py"
_GLOBALS = {"torch", "math", "operator", "inf", "nan", "getattr"}  # that the written file has too
_PLAIN = {bool, int, float, str, type(None)}  # what constructors are told


def export_additions(host: SlottedModel, sample: Sample, folder: str | Path) -> Written:
    """Write the fossilized seeds as `module.py`, and all weights as `weights.safetensors`.

    `from module import load; load(Net())` gives the plain module that `export_module` gives,
    made of your own class and without Esper: it has both modes and trains on. Your class stays
    where it is; only what was grown is written. Nothing is pickled.

    The file is run on a copy of the model and compared within 1e-5, in eval mode and in the
    present one, before it gets its name.
    """
    plain = export_module(host, sample)
    if isinstance(host.model, fx.GraphModule) or type(host.model).__module__.startswith("esper."):
        raise _refuse(f"the model is a {type(host.model).__name__}, not a class of yours")
    # A copy of the model as its class makes it, with other weights at most.
    memo = past_results(host.model) | {id(slot): slot for slot in host.slots}
    bare = copy.deepcopy(host.model, memo)
    drop_taps(bare)
    source = _source(bare, plain)
    for tensor in _floats(bare).values():  # as the class makes it
        tensor.data = tensor.data.to(torch.float32)
    with export_files.writing_python(Path(folder), CODE_FILE, source, plain.state_dict()) as code:
        with export_files.failing("The written file does not load"):
            made: nn.Module = run_path(str(code))["load"](bare)
        with export_files.failing("The written file does not run"):
            outputs = [
                [export_files.run(each, sample, evaluating=mode) for each in (plain, made)]
                for mode in (True, False)
            ]
        difference = export_files.largest_difference(plain, "The written file", outputs)
    return Written(Path(folder), difference)


def _refuse(reason: str) -> ExportError:
    return ExportError(
        "What was grown cannot be written for a model of your own class",
        given=reason,
        fix="the formats python and pt2 have no such limit",
    )


def _source(bare: nn.Module, plain: nn.Module) -> str:
    own = {path for path, _ in bare.named_modules(remove_duplicate=False)}
    classes: list[str] = []
    grafts: list[str] = []
    done: dict[int, str] = {}  # seeds that were written, and what finds them in the model
    for path, module in plain.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        if path in own or parent not in own or id(module) in done:
            continue
        done[id(module)] = f"model.get_submodule({path!r})"
        maker = _construct(module, classes)
        grafts.append(f"model.get_submodule({parent!r}).add_module({name!r}, {maker})")
    for path, module in plain.named_modules():
        for hook in module._forward_hooks.values():
            if id(hook) in done:
                carrier = f"model.get_submodule({path!r})"
                grafts.append(f"{carrier}.register_forward_hook({done[id(hook)]})")
    usual, others = _precisions(plain)
    fillings = {
        "USUAL": str(usual),
        "OTHERS": "{" + ", ".join(f"{name!r}: {dtype}" for name, dtype in others.items()) + "}",
        "CLASSES": "\n\n\n".join(classes) or "# Nothing has grown: these are the weights alone.",
        "GRAFTS": textwrap.indent("\n".join(grafts), "    "),
    }
    return export_files.from_template("module", fillings)


def _floats(module: nn.Module) -> dict[str, Tensor]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in tensors if tensor.is_floating_point()}


def _precisions(plain: nn.Module) -> tuple[torch.dtype, dict[str, torch.dtype]]:
    """The one that most numbers have, and those of the tensors that have another.

    (A class makes its model in the usual precision; it may have been changed after that.)
    """
    found = {name: tensor.dtype for name, tensor in _floats(plain).items()}
    [(usual, _)] = Counter(found.values()).most_common(1) or [(torch.float32, 0)]
    return usual, {name: dtype for name, dtype in found.items() if dtype != usual}


def _construct(module: nn.Module, classes: list[str]) -> str:
    """An expression that makes a module like this one; graphs become `classes`."""
    if isinstance(module, fx.GraphModule):
        return f"{_class_of(module, classes)}()"
    if type(module) is nn.Sequential:
        return f"nn.Sequential({', '.join(_construct(child, classes) for child in module)})"
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules") or list(module.children()):
        raise _refuse(f"a seed holds a {kind.__name__}")
    return f"nn.{kind.__name__}({', '.join(_settings(module))})"


def _settings(module: nn.Module) -> Iterator[str]:
    """The arguments with which torch's constructor makes a module like this one."""
    for name, parameter in inspect.signature(type(module).__init__).parameters.items():
        if name in ("self", "device", "dtype"):  # the last two only say where weights are made
            continue
        value = getattr(module, name, parameter.default)
        if name == "bias":
            value = value is not None and value is not False
        if type(value) is torch.Size:
            value = tuple(value)
        plain = all(type(leaf) in _PLAIN for leaf in tree_leaves(value))
        if parameter.kind is parameter.VAR_POSITIONAL or not plain:
            raise _refuse(f"a seed holds a {type(module).__name__}, whose {name} is not a number")
        yield f"{name}={value!r}"


def _class_of(module: fx.GraphModule, classes: list[str]) -> str:
    """Writes the class of a graph, after those of the graphs in it; returns its name."""
    code = module.graph.python_code("self")
    used = {name for name in code.globals if re.search(rf"\b{re.escape(name)}\b", code.src)}
    foreign = sorted(used - _GLOBALS)
    if foreign:
        raise _refuse(f"a seed uses {', '.join(foreign)}")
    lines = ["super().__init__()"]
    for name, child in module._modules.items():
        assert child is not None
        lines.append(f"self.add_module({name!r}, {_construct(child, classes)})")
    for name, value in module._parameters.items():
        if value is not None:
            empty = f"nn.Parameter(torch.empty({tuple(value.shape)!r}))"
            lines.append(f"self.register_parameter({name!r}, {empty})")
    for name, buffer in module._buffers.items():
        if buffer is not None:
            empty = f"torch.empty({tuple(buffer.shape)!r}, dtype={buffer.dtype})"
            lines.append(f"self.register_buffer({name!r}, {empty})")
    name = f"Part{len(classes) + 1}"
    forward = textwrap.indent(code.src.strip(), "    ")
    body = textwrap.indent("\n".join(lines), " " * 8)
    classes.append(f"class {name}(nn.Module):\n    def __init__(self):\n{body}\n\n{forward}")
    return name
