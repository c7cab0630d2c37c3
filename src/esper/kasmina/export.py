"""The grown network as a plain `nn.Module` that no longer needs Esper, checked against its host."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina.graft import Seen, drop_taps, graft
from esper.kasmina.isolation import randomness_kept, state_kept
from esper.kasmina.plain import make_plain, require_plain
from esper.kasmina.probe import Place
from esper.kasmina.slot import Mode, Slot, part_of
from esper.kasmina.slotted import SlottedModel
from esper.kasmina.watching import Sample, call
from esper.leyline.errors import ExportError, first_line

TOLERANCE = 1e-6  # relative; only devices whose kernels are not deterministic need it


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
    with host.committed():
        places = list(_committed(host))
        expected, seen = _run_host(host, places, sample)
        model = _build(host, places, seen)
    for mode, wanted in expected.items():
        try:
            given = run(model, sample, evaluating=mode == "eval")
        except Exception as error:  # the user's code met a module that is not quite as it was
            raise ExportError(
                "The exported network fails where the host does not",
                given=f"in {mode} mode, {type(error).__name__}: {first_line(error)}",
                fix="its code may depend on what a seed changes: which children a module has",
            ) from error
        require_equal(wanted, given, TOLERANCE, f"In {mode} mode the exported network")
    return model


def _committed(host: SlottedModel) -> Iterator[tuple[str, Slot, Place]]:
    """Path, slot and place of every seed that is on, in committed mode."""
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
        yield paths[id(place.module)], slot, place


def _run_host(
    host: SlottedModel, places: list[tuple[str, Slot, Place]], sample: Sample
) -> tuple[dict[str, object], dict[Slot, Seen]]:
    """The host's outputs by mode, and what the carriers of the slots returned."""
    seen: dict[Slot, Seen] = {}

    def note(slot: Slot, place: Place, output: Any) -> None:
        kind = type(output)
        if place.part is not None and kind is not tuple and not hasattr(kind, "_fields"):
            copied = type(output.copy()) if hasattr(output, "copy") else None
            if copied is not kind:
                raise ExportError(
                    f"No part of the output that carries slot {slot.spec.name!r} can be exchanged",
                    given=f"a {kind.__name__}, which has no copy() that returns one",
                    valid="a tuple, named tuple, list or dict",
                )
        seen[slot] = Seen(kind, part_of(output, place.part).dtype)

    handles = [
        place.module.register_forward_hook(
            lambda _module, _args, output, slot=slot, place=place: note(slot, place, output)
        )
        for _, slot, place in places
    ]
    expected: dict[str, object] = {}
    try:
        for mode in ("eval", "present"):
            expected[mode] = run(host, sample, evaluating=mode == "eval")
    except ExportError:
        raise
    except Exception as error:  # the user's code, on an input of the user's
        raise ExportError(
            f"The host fails on the sample in {mode} mode",
            given=f"{type(error).__name__}: {first_line(error)}",
            valid="a tensor, a tuple of positional or a dict of keyword arguments that it accepts",
            fix="if it is training that takes no such batch, call host.eval() before"
            if "eval" in expected
            else None,
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    for _, slot, place in places:
        if place.part is not None and slot not in seen:
            raise ExportError(
                f"The sample does not reach slot {slot.spec.name!r}",
                given="the module that carries it was not called",
                fix="give a sample for which it is",
            )
    return expected, seen


def _build(
    host: SlottedModel, places: list[tuple[str, Slot, Place]], seen: Mapping[Slot, Seen]
) -> nn.Module:
    # Slots are not copied with the hooks that lead to them; results of past forwards, which a
    # model may have kept, cannot be copied with their history.
    memo: dict[int, Any] = {id(slot): slot for slot in host.slots}
    for module in host.model.modules():
        for leaf in tree_leaves(vars(module)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                memo[id(leaf)] = leaf.detach().clone()
    try:
        model = copy.deepcopy(host.model, memo)
    except Exception as error:  # an attribute of any kind whatever
        raise ExportError(
            "The model cannot be copied",
            given=f"{type(error).__name__}: {first_line(error)}",
            valid="a model that copy.deepcopy accepts",
        ) from error
    model = make_plain(model)
    for path, slot, place in places:
        seed = copy.deepcopy(slot.seed, memo)
        assert seed is not None
        graft(model, path, slot, seed, place.part, seen.get(slot))
    drop_taps(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.grad = None
    require_plain(model)
    return model


# --- running and comparing -------------------------------------------------------------------


def run(module: nn.Module, sample: Sample, *, evaluating: bool) -> object:
    """The output on the sample, with random numbers of its own; nothing remembers the run."""
    inputs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), sample)
    with state_kept(module), randomness_kept(module, stream=0), torch.no_grad():
        if evaluating:
            set_evaluating(module)
        output = tree_map_only(Tensor, Tensor.detach, call(module, inputs))
        return copy.deepcopy(output)  # it may share memory with a buffer


def set_evaluating(module: nn.Module) -> None:
    """Eval mode everywhere, also where a module's own `train` would not have it."""
    for part in module.modules():
        part.training = False


def require_equal(wanted: object, given: object, tolerance: float, what: str) -> None:
    """Raise unless all tensors agree within `tolerance` of the largest number in them, or of 1."""
    for where, left, right in _pairs(wanted, given, "output"):
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            difference, limit = _difference(left, right, tolerance)
            if not difference <= limit:
                raise ExportError(
                    f"{what} does not give what the host gives",
                    given=f"{where} differs by up to {difference:.3g}",
                    valid=f"at most {limit:.3g}",
                )
        elif type(left) is not type(right) or not np.all(left == right):
            raise ExportError(
                f"{what} does not return what the host returns",
                given=f"{type(right).__name__} as {where}",
                valid=f"{type(left).__name__}, the same",
            )


def largest_difference(wanted: object, given: object) -> float:
    """Of all numbers in two outputs that `require_equal` let pass."""
    return max(
        (
            _difference(left, right, 0.0)[0]
            for _, left, right in _pairs(wanted, given, "output")
            if isinstance(left, Tensor) and isinstance(right, Tensor)
        ),
        default=0.0,
    )


def _pairs(left: Any, right: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Corresponding leaves of two outputs, down to where they no longer correspond."""
    if type(left) is type(right) and not isinstance(left, Tensor):
        if isinstance(left, Mapping) and list(left) == list(right):
            for key in left:
                yield from _pairs(left[key], right[key], f"{where}[{key!r}]")
            return
        if isinstance(left, (tuple, list)) and len(left) == len(right):
            for index, (one, other) in enumerate(zip(left, right, strict=True)):
                yield from _pairs(one, other, f"{where}[{index}]")
            return
        if hasattr(left, "__dict__") and list(vars(left)) == list(vars(right)):
            for name, value in vars(left).items():
                yield from _pairs(value, vars(right)[name], f"{where}.{name}")
            return
    yield where, left, right


def _difference(left: Tensor, right: Tensor, tolerance: float) -> tuple[float, float]:
    """The largest difference, and the largest that is accepted; NaN and infinities match alike."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return float("inf"), tolerance
    if left.numel() == 0:
        return 0.0, tolerance
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if not (left.is_floating_point() or left.is_complex()):
        return float((left != right).any()), 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    one, other = left.to(wide), right.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, (one - other).abs())
    finite = one.abs()[one.isfinite()]
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return float(difference.max()), tolerance * scale
