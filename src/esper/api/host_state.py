"""A growing host as tensors and notes: weights, seeds, optimisers, memory. Nothing is pickled."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.archive import Archive, ArchiveError
from esper.kasmina.shadow_seeds import COUNTS, Shadow, ShadowKey
from esper.leyline.errors import EsperError, OptimizerMismatchError
from esper.leyline.shadows import ShadowReadings

if TYPE_CHECKING:
    from esper.api.growing_model import GrowingModel

KIND, VERSION = "growing-host", 2
_PLAIN = (bool, int, float, str, type(None))


class KeepingError(EsperError):
    """Something that cannot be saved, or that does not fit what was saved."""


def pack(host: "GrowingModel") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that training goes on from."""
    tensors: dict[str, Tensor] = {}
    for name, value in host.state_dict().items():
        if not isinstance(value, Tensor):
            raise KeepingError(
                "The model keeps something in its state that is not a tensor",
                given=f"{name}: {type(value).__name__}",
                fix="return tensors from get_extra_state",
            )
        tensors[f"host.{name}"] = value
    passing = _passing_buffers(host).items()
    tensors |= {f"buffer.{name}": each for name, each in passing if each is not None}
    optimizers = []
    for index, optimizer in enumerate(host.optimizers):
        found, kept = _pack_optimizer(optimizer)
        tensors |= {f"optimizer.{index}.{name}": each for name, each in found.items()}
        optimizers.append(kept)
    notes = {
        "slots": [spec.name for spec in host.specs],
        "added": host.added,
        "frozen": [name for name, p in host.named_parameters() if not p.requires_grad],
        "optimizers": optimizers,
    }
    return tensors, notes


def unpack(host: "GrowingModel", archive: Archive, *, training: bool = True) -> None:
    """Take over what was packed; the optimisers' part only to go on training."""
    notes, optimizers = archive.notes, host.optimizers if training else ()
    try:
        _require_fitting(host, archive, training=training)
        host.load_state_dict(archive.part("host"))
        _load_buffers(host, archive.part("buffer"))
        frozen = frozenset(notes["frozen"])
        for name, parameter in host.named_parameters():
            parameter.requires_grad_(name not in frozen)
        for index, optimizer in enumerate(optimizers):
            state = archive.part(f"optimizer.{index}")
            _unpack_optimizer(optimizer, state, notes["optimizers"][index])
    except (LookupError, TypeError, ValueError) as error:
        raise ArchiveError(
            "What was saved does not describe a growing host",
            given=f"{type(error).__name__}: {error}",
        ) from error


def _require_fitting(host: "GrowingModel", archive: Archive, *, training: bool) -> None:
    """Refuse what was saved of another host, before anything is changed."""
    notes, added = archive.notes, int(archive.notes["added"])
    both = {"slots": (list(notes["slots"]), [spec.name for spec in host.specs])}
    if training:
        kinds = [type(each).__name__ for each in host.optimizers]
        both["optimisers"] = ([kept["kind"] for kept in notes["optimizers"]], kinds)
    for what, (saved, present) in both.items():
        if saved != present:
            raise KeepingError(
                f"What was saved has other {what}",
                given=f"saved {saved}, here {present}",
                fix=f"make the model and its optimiser with the same {what} first",
            )
    if host.room is not None and added > host.room:
        raise KeepingError(
            "What was saved has grown beyond the budget of this host",
            given=f"{added:,} parameters in seeds, allowed {host.room:,}",
            fix="wrap the model with the budget that it was saved with",
        )
    # Seeds are built anew from their blueprints; the model must have what was saved of it.
    of_model = {name for name in archive.part("buffer") if name.startswith("model.")}
    missing = sorted(of_model - _passing_buffers(host).keys())
    if missing:
        raise KeepingError(
            "What was saved is of another model",
            given=f"it has no buffer {', '.join(missing[:3])}",
            fix="build the model as it was built for the run",
        )


# --- memory as part of a host's state --------------------------------------------------------

MEMORY = "memory."
SHADOW = f"{MEMORY}shadow."


def memory_state(host: "GrowingModel") -> dict[str, Tensor]:
    """What ticks and the controller remember, as tensors, so that any file can hold them."""
    remembered, notes = host.memory.pack()
    shadows, heard = _pack_shadows(host)
    text = json.dumps(notes | host.watch.pack() | {"shadows": heard}).encode()
    found = {f"{MEMORY}controller.{name}": each for name, each in remembered.items()}
    found |= {f"{SHADOW}{name}": each for name, each in shadows.items()}
    return {f"{MEMORY}notes": torch.tensor(list(text), dtype=torch.uint8), **found}


def recall_memory(host: "GrowingModel", state: Mapping[str, Tensor]) -> None:
    """Take over what `memory_state` gave, wherever its tensors lie now."""
    kept = {name: each.to("cpu", copy=True) for name, each in state.items()}
    notes = json.loads(bytes(kept.pop(f"{MEMORY}notes").tolist()))
    of_shadows = {n.removeprefix(SHADOW): kept.pop(n) for n in list(kept) if n.startswith(SHADOW)}
    _unpack_shadows(host, of_shadows, notes["shadows"])
    prefix = f"{MEMORY}controller."
    host.memory.unpack({n.removeprefix(prefix): each for n, each in kept.items()}, notes)
    host.watch.unpack(notes)


# --- shadows -------------------------------------------------------------------------------


def _pack_shadows(host: "GrowingModel") -> tuple[dict[str, Tensor], dict[str, Any]]:
    shadows, living = host.shadows, []
    tensors: dict[str, Tensor] = {}
    if shadows.readings is not None:
        tensors |= {f"readings.{n}": each for n, each in shadows.readings.arrays().items()}
    for number, (key, shadow) in enumerate(shadows.living.items()):
        found, kept = shadow.kept or ({}, None)
        if shadow.optimizer is not None:
            found, kept = _pack_optimizer(shadow.optimizer)
        seen = {"gains": torch.tensor(shadow.gains), "squares": torch.tensor(shadow.squares)}
        parts = {"seed": shadow.seed.state_dict(), "optimizer": found, "seen": seen}
        for part, values in parts.items():
            tensors |= {f"{number}.{part}.{name}": each for name, each in values.items()}
        blueprint = host.catalogue.names[key.blueprint]
        living.append([key.slot, blueprint, shadow.epochs, kept])
    return tensors, {"living": living, **{name: getattr(shadows, name) for name in COUNTS}}


def _unpack_shadows(
    host: "GrowingModel", tensors: Mapping[str, Tensor], notes: Mapping[str, Any]
) -> None:
    def part(prefix: str) -> dict[str, Tensor]:
        return {n[len(prefix) :]: each for n, each in tensors.items() if n.startswith(prefix)}

    readings = part("readings.")
    living: dict[ShadowKey, Shadow] = {}
    for number, (slot, blueprint, epochs, kept) in enumerate(notes["living"]):
        key = ShadowKey(slot, host.catalogue.index(blueprint))
        seed = host.shadow_seed(*key)
        seed.load_state_dict(part(f"{number}.seed."))
        pending = None if kept is None else (part(f"{number}.optimizer."), kept)
        device = next(seed.parameters()).device
        seen = {name: [*each.to(device)] for name, each in part(f"{number}.seen.").items()}
        living[key] = Shadow(seed, epochs, None, pending, **seen)
    host.shadows.restore(living, ShadowReadings(**readings) if readings else None, notes)
    revive_shadows(host)


def revive_shadows(host: "GrowingModel") -> None:
    """Give shadows that were loaded their optimisers back, once the host has one."""
    for shadow in host.shadows.living.values():
        if shadow.kept is not None and shadow.optimizer is None and host.optimizers:
            optimizer, (tensors, kept) = shadow.equip(host.optimizers[0]), shadow.kept
            if kept["kind"] == type(optimizer).__name__:
                _unpack_optimizer(optimizer, tensors, kept)


# --- buffers that are not part of a module's state ----------------------------------------


def _passing_buffers(host: "GrowingModel") -> dict[str, Tensor | None]:
    """Those that modules keep out of their state; a model may change them all the same."""
    return {
        f"{path}.{name}": module._buffers.get(name)
        for path, module in host.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _load_buffers(host: "GrowingModel", saved: Mapping[str, Tensor]) -> None:
    for name in _passing_buffers(host).keys() - saved.keys():  # was None when it was saved
        path, _, last = name.rpartition(".")
        host.get_submodule(path)._buffers[last] = None
    device = next(host.parameters()).device
    for name, value in saved.items():
        path, _, last = name.rpartition(".")
        buffers = host.get_submodule(path)._buffers
        before = buffers[last]
        if before is not None and before.shape == value.shape and before.dtype == value.dtype:
            before.data.copy_(value)  # others may look at it too
        else:  # the model makes it anew, in a size that follows from its inputs
            buffers[last] = value.to(device if before is None else before.device, copy=True)


# --- optimisers ----------------------------------------------------------------------------


def _pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State goes by position, which follows from what has grown."""
    whole = optimizer.state_dict()
    groups = whole["param_groups"]
    tables = {f"state.{index}": state for index, state in whole["state"].items()}
    tables |= {f"group.{index}": group for index, group in enumerate(groups)}
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for table, values in tables.items():
        for name, value in values.items():
            several = isinstance(value, (tuple, list))
            if isinstance(value, Tensor):
                tensors[f"{table}.{name}"] = value
            elif name in ("params", "param_names"):
                continue
            elif all(isinstance(each, _PLAIN) for each in (value if several else [value])):
                scalars[f"{table}.{name}"] = list(value) if several else value
            else:
                raise KeepingError(
                    "The optimiser keeps something that cannot be saved",
                    given=f"{table}.{name}: {type(value).__name__}",
                    valid="tensors and numbers",
                )
    sizes = [len(group["params"]) for group in groups]
    return tensors, {"kind": type(optimizer).__name__, "sizes": sizes, "scalars": scalars}


def _unpack_optimizer(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], kept: Mapping[str, Any]
) -> None:
    groups = optimizer.param_groups
    sizes = [len(group["params"]) for group in groups]
    if sizes != kept["sizes"]:
        raise OptimizerMismatchError(
            "The saved optimiser has other parameter groups",
            given=f"saved groups of {kept['sizes']}, here {sizes}",
            fix="make the optimiser with the same groups",
        )
    state: dict[int, dict[str, Any]] = {}
    for place, value in (*kept["scalars"].items(), *tensors.items()):
        part, index, name = place.split(".", 2)
        if part == "state":
            state.setdefault(int(index), {})[name] = value
        else:
            before = groups[int(index)].get(name)
            given = value.clone() if isinstance(value, Tensor) else value
            groups[int(index)][name] = tuple(given) if isinstance(before, tuple) else given
    owners = [(parameter, group) for group in groups for parameter in group["params"]]
    # Not by load_state_dict, which casts moments to the parameters' precision.
    optimizer.state.clear()
    for number in sorted(state):
        parameter, group = owners[number]
        # Step counters stay on the CPU unless the kernel wants them.
        on_cpu = () if group.get("capturable") or group.get("fused") else ("step",)
        optimizer.state[parameter] = state[number] | {
            name: value.to("cpu" if name in on_cpu else parameter.device, copy=True)
            for name, value in state[number].items()
            if isinstance(value, Tensor)
        }
