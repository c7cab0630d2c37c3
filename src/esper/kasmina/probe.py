"""Finds out, by running a model once on a sample, what passes through the places named as slots.

A place is accepted when it is certain what a seed there would see; otherwise it is refused with
the reason and what to say instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from esper.kasmina.isolation import buffers_kept, random_devices
from esper.kasmina.layout import Event, infer_layout
from esper.kasmina.slot import part_of
from esper.leyline.errors import SlotError, UnknownNameError
from esper.leyline.slots import Layout, SlotSpec

Sample = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A place for a slot: the output of the submodule at `path`.

    `part` picks from a tuple or dict output; `layout` states what could not be inferred.
    """

    path: str
    part: int | str | None = None
    layout: Layout | None = None
    name: str | None = None

    @classmethod
    def parse(cls, place: "Target | str") -> "Target":
        """A `Target`, or text: 'encoder.layer1', 'rnn@0' (part 0), 'trunk@features'."""
        if isinstance(place, Target):
            return place
        path, at, part = place.partition("@")
        if not at:
            return cls(path)
        return cls(path, part=int(part) if part.lstrip("-").isdigit() else part)

    @property
    def slot_name(self) -> str:
        if self.name is not None:
            return self.name
        path = self.path or "output"
        return path if self.part is None else f"{path}@{self.part}"


@dataclass(frozen=True)
class Place:
    """A target that was found good: where to hook, what to pick, what passes there."""

    module: nn.Module
    part: int | str | None
    spec: SlotSpec


def call(model: nn.Module, sample: Sample) -> object:
    """The model's output on a sample: one tensor, positional or keyword arguments."""
    if isinstance(sample, Mapping):
        return model(**sample)
    if isinstance(sample, (tuple, list)):
        return model(*sample)
    return model(sample)


def probe(model: nn.Module, places: Sequence[Target | str], sample: Sample) -> list[Place]:
    """Run the model on the sample and describe each place, or raise with the reason."""
    _require_plain(model)
    targets = [Target.parse(place) for place in places]
    modules = [_module_at(model, target) for target in targets]
    events: list[Event] = []

    def note(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        events.append(Event(module, args, output))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with (
            torch.random.fork_rng(devices=random_devices(model)),
            buffers_kept(model),
            torch.no_grad(),
        ):
            call(model, sample)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise SlotError(
            "The model fails on the sample",
            given=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            valid="a tensor, a tuple of positional or a dict of keyword arguments that it accepts",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    batch = _batch_size(sample)
    found: list[Place] = []
    for target, module in zip(targets, modules, strict=True):
        place = _describe(target, module, events, batch)
        for earlier, other in zip(targets, found, strict=False):
            if other.module is module and other.part == place.part:
                raise SlotError(
                    f"Slots {earlier.path!r} and {target.path!r} are the same module",
                    given=type(module).__name__,
                    fix="a shared module carries one slot; keep one of the two paths",
                )
        found.append(place)
    return found


def _require_plain(model: nn.Module) -> None:
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise SlotError(
            "A parallel wrapper cannot carry slots",
            given=type(model).__name__,
            fix="attach slots to the model inside first, then wrap the result",
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SlotError(
                f"Submodule {name!r} is a TorchScript module, which ignores hooks",
                given=type(module).__name__,
                fix="use the module it was scripted from",
            )


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _module_at(model: nn.Module, target: Target) -> nn.Module:
    known: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if target.path not in known:
        raise UnknownNameError.of("submodule path", target.path, [name for name in known if name])
    parts = target.path.split(".") if target.path else []
    for depth in range(len(parts) + 1):
        path = ".".join(parts[:depth])
        if _is_compiled(known[path]):
            raise SlotError(
                f"Submodule {target.path!r} is inside compiled code, which would ignore a slot",
                given=f"{path or 'the model'!r} is compiled",
                fix="attach slots first, then torch.compile the result",
            )
    return known[target.path]


def _describe(
    target: Target, module: nn.Module, events: Sequence[Event], batch: int | None
) -> Place:
    where = f"submodule {target.path!r}"
    calls = [index for index, event in enumerate(events) if event.module is module]
    if not calls:
        raise SlotError(
            f"A slot on {where} would do nothing: the model does not call it on the sample",
            given=type(module).__name__,
            fix="name a submodule whose forward is called",
        )
    part = _choose_part(where, target.part, events[calls[0]].output)
    outputs = [_tensor_at(where, part, events[index].output) for index in calls]
    layout = target.layout or infer_layout(where, outputs[0], events[: calls[0] + 1], batch)
    specs = [_spec_of(target.slot_name, layout, output) for output in outputs]
    if len({(spec.layout, spec.channels, len(spec.extent)) for spec in specs}) > 1:
        raise SlotError(
            f"{where.capitalize()} is called with different widths, so one seed cannot serve it",
            given=", ".join(str(list(output.shape)) for output in outputs),
            fix="name a submodule that always returns the same number of channels",
        )
    extent = tuple(
        sizes[0] if len(set(sizes)) == 1 else None
        for sizes in zip(*(spec.extent for spec in specs), strict=True)
    )
    spec = SlotSpec(name=target.slot_name, layout=layout, channels=specs[0].channels, extent=extent)
    return Place(module, part, spec)


def _choose_part(where: str, part: int | str | None, output: object) -> int | str | None:
    """Which part of a module's output the slot serves: the only tensor, unless told."""
    if isinstance(output, Tensor):
        if part is not None:
            raise SlotError(
                f"{where.capitalize()} returns one tensor, so there are no parts to pick from",
                given=f"part {part!r}",
                fix="leave the part out",
            )
        return None
    parts: dict[int | str, object]
    if isinstance(output, dict):
        parts = dict(output)
    elif isinstance(output, (tuple, list)):
        parts = dict(enumerate(output))
    else:
        raise SlotError(
            f"{where.capitalize()} returns something a slot cannot serve",
            given=type(output).__name__,
            valid="a tensor, or a tuple, list or dict that holds one",
        )
    tensors = [key for key, value in parts.items() if isinstance(value, Tensor)]
    if part is None and len(tensors) == 1:
        return tensors[0]
    if part not in tensors:
        raise SlotError(
            f"{where.capitalize()} returns a {type(output).__name__}; say which tensor to grow",
            given="no part" if part is None else f"part {part!r}",
            valid=", ".join(f"@{key}" for key in tensors) or "it holds no tensor",
            fix=None if not tensors else f"for example 'path@{tensors[0]}'",
        )
    return part


def _tensor_at(where: str, part: int | str | None, output: object) -> Tensor:
    tensor = part_of(output, part)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise SlotError(
            f"{where.capitalize()} does not return floating-point activations",
            given=str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__,
            valid="a float tensor",
        )
    if tensor.layout != torch.strided:
        raise SlotError(f"{where.capitalize()} returns a {tensor.layout} tensor", valid="strided")
    return tensor


def _spec_of(name: str, layout: Layout, output: Tensor) -> SlotSpec:
    shape = list(output.shape)
    channel = {
        Layout.DENSE: 1,
        Layout.SEQUENCE: 1,
        Layout.IMAGE: 1,
        Layout.TOKENS: 2,
        Layout.TIME_FIRST: 2,
        Layout.IMAGE_LAST: 3,
    }[layout]
    batch = 1 if layout is Layout.TIME_FIRST else 0
    if channel >= len(shape):
        raise SlotError(f"Slot {name!r} is not laid out as {layout.value}", given=shape)
    extent = tuple(size for axis, size in enumerate(shape) if axis not in (batch, channel))
    return SlotSpec(name=name, layout=layout, channels=shape[channel], extent=extent)


def _batch_size(sample: Sample) -> int | None:
    values: Sequence[object]
    if isinstance(sample, Tensor):
        values = [sample]
    else:
        values = list(sample.values()) if isinstance(sample, Mapping) else list(sample)
    sizes = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim() > 0]
    return sizes[0] if sizes else None
