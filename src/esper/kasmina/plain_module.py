"""The grown network as a plain `nn.Module` that no longer needs Esper, checked against its host.

Modules of Esper's classes become `torch.fx` graphs, which load and run without Esper. The host's
own names stay. A fossilized seed becomes a submodule of the module that carries it and acts on that
module's output, in the way that suits the module best:

- a graph calls the seed before it returns;
- `nn.Sequential` runs it last;
- any other module keeps it as a forward hook, so that code which reaches into the module
  (`self.fc.weight`) finds it as it was.
"""

import copy
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

from esper.kasmina.export_files import failing, origin_of, require_equal, run
from esper.kasmina.isolation import randomness_kept, state_kept
from esper.kasmina.slot import Mode, Part, Seed, Slot, part_of, taps_on, untap
from esper.kasmina.slotted import SlottedModel, past_results
from esper.kasmina.watching import Sample
from esper.leyline.errors import ExportError

TOLERANCE = 1e-6  # relative; only devices whose kernels are not deterministic need it
_PACKAGE = __name__.partition(".")[0]
# Their forward may run every child, so a seed among the children would be run as one of them.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, fx.GraphModule)


def export_module(host: SlottedModel, sample: Sample) -> nn.Module:
    """The committed network, that is the model with its fossilized seeds alone, as plain torch.

    The result is a copy: the host goes on unchanged. Modules keep their classes and parameters
    their names; a seed's parameters are under the module that carries it, as in
    `layer1.seed.body.0.weight`. What was of an Esper class is a `torch.fx` graph. Mode, device
    and `requires_grad` are the host's, gradients are dropped.

    Before it is returned it is run on the sample and compared with the host in committed mode,
    both as the host is now and in eval mode. It performs the same operations in the same order,
    so on the CPU the outputs are the same bit for bit; a relative difference up to 1e-6 is let
    pass for devices where the same operation twice gives two results.

    To load it elsewhere, the classes of your own modules must be importable there, as ever.
    """
    if broken := [name for name, each in host.named_parameters() if bool(each.isnan().any())]:
        fix = "its training has failed: go back to a checkpoint of before that"
        raise ExportError("The network is not a number", given=", ".join(broken[:3]), fix=fix)
    with host.committed():
        carriers = list(_carriers(host))
        expected = _run_host(host, carriers, sample)
        model = _build(host, carriers)
    for mode, wanted in expected.items():
        with failing(
            f"In {mode} mode the exported network fails where the host does not",
            fix="its code may depend on what a seed changes: which children a module has",
        ):
            given = run(model, sample, evaluating=mode == "eval")
        require_equal(wanted, given, TOLERANCE, f"In {mode} mode the exported network")
    return model


@dataclass(eq=False)
class _Carrier:
    """A module whose output goes through a seed that is on: where it is, and what of the output."""

    path: str
    module: nn.Module
    slot: Slot
    part: Part
    # What it returned for the sample, if it was called: the type of it all, the slot's precision.
    returned: type | None = None
    dtype: torch.dtype | None = None

    def note(self, _module: nn.Module, _args: object, output: Any) -> None:
        """A forward hook; raises if the part could not be exchanged in what the module returns."""
        kind = type(output)
        if self.part is not None and kind is not tuple and not hasattr(kind, "_fields"):
            copied = type(output.copy()) if hasattr(output, "copy") else None
            if copied is not kind:
                raise ExportError(
                    f"No part of the output that carries slot {self.slot.spec.name!r} can be "
                    "exchanged",
                    given=f"a {kind.__name__}, which has no copy() that returns one",
                    valid="a tuple, named tuple, list or dict",
                )
        self.returned, self.dtype = kind, part_of(output, self.part).dtype


def _carriers(host: SlottedModel) -> Iterator[_Carrier]:
    paths = {id(module): path for path, module in host.model.named_modules()}
    for slot, place in zip(host.slots, host.slot_places, strict=True):
        assert isinstance(slot, Slot)
        if slot.mode is not Mode.ON:
            continue
        if id(place.module) not in paths:
            raise ExportError(
                f"The module that carries slot {slot.spec.name!r} is no longer in the model",
                given=type(place.module).__name__,
                fix="exchange submodules before the model is wrapped",
            )
        yield _Carrier(paths[id(place.module)], place.module, slot, place.part)


def _run_host(host: SlottedModel, carriers: list[_Carrier], sample: Sample) -> dict[str, object]:
    """The host's outputs by mode; the carriers note what they return."""
    handles = [each.module.register_forward_hook(each.note) for each in carriers]
    advice = {"present": "if it is training that takes no such batch, call host.eval() before"}
    expected: dict[str, object] = {}
    try:
        for mode in ("eval", "present"):
            with failing(
                f"The host fails on the sample in {mode} mode",
                valid="a tensor, a tuple of positional or a dict of keyword arguments that it "
                "accepts",
                fix=advice.get(mode),
            ):
                expected[mode] = run(host, sample, evaluating=mode == "eval")
    finally:
        for handle in handles:
            handle.remove()
    for carrier in carriers:
        if carrier.part is not None and carrier.returned is None:
            raise ExportError(
                f"The sample does not reach slot {carrier.slot.spec.name!r}",
                given="the module that carries it was not called",
                fix="give a sample for which it is",
            )
    return expected


def _build(host: SlottedModel, carriers: list[_Carrier]) -> nn.Module:
    # Slots are not copied with the hooks that lead to them.
    memo: dict[int, Any] = past_results(host.model) | {id(slot): slot for slot in host.slots}
    with failing("The model cannot be copied", valid="a model that copy.deepcopy accepts"):
        model = copy.deepcopy(host.model, memo)
    model = _make_plain(model)
    for carrier in carriers:
        seed = copy.deepcopy(carrier.slot.seed, memo)
        assert seed is not None
        _graft(model, carrier, seed)
    for module in model.modules():
        untap(module)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.grad = None
    _require_plain(model)
    return model


# --- seeds in plain modules ------------------------------------------------------------------


class _Growth(nn.Module):
    """Turns a carrier's output into the grown one, as its slot does: h + alpha * g(h)."""

    def __init__(self, seed: Seed, carrier: _Carrier) -> None:
        super().__init__()
        vars(self).update(vars(seed))  # so that names begin with what the seed consists of
        self.alpha, self.part = carrier.slot.alpha, carrier.part
        self.returned = carrier.returned
        # What h has to be cast to where a host mixes precisions; with autocast there is no need.
        self.cast_to: torch.dtype | None = None
        own = next(seed.parameters(), None)
        if own is not None and carrier.dtype not in (None, own.dtype):
            self.cast_to = None if torch.is_autocast_enabled(own.device.type) else own.dtype

    def forward(self, output: Any) -> Any:
        h = output if self.part is None else output[self.part]
        g = Seed.forward(cast("Seed", self), h if self.cast_to is None else h.to(self.cast_to))
        grown = h + (g if self.alpha == 1.0 else self.alpha * g).to(h.dtype)
        if self.part is None:
            return grown
        # What `replace_part` does, in operations that a graph can hold.
        if isinstance(self.part, int) and self.returned is tuple:
            return output[: self.part] + (grown,) + output[self.part + 1 :]  # noqa: RUF005
        if fields := getattr(self.returned, "_fields", None):
            return output._replace(**{fields[self.part]: grown})
        changed = output.copy()
        changed.__setitem__(self.part, grown)
        return changed


class _Hook(_Growth):
    """The growth as a forward hook of its carrier, not as a module that follows it."""

    def forward(self, module: nn.Module, args: object, output: Any) -> Any:  # type: ignore[override]
        return super().forward(output)


def _graft(root: nn.Module, place: _Carrier, seed: Seed) -> None:
    """Let the copy of a carrier in `root` carry `seed`, a copy of the one in its slot, for good."""
    path, slot = place.path, place.slot
    carrier = root.get_submodule(path)
    name = "seed" if place.part is None else "seed_" + re.sub(r"\W", "_", str(place.part))
    taps = taps_on(carrier, slot)
    other_hooks = len(carrier._forward_hooks) > len(taps)
    if isinstance(carrier, fx.GraphModule):
        graph = carrier.graph
        if type(graph._codegen) is not CodeGen:
            raise ExportError(
                f"Submodule {path!r} is a graph made by torch.export, into which no seed can be "
                "put",
                given=type(graph._codegen).__name__,
                fix="plant the seed in the module from which the graph was made",
            )
        name = _adopt(carrier, name, _plain(_Growth(seed, place)))
        returned = graph.output_node()
        with graph.inserting_before(returned):
            returned.args = (graph.call_module(name, (returned.args[0],)),)
        carrier.recompile()
    elif type(carrier).forward is nn.Sequential.forward and not other_hooks:
        _adopt(carrier, name, _plain(_Growth(seed, place)))
    else:
        hook = _plain(_Hook(seed, place))
        home = path  # the nearest module outwards to which a submodule can be added
        while isinstance(root.get_submodule(home), _CONTAINERS):
            if not home:
                raise ExportError(
                    "There is no module that could hold the exported seed",
                    given=f"the model is a {type(root).__name__} that runs its children itself",
                    fix="wrap it in an nn.Module of your own that calls it",
                )
            home = home.rpartition(".")[0]
        relative = path.removeprefix(home).strip(".").replace(".", "_")
        _adopt(root.get_submodule(home), f"{relative}_{name}" if relative else name, hook)
        if taps:
            carrier._forward_hooks[taps[0]] = hook  # at its place among other hooks
        else:
            carrier.register_forward_hook(hook)


def _plain(growth: _Growth) -> fx.GraphModule:
    """The growth as a graph. A blueprint of the user's becomes one too, if all of it can.

    The file that registers a blueprint imports Esper, and so would loading a class from it.
    """
    plain = _trace(growth, name="Seed")
    for name, child in plain._modules.items():
        assert child is not None
        try:
            plain._modules[name] = _make_plain(copy.deepcopy(child), trace_all=True)
        except ExportError:
            plain._modules[name] = _make_plain(child)
    return plain


def _adopt(parent: nn.Module, name: str, child: nn.Module) -> str:
    while hasattr(parent, name):
        name += "_"
    parent.add_module(name, child)
    return name


# --- Esper's classes as graphs ---------------------------------------------------------------


def _comes_from_esper(thing: object) -> bool:
    """Would loading this object, class or function import Esper?"""
    kind = thing if isinstance(thing, type) else type(thing)
    homes = [getattr(thing, "__module__", None), *(base.__module__ for base in kind.__mro__)]
    return any(isinstance(home, str) and home.partition(".")[0] == _PACKAGE for home in homes)


def _make_plain(
    module: nn.Module, *, trace_all: bool = False, done: dict[int, nn.Module] | None = None
) -> nn.Module:
    """`module` with every part of an Esper class in it turned into a graph, under the same name.

    Changes `module` itself. With `trace_all` every part that is not of a torch class becomes a
    graph. Raises if a part cannot. One that occurs several times stays one: `done` remembers.
    """
    done = {} if done is None else done
    if id(module) in done:
        return done[id(module)]
    foreign = type(module).__module__.partition(".")[0] != "torch"
    # Before its children change, since its forward may look at them.
    plain = _trace(module) if _comes_from_esper(module) or (trace_all and foreign) else module
    done[id(module)] = plain
    for name, child in plain._modules.items():
        if child is not None:
            plain._modules[name] = _make_plain(child, trace_all=trace_all, done=done)
    return plain


class _OwnForward(fx.Tracer):
    """Records what a module's own forward does; each module that it calls stays a call."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(module: nn.Module, name: str | None = None) -> fx.GraphModule:
    """The graph of a module's forward, over its own parameters and submodules.

    Raises if the graph might not do what the module does: a graph keeps no Python conditions,
    attributes that change, or numbers drawn while it is recorded.
    """
    name = name or type(module).__name__
    graphs: list[fx.Graph] = []
    with state_kept(module), randomness_kept(module):
        before, drawn = dict(vars(module)), (torch.get_rng_state(), random.getstate())
        try:
            for training in (module.training, not module.training):
                module.training = training
                graphs.append(_OwnForward().trace(module))
        except Exception as error:  # the forward of any class whatever
            raise _untraceable(name, origin_of(error)) from error
        module.training = before["training"]
        changed = [key for key, value in vars(module).items() if value is not before.get(key)]
        drew = not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate()
    if changed:
        raise _untraceable(name, f"its forward sets self.{changed[0]}")
    if drew:
        raise _untraceable(name, "its forward draws random numbers by itself")
    graph, other = graphs  # in the present mode and in the other one
    if graph.python_code("self").src != other.python_code("self").src:
        raise _untraceable(name, "its forward looks at self.training")
    for node in graph.nodes:
        if node.op == "get_attr" and node.target.startswith("_tensor_constant"):
            raise _untraceable(name, "its forward makes tensors that do not depend on its input")
        node.meta.clear()  # holds Esper's classes
        node.type = None
    graph._tracer_cls = None  # would be saved with the graph, and is Esper's
    plain = fx.GraphModule(module, graph, class_name=name)
    for child in plain._modules:  # the graph's copies of containers are bare
        plain._modules[child] = module._modules[child]
    return plain


def _untraceable(name: str, reason: str) -> ExportError:
    return ExportError(
        f"{name} cannot be turned into a graph that runs without Esper",
        given=reason,
        valid="a forward of tensor operations and calls of submodules",
        fix="derive it from nn.Module instead of an Esper class, which lets it stay as it is",
    )


def _require_plain(module: nn.Module) -> None:
    """Raise if anything in the module would import Esper: a class, a hook, an attribute."""
    for path, part in module.named_modules():
        where = f"Submodule {path!r}" if path else "The model"
        if _comes_from_esper(part):
            raise ExportError(f"{where} still is of an Esper class", given=type(part).__name__)
        leaves = [(name, leaf) for name, value in vars(part).items() for leaf in tree_leaves(value)]
        for name, value in leaves:
            if _comes_from_esper(value):
                kind = value.__name__ if isinstance(value, type) else type(value).__name__
                raise ExportError(
                    f"{where} holds a piece of Esper, without which it could not be loaded",
                    given=f"{kind} in {name!r}",
                    fix="keep plain values there, such as spec.channels in place of spec",
                )
