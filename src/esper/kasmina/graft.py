"""Puts a fossilized seed into a plain copy of its host, for good and without Esper.

The host's own names stay. The seed becomes a submodule of the module that carries it and acts on
that module's output, in the way that suits the module best:

- a graph calls the seed before it returns;
- `nn.Sequential` runs it last;
- any other module keeps it as a forward hook, so that code which reaches into the module
  (`self.fc.weight`) finds it as it was.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen

from esper.kasmina.plain import make_plain, trace
from esper.kasmina.slot import Seed, Slot, Tap
from esper.leyline.errors import ExportError

# Their forward may run every child, so a seed among the children would be run as one of them.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, fx.GraphModule)


@dataclass(frozen=True)
class Seen:
    """What a carrier returned for the sample: the type of it all, the precision of the slot's h."""

    returned: type
    dtype: torch.dtype


class _Growth(nn.Module):
    """Turns a carrier's output into the grown one, as its slot does: h + alpha * g(h)."""

    def __init__(self, seed: Seed, alpha: float, part: int | str | None, seen: Seen | None) -> None:
        super().__init__()
        vars(self).update(vars(seed))  # so that names begin with what the seed consists of
        self.alpha, self.part = alpha, part
        self.returned = None if seen is None else seen.returned
        self.cast_to = _precision(seed, seen)

    def grow(self, output: Any) -> Any:
        h = output if self.part is None else output[self.part]
        g = Seed.forward(cast("Seed", self), h if self.cast_to is None else h.to(self.cast_to))
        grown = h + (g if self.alpha == 1.0 else self.alpha * g).to(h.dtype)
        return grown if self.part is None else self._put_back(output, self.part, grown)

    def _put_back(self, output: Any, part: int | str, value: Any) -> Any:
        """What `replace_part` does, in operations that a graph can hold."""
        if isinstance(part, int) and self.returned is tuple:
            return output[:part] + (value,) + output[part + 1 :]  # noqa: RUF005
        if fields := getattr(self.returned, "_fields", None):
            return output._replace(**{fields[part]: value})
        changed = output.copy()
        changed.__setitem__(part, value)
        return changed


def _precision(seed: Seed, seen: Seen | None) -> torch.dtype | None:
    """What h has to be cast to where a host mixes precisions; with autocast there is no need."""
    parameter = next(seed.parameters(), None)
    if parameter is None or seen is None or torch.is_autocast_enabled(parameter.device.type):
        return None
    return None if parameter.dtype == seen.dtype else parameter.dtype


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
    seen: Seen | None,
) -> None:
    """Let the submodule at `path` carry `seed`, a copy of the one in `slot`, for good."""
    carrier = root.get_submodule(path)
    name = "seed" if part is None else "seed_" + re.sub(r"\W", "_", str(part))
    growth = seed, slot.alpha, part, seen
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
    """The growth as a graph. A blueprint of the user's becomes one too, if all of it can.

    The file that registers a blueprint imports Esper, and so would loading a class from it.
    """
    plain = trace(growth, name="Seed")
    for name, child in plain._modules.items():
        assert child is not None
        try:
            plain._modules[name] = make_plain(copy.deepcopy(child), trace_all=True)
        except ExportError:
            plain._modules[name] = make_plain(child)
    return plain


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
