"""Turns modules of Esper's classes into `torch.fx` graphs, which load and run without Esper."""

import random
from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from esper.leyline.errors import ExportError, first_line

_PACKAGE = __name__.partition(".")[0]


def comes_from_esper(thing: object) -> bool:
    """Would loading this object, class or function import Esper?"""
    kind = thing if isinstance(thing, type) else type(thing)
    homes = [getattr(thing, "__module__", None), *(base.__module__ for base in kind.__mro__)]
    return any(isinstance(home, str) and home.partition(".")[0] == _PACKAGE for home in homes)


def make_plain(
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
    plain = trace(module) if comes_from_esper(module) or (trace_all and foreign) else module
    done[id(module)] = plain
    for name, child in plain._modules.items():
        if child is not None:
            plain._modules[name] = make_plain(child, trace_all=trace_all, done=done)
    return plain


class _OwnForward(fx.Tracer):
    """Records what a module's own forward does; each module that it calls stays a call."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace(module: nn.Module, name: str | None = None) -> fx.GraphModule:
    """The graph of a module's forward, over its own parameters and submodules.

    Raises if the graph might not do what the module does: a graph keeps no Python conditions,
    attributes that change, or numbers drawn while it is recorded.
    """
    name = name or type(module).__name__
    graphs = _record(module)
    code, other = (graph.python_code("self").src for graph in graphs)
    if code != other:
        raise _untraceable(name, "its forward looks at self.training")
    graph = graphs[0]
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


def _record(module: nn.Module) -> list[fx.Graph]:
    """Its graph in the present mode and in the other one, leaving the module as it was."""
    name = type(module).__name__
    before = dict(vars(module))
    drawn = (torch.get_rng_state(), random.getstate())
    graphs: list[fx.Graph] = []
    try:
        for training in (module.training, not module.training):
            module.training = training
            graphs.append(_OwnForward().trace(module))
        module.training = before["training"]
        changed = [key for key, value in vars(module).items() if value is not before.get(key)]
    except Exception as error:  # the forward of any class whatever
        raise _untraceable(name, f"{type(error).__name__}: {first_line(error)}") from error
    finally:
        vars(module).clear()
        vars(module).update(before)
        drew = not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate()
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
    if changed:
        raise _untraceable(name, f"its forward sets self.{changed[0]}")
    if drew:
        raise _untraceable(name, "its forward draws random numbers by itself")
    return graphs


def _untraceable(name: str, reason: str) -> ExportError:
    return ExportError(
        f"{name} cannot be turned into a graph that runs without Esper",
        given=reason,
        valid="a forward of tensor operations and calls of submodules",
        fix="derive it from nn.Module instead of an Esper class, which lets it stay as it is",
    )


def require_plain(module: nn.Module) -> None:
    """Raise if anything in the module would import Esper: a class, a hook, an attribute."""
    for path, part in module.named_modules():
        where = f"Submodule {path!r}" if path else "The model"
        if comes_from_esper(part):
            raise ExportError(f"{where} still is of an Esper class", given=type(part).__name__)
        for name, value in _contents(part):
            if comes_from_esper(value):
                kind = value.__name__ if isinstance(value, type) else type(value).__name__
                raise ExportError(
                    f"{where} holds a piece of Esper, without which it could not be loaded",
                    given=f"{kind} in {name!r}",
                    fix="keep plain values there, such as spec.channels in place of spec",
                )


def _contents(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        for leaf in tree_leaves(value):
            yield name, leaf
