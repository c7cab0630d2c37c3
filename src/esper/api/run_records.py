"""What a run of `grow` keeps beside its scores: what its slots hold, what training costs, the parts
of its model; and all of it as facts for pages, pictures and the display of its progress.
"""

import math
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper import __version__
from esper.api.ticking import GrowthDecision, StageChange, measuring
from esper.kasmina.shadow_seeds import counted
from esper.kasmina.watching import call
from esper.leyline.constants import TRAINING_PASSES
from esper.leyline.stages import SeedStage
from esper.show.growth_facts import Contribution, Part, Report, ShownEpoch, SlotState, TrialResult
from esper.show.terminal import listed

if TYPE_CHECKING:
    from esper.api.growing_model import GrowingModel

ALIKE = 3  # modules of one kind in a row, that are listed as one
UNTOLD = ("slots", "data", "origin")  # settings that are long, or are told otherwise
FIGURES = ("train_loss", "val_loss", "score", "committed", "added", "most_added")

Record = Mapping[str, Any]


# --- what records hold -----------------------------------------------------------------------


def slot_notes(host: "GrowingModel") -> dict[str, dict[str, Any]]:
    """What every slot holds that is not dormant."""
    found = {}
    for name, slot in host.seed_slots.items():
        if slot.stage is not SeedStage.DORMANT:
            held = {"blueprint": slot.blueprint, "params": slot.params} if slot.seed else {}
            found[name] = {"stage": slot.stage.name, "alpha": slot.alpha, **held}
    return found


def shadow_notes(host: "GrowingModel") -> list[dict[str, Any]]:
    """What every shadow showed that was ever heard."""
    readings, catalogue = host.shadows.readings, host.catalogue
    if readings is None:
        return []
    arrays = readings.arrays().items()
    return [
        {"slot": catalogue.slots.names[slot], "blueprint": catalogue.names[kind]}
        | {name: float(array[0, slot, kind]) for name, array in arrays}
        for slot, kind in readings.epochs[0].nonzero().tolist()
    ]


def size_of(inputs: object) -> int:
    """Numbers in a batch."""
    return sum(leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))


def step_flops(host: "GrowingModel") -> float | None:
    """FLOPs of a training step on the host's sample as it is now; None: they cannot be counted.

    Seeds in isolation train in a second pass.
    """
    try:
        with measuring(host):
            passes = counted(lambda: call(host, host.sample))
            if host.has_isolated_seeds:
                with host.isolated_on():
                    passes += counted(lambda: call(host, host.sample))
    except Exception:  # the counter cannot follow all code, and no run fails for that
        return None
    return float(TRAINING_PASSES * passes)


def model_notes(host: "GrowingModel") -> dict[str, Any]:
    """The model that grows: its parts, its places and its size."""
    slots: dict[str, list[str]] = {}
    for target, name in zip(host.targets, host.seed_slots, strict=True):
        slots.setdefault(target.path, []).append(name)
    return {
        "name": type(host.model).__name__,
        "params": host.catalogue.host_params,
        "room": host.room,
        "places": list(host.seed_slots),
        "parts": [asdict(part) for part in _parts(host.model, "", -1, slots)],
        "versions": versions(),
    }


def _parts(
    module: nn.Module, path: str, depth: int, slots: Mapping[str, list[str]]
) -> Iterator[Part]:
    """A module, opened as far as there are slots in it; many alike in a row are one part."""

    kind, here = type(module).__name__, tuple(slots.get(path, ()))
    start = f"{path}." if path else ""
    if not any(place.startswith(start) and place != path for place in slots):
        yield Part(path=path, kind=kind, params=_size(module), depth=max(depth, 0), slots=here)
        return
    if path:
        yield Part(path=path, kind=kind, params=_size(module), depth=depth, opened=True)
    for name, parameter in module.named_parameters(recurse=False):
        size = parameter.numel()
        yield Part(path=f"{start}{name}", kind="Parameter", params=size, depth=depth + 1)
    children = [(f"{start}{name}", child) for name, child in module.named_children()]

    def likeness(child: tuple[str, nn.Module]) -> object:
        """Neighbours of one kind without slots are alike; one with a slot is like no other."""
        inside = (p for p in slots if p == child[0] or p.startswith(f"{child[0]}."))
        return next(inside, type(child[1]))

    for like, group in groupby(children, likeness):
        alike = list(group)
        if isinstance(like, type) and len(alike) >= ALIKE:
            names = f"{alike[0][0]} … {alike[-1][0].removeprefix(start)}"
            kinds, total = f"{len(alike)} × {like.__name__}", sum(_size(each) for _, each in alike)
            yield Part(path=names, kind=kinds, params=total, depth=depth + 1)
        else:
            for place, child in alike:
                yield from _parts(child, place, depth + 1, slots)
    if here:
        yield Part(path=path, kind=f"{kind}'s output", params=0, depth=depth + 1, slots=here)


def versions() -> dict[str, str]:
    """Of all that numbers depend on."""
    found = {"esper": __version__, "python": platform.python_version()}
    return found | {name: version(name) for name in ("torch", "numpy", "safetensors")}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# --- facts for people ------------------------------------------------------------------------


def epoch_of(
    record: Record, seconds: Mapping[str, float], model_flops: float | None = None
) -> ShownEpoch:
    """Turn a record of the history into the facts that are shown of its epoch.

    Args:
        record: The epoch's record in the run's history.
        seconds: Time spent, by phase.
        model_flops: FLOPs of training the model alone for one epoch; None: they were not counted,
            or are not shown.
    """
    decision = GrowthDecision(**record["decision"])
    changes = (StageChange(**note) for note in record["events"])
    worth = record["contributions"]
    return ShownEpoch(
        number=record["epoch"],
        op=decision.op,
        decision=str(decision) if decision.changes_something else "",
        slot=decision.slot,
        changes=[(each.slot, each.after, each.reason) for each in changes],
        slots=[
            SlotState(slot=name, contribution=worth.get(name), **held)
            for name, held in record["slots"].items()
        ],
        seconds=seconds,
        flops=_training_flops(record, model_flops),
        tried="; ".join(
            words(record[key])
            for key, words in (("rollback", rolled_back), ("tryouts", _tried))
            if key in record
        ),
        **{name: record[name] for name in FIGURES},
    )


def total_flops(counts: Iterable[float | None]) -> float | None:
    """Add FLOPs up; the total of counts of which one is None is not known."""
    total = 0.0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _training_flops(record: Record, model_flops: float | None) -> float | None:
    """Count the FLOPs of everything that was trained from one record to the next.

    These are the epoch itself, the shadows that learned beside it, an earlier attempt that failed,
    and the trials after it, also those that were rewound. The passes in which shadows are measured
    count as part of them. The model's own validation passes do not count.
    """
    if model_flops is None:
        return None
    shadows = record.get("shadow_cost", 0.0) * model_flops
    failed_attempt = record.get("rollback", {}).get("flops", 0.0)
    trials = [trial["flops"] for trial in record.get("tryouts", [])]
    return total_flops([record["flops"], shadows, failed_attempt, *trials])


def _tried(tryouts: Sequence[Record]) -> str:
    """Tryouts in words."""
    words = []
    for each in tryouts:
        seeds, loss, alone = listed(each["seeds"]), each["val_loss"], each["alone"]
        came = "it diverged" if loss is None else f"validation loss {loss:.4g}"
        end = "kept" if each["chosen"] else "left out"
        words.append(f"{seeds} tried out: {came}, {alone:.4g} without: {end}")
    return "; ".join(words)


def _trial_results(record: Record) -> list[TrialResult]:
    """Read the trials that were made after an epoch."""
    results = []
    for trial in record.get("tryouts", []):
        val_loss = math.inf if trial["val_loss"] is None else trial["val_loss"]
        result = TrialResult(
            seeds=tuple(trial["seeds"]),
            val_loss=val_loss,
            val_loss_without=trial["alone"],
            is_chosen=trial["chosen"],
        )
        results.append(result)
    return results


def rolled_back(note: Record) -> str:
    """A rollback in words."""
    return f"{note['what']} ({note['given']}): {note['seed']} was taken out, and the epoch repeated"


def contributions_of(notes: Record) -> dict[str, Contribution]:
    """Read the contributions to a finished network; a run of an older version has none."""
    stored = notes.get("contributions", {})
    return {slot: Contribution(**note) for slot, note in stored.items()}


def report_of(name: str, notes: Record) -> Report:
    """What a checkpoint's notes say of a run."""
    settings, model = notes["settings"], notes["model"]
    history = notes["history"]
    # Nothing is planted before the first epoch ends, so its FLOPs are those of the model alone.
    model_flops = history[0]["flops"] if history else None
    return Report(
        name=name,
        model=model["name"],
        settings={key: value for key, value in settings.items() if key not in UNTOLD},
        versions=model["versions"],
        origin=settings["origin"] or {},
        planned=settings["epochs"],
        metric=settings["metric"] or "score",
        before=notes["before"],
        after=notes["after"],
        contributions=contributions_of(notes),
        trials=[result for record in history for result in _trial_results(record)],
        host_params=model["params"],
        room=model["room"],
        places=model["places"],
        parts=[Part(**part | {"slots": tuple(part["slots"])}) for part in model["parts"]],
        epochs=[
            epoch_of(record, seconds, model_flops)
            for record, seconds in zip(history, notes["seconds"], strict=True)
        ],
    )
