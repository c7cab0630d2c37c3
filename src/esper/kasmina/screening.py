"""Models and submodules that cannot carry slots, whatever passes through them, and why."""

import difflib

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from esper.kasmina.slot import Slot, Tap
from esper.leyline.errors import SlotError, UnknownNameError

# By name, so that torch's distributed packages are not imported for the question.
_PARALLEL = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_SHOWN_PATHS = 10


def require_slottable(model: nn.Module) -> None:
    """Raise if no submodule of this model can carry a slot."""
    if next(model.parameters(), None) is None:
        raise SlotError(
            "The model has no parameters, so there is nothing to grow",
            given=type(model).__name__,
            fix="attach slots to a model that is trained",
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise SlotError(
            "The model has parameters without a shape",
            given=", ".join(lazy[:_SHOWN_PATHS]),
            fix="run the model once on the sample, so that its lazy modules get their sizes",
        )
    for name, module in model.named_modules():
        if isinstance(module, Slot) or any(
            isinstance(h, Tap) for h in module._forward_hooks.values()
        ):
            raise SlotError(
                "The model carries slots already",
                given=f"submodule {name!r}",
                fix="name all places when wrapping the model, and wrap it once",
            )


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The submodule at this path, if a hook on it would be honoured."""
    _require_hooks_work(path, "", model)
    known: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if path not in known:
        near = difflib.get_close_matches(path, [n for n in known if n], n=_SHOWN_PATHS, cutoff=0.0)
        raise UnknownNameError.of("submodule path", path, near)
    steps = path.split(".")
    for depth in range(1, len(steps) + 1):
        outer = ".".join(steps[:depth])
        _require_hooks_work(path, outer, known[outer])
    return known[path]


def _require_hooks_work(path: str, outer: str, module: nn.Module) -> None:
    given = f"{outer!r}, a {type(module).__name__}" if outer else f"a {type(module).__name__}"
    if isinstance(module, torch.jit.ScriptModule):
        raise SlotError(
            f"Submodule {path!r} is TorchScript, which cannot carry slots",
            given=given,
            fix="use the module it was scripted from",
        )
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        raise SlotError(
            f"Submodule {path!r} is inside compiled code, which cannot carry slots",
            given=given,
            fix="attach slots first, then torch.compile the result",
        )
    if any(kind.__name__ in _PARALLEL for kind in type(module).__mro__):
        raise SlotError(
            f"Submodule {path!r} is inside a parallel wrapper, which cannot carry slots",
            given=given,
            fix="attach slots to the model inside the wrapper (its .module)",
        )
