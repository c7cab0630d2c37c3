"""Puts a fossilized seed into a plain copy of its host, for good and without Esper.

The host's own names stay. The seed becomes a submodule of the module that carries it and acts on
that module's output, in the way that suits the module best:

- a graph calls the seed before it returns;
- `nn.Sequential` runs it last;
- any other module keeps it as a forward hook, so that code which reaches into the module
  (`self.fc.weight`) finds it as it was.
"""

import re
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from esper.kasmina.plain import make_plain, trace
from esper.kasmina.seed import Seed
from esper.kasmina.slot import Slot, Tap
from esper.leyline.errors import ExportError

# Their forward may run every child, so a seed among the children would be run as one of them.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, fx.GraphModule)


class _Growth(nn.Module):
    """Turns a module's output into the grown one: h + alpha * g(h), or that for one part of it.

    `returned` is the type of an output that has parts.
    """

    def __init__(
        self, seed: Seed, alpha: float, part: int | str | None, returned: type | None
    ) -> None:
        super().__init__()
        self.body, self.gate, self.permutation = seed.body, seed.gate, seed.permutation
        self.alpha, self.part, self.returned = alpha, part, returned
        self.training = seed.training

    def grow(self, output: Any) -> Any:
        h: Tensor = output if self.part is None else output[self.part]
        g = Seed.forward(cast("Seed", self), h)
        return self._put_back(output, h + (g if self.alpha == 1.0 else self.alpha * g).to(h.dtype))

    def _put_back(self, output: Any, value: Tensor) -> Any:
        """What `replace_part` does, in operations that a graph can hold."""
        if self.part is None:
            return value
        assert self.returned is not None
        if isinstance(self.part, str) or issubclass(self.returned, dict):
            changed = output.copy()
            changed.__setitem__(self.part, value)
            return changed
        if hasattr(self.returned, "_fields"):
            return output._replace(**{self.returned._fields[self.part]: value})
        middle = [value] if issubclass(self.returned, list) else (value,)
        return output[: self.part] + middle + output[self.part + 1 :]


class _Stage(_Growth):
    """The growth as a module that follows its carrier."""

    def forward(self, output: Any) -> Any:
        return self.grow(output)


class _Hook(_Growth):
    """The growth as a forward hook of its carrier."""

    def forward(self, module: nn.Module, args: object, output: Any) -> Any:
        return self.grow(output)


def graft(
    root: nn.Module,
    path: str,
    slot: Slot,
    seed: Seed,
    part: int | str | None,
    returned: type | None,
) -> None:
    """Let the submodule at `path` carry `seed`, a copy of the one in `slot`, for good."""
    carrier = root.get_submodule(path)
    name = "seed" if part is None else "seed_" + re.sub(r"\W", "_", str(part))
    growth = seed, slot.alpha, part, returned
    taps = [
        key
        for key, hook in carrier._forward_hooks.items()
        if isinstance(hook, Tap) and hook.slot is slot
    ]
    other_hooks = len(carrier._forward_hooks) > len(taps)
    if isinstance(carrier, fx.GraphModule):
        _call_before_return(path, carrier, _adopt(carrier, name, _plain(_Stage(*growth))))
    elif type(carrier).forward is nn.Sequential.forward and not other_hooks:
        _adopt(carrier, name, _plain(_Stage(*growth)))
    else:
        hook = _plain(_Hook(*growth))
        home = _home(root, path)
        relative = path.removeprefix(home).strip(".").replace(".", "_")
        _adopt(root.get_submodule(home), f"{relative}_{name}" if relative else name, hook)
        if taps:
            carrier._forward_hooks[taps[0]] = hook  # at its place among other hooks
        else:
            carrier.register_forward_hook(hook)


def drop_taps(root: nn.Module) -> None:
    """Take away the hooks that tie the modules to slots."""
    for module in root.modules():
        for key in [k for k, hook in module._forward_hooks.items() if isinstance(hook, Tap)]:
            del module._forward_hooks[key]


def _plain(growth: _Growth) -> fx.GraphModule:
    """The growth as a graph. Users' blueprints become graphs too, where they can.

    The file that registers a blueprint imports Esper, and so would loading a class from it.
    """
    for name, child in growth._modules.items():
        if child is not None:
            growth._modules[name] = make_plain(child, {}, trace_all=True)
    return trace(growth)


def _adopt(parent: nn.Module, name: str, child: nn.Module) -> str:
    while hasattr(parent, name):
        name += "_"
    parent.add_module(name, child)
    return name


def _home(root: nn.Module, path: str) -> str:
    """The nearest module, from the carrier outwards, to which a submodule can be added."""
    while isinstance(root.get_submodule(path), _CONTAINERS):
        if not path:
            raise ExportError(
                "There is no module that could hold the exported seed",
                given=f"the model is a {type(root).__name__} that runs its children itself",
                fix="wrap it in an nn.Module of your own that calls it",
            )
        path = path.rpartition(".")[0]
    return path


def _call_before_return(path: str, carrier: fx.GraphModule, name: str) -> None:
    graph = carrier.graph
    if type(graph._codegen) is not CodeGen:
        raise ExportError(
            f"Submodule {path!r} is a graph made by torch.export, into which no seed can be put",
            given=type(graph._codegen).__name__,
            fix="plant the seed in the module from which the graph was made",
        )
    returned = graph.output_node()
    with graph.inserting_before(returned):
        returned.args = (graph.call_module(name, (returned.args[0],)),)
    carrier.recompile()
