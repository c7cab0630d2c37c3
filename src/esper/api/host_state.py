"""A growing host as tensors and notes: weights, seeds, optimisers, memory. Nothing is pickled."""

import json
from collections.abc import Mapping
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from esper.archive import Archive, KeepingError, packed, unpacked
from esper.archive.tensors import describing
from esper.kasmina.shadow_seeds import COUNTS, Shadow, ShadowKey
from esper.leyline.errors import OptimizerMismatchError, require_equal
from esper.leyline.shadows import ShadowReadings

if TYPE_CHECKING:
    from esper.api.growing_model import GrowingModel

KIND, VERSION = "growing-host", 3


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
    with describing("What was saved does not describe a growing host"):
        _require_fitting(host, archive, training=training)
        host.load_state_dict(archive.part("host"))
        _load_buffers(host, archive.part("buffer"))
        frozen = frozenset(notes["frozen"])
        for name, parameter in host.named_parameters():
            parameter.requires_grad_(name not in frozen)
        for index, optimizer in enumerate(optimizers):
            state = archive.part(f"optimizer.{index}")
            _unpack_optimizer(optimizer, state, notes["optimizers"][index])


def _require_fitting(host: "GrowingModel", archive: Archive, *, training: bool) -> None:
    """Refuse what was saved of another host, before anything is changed."""
    notes, added = archive.notes, int(archive.notes["added"])
    both = {"slots": ([spec.name for spec in host.specs], list(notes["slots"]))}
    if training:
        kinds = [type(each).__name__ for each in host.optimizers]
        both["optimisers"] = (kinds, [kept["kind"] for kept in notes["optimizers"]])
    for what, pair in both.items():
        fix = f"make the model and its optimiser with the same {what} first"
        require_equal(f"What was saved has other {what}", *pair, fix, KeepingError)
    if host.room is not None and added > host.room:
        raise KeepingError(
            "What was saved has grown beyond the budget of this host",
            given=f"{added:,} parameters in seeds, allowed {host.room:,}",
            fix="wrap the model with the budget that it was saved with",
        )
    # Seeds are built anew from their blueprints; the model must have what was saved of it.
    of_model = {name for name in archive.part("buffer") if name.startswith("model.")}
    if missing := sorted(of_model - _passing_buffers(host).keys()):
        raise KeepingError(
            "What was saved is of another model",
            given=f"it has no buffer {', '.join(missing[:3])}",
            fix="build the model as it was built for the run",
        )


# --- memory as part of a host's state --------------------------------------------------------

MEMORY = "memory."


def memory_state(host: "GrowingModel") -> dict[str, Tensor]:
    """What ticks and the controller remember, as tensors, so that any file can hold them."""
    found: dict[str, Tensor] = {}
    parts = {"ticks": host.memory.pack(), "steps": host.watch.pack(), "shadows": _shadows_of(host)}
    notes = packed(parts, found, of="The controller", where=f"{MEMORY}state")
    return {f"{MEMORY}notes": written(notes), **found}


def recall_memory(host: "GrowingModel", state: Mapping[str, Tensor]) -> None:
    """Take over what `memory_state` gave, wherever its tensors lie now."""
    kept = {name: each.to("cpu", copy=True) for name, each in state.items()}
    parts = unpacked(read(kept.pop(f"{MEMORY}notes")), kept)
    _take_shadows(host, parts["shadows"])
    host.memory.unpack(parts["ticks"])
    host.watch.unpack(parts["steps"])


def written(notes: object) -> Tensor:
    """What JSON can hold, as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(notes).encode()), dtype=torch.uint8).clone()


def read(notes: Tensor) -> Any:
    """What was `written`."""
    return json.loads(notes.cpu().numpy().tobytes())


# --- shadows -------------------------------------------------------------------------------


def _shadows_of(host: "GrowingModel") -> dict[str, Any]:
    shadows, living = host.shadows, []
    for key, shadow in shadows.living.items():
        kept = shadow.kept if shadow.optimizer is None else _pack_optimizer(shadow.optimizer)
        name, state = host.catalogue.names[key.blueprint], shadow.seed.state_dict()
        seen = {"epochs": shadow.epochs, "gains": shadow.gains, "squares": shadow.squares}
        living.append({"slot": key.slot, "blueprint": name, "seed": state, "kept": kept, **seen})
    readings = None if shadows.readings is None else shadows.readings.arrays()
    counts = {name: getattr(shadows, name) for name in COUNTS}
    return {"living": living, "readings": readings, **counts}


def _take_shadows(host: "GrowingModel", notes: Mapping[str, Any]) -> None:
    living: dict[ShadowKey, Shadow] = {}
    for each in notes["living"]:
        key = ShadowKey(each["slot"], host.catalogue.index(each["blueprint"]))
        seed = host.shadow_seed(*key)
        seed.load_state_dict(each["seed"])
        device = next(seed.parameters()).device
        seen = {name: [one.to(device) for one in each[name]] for name in ("gains", "squares")}
        living[key] = Shadow(seed, each["epochs"], None, each["kept"], **seen)
    readings = notes["readings"]
    host.shadows.restore(living, None if readings is None else ShadowReadings(**readings), notes)
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
    lists = ("params", "param_names")
    groups = [{k: v for k, v in each.items() if k not in lists} for each in whole["param_groups"]]
    tensors: dict[str, Tensor] = {}
    state = packed([whole["state"], groups], tensors, of="The optimiser")
    return tensors, {"kind": type(optimizer).__name__, "sizes": _sizes(optimizer), "state": state}


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _unpack_optimizer(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], kept: Mapping[str, Any]
) -> None:
    groups, fix = optimizer.param_groups, "make the optimiser with the same groups"
    what = "The saved optimiser has groups of other numbers of parameters"
    require_equal(what, _sizes(optimizer), kept["sizes"], fix, OptimizerMismatchError)
    state, saved = unpacked(kept["state"], tensors)
    for group, values in zip(groups, saved, strict=True):
        group.update(tree_map_only(Tensor, Tensor.clone, values))
    owners = [(parameter, group) for group in groups for parameter in group["params"]]
    # Not by load_state_dict, which casts moments to the parameters' precision.
    optimizer.state.clear()
    for number in sorted(state):
        parameter, group = owners[number]
        optimizer.state[parameter] = placed(state[number], parameter, group)


def placed(state: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of what an optimiser remembers of a parameter, where it wants them: step counters stay
    on the CPU unless its kernel wants them. Tensors may lie in lists or dicts, and change in place.
    """
    on_cpu = () if group.get("capturable") or group.get("fused") else ("step",)
    place = {name: "cpu" if name in on_cpu else parameter.device for name in state}
    return {
        name: tree_map_only(Tensor, methodcaller("to", place[name], copy=True), value)
        for name, value in state.items()
    }
