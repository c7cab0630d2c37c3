"""Go on with a run of `grow` that was interrupted, as if it had not been."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper.api.batches import Source
from esper.api.budgets import Budget
from esper.api.growing import Data, Growth, MakeOptimizer, OnEpoch
from esper.api.hosts import wrap
from esper.api.inspection import require_module
from esper.api.losses import Loss
from esper.api.runs import (
    GrowError,
    GrownRun,
    as_target,
    device_of,
    held,
    move,
    open_checkpoint,
    read_sample,
    require_run,
    restore,
)
from esper.api.schedulers import MakeScheduler
from esper.api.scoring import Metric, Scoring
from esper.archive import Archive
from esper.kasmina.isolation import Isolation
from esper.kasmina.probe import Sample
from esper.leyline.errors import DataError
from esper.tamiyo.controllers.protocol import Controller


def resume(
    path: str | Path,
    model: nn.Module | None = None,
    train: Source | None = None,
    val: Source | None = None,
    *,
    loss: str | Loss | None = None,
    metric: str | Metric | None = None,
    optimizer: str | MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    controller: Controller | str | Path | None = None,
    test: Source | None = None,
    device: torch.device | str | None = None,
    sample: Sample | None = None,
    on_epoch: OnEpoch | None = None,
) -> GrownRun:
    """Go on with the run in this folder, bit for bit as if it had never stopped (on a CPU).

    Code is not stored, so model and data are built anew and given here; its weights do not
    matter. So are functions and objects that `grow` was given: a loss, a metric, an optimiser, a
    scheduler or a controller of your own. What was given by name is known. Data that are not those
    of the run are refused. A run that was finished comes back as it is; then the model is enough.
    """
    require_run(path)
    with held(Path(path)):
        archive = open_checkpoint(path)
        run = _build(path, archive, model, device, sample)
        if archive.notes["after"]:
            restore(run, archive, training=False)
            return run
        growth = _growth(
            run, loss, metric, optimizer, scheduler, controller, train, val, test, on_epoch
        )
        restore(run, archive, training=True)
        growth.go_on(archive)
        growth.go()
    return run


def _growth(
    run: GrownRun,
    loss: str | Loss | None,
    metric: str | Metric | None,
    optimizer: str | MakeOptimizer | None,
    scheduler: MakeScheduler | None,
    controller: Controller | str | Path | None,
    train: Source | None,
    val: Source | None,
    test: Source | None,
    on_epoch: OnEpoch | None,
) -> Growth:
    """The loop of the run, from what was remembered and what was given again."""
    settings = run.settings
    chosen = {
        "loss": _same(settings, "loss", loss),
        "metric": _same(settings, "metric", None if metric == "auto" else metric),
        "optimizer": _asked(settings, "optimizer", optimizer),
        "controller": _asked(settings, "leader", controller, "controller"),
    }
    _require_given(settings, train, val, test, scheduler)
    data = Data.of(train, val, test, settings["batch_size"])
    _require_same_data(settings["data"], data.fingerprints(settings["seed"]))
    return Growth(
        run,
        data,
        Scoring.of(chosen["loss"], chosen["metric"]),
        chosen["controller"],
        chosen["optimizer"],
        scheduler,
        on_epoch,
    )


def load_run(
    path: str | Path,
    model: nn.Module | None,
    *,
    device: torch.device | str | None = None,
    sample: Sample | None = None,
) -> GrownRun:
    """The run in this folder as it is, without going on: to report on it or to export it."""
    archive = open_checkpoint(path)
    run = _build(path, archive, model, device, sample)
    restore(run, archive, training=False)
    return run


def _build(
    path: str | Path,
    archive: Archive,
    model: nn.Module | None,
    device: torch.device | str | None,
    sample: Sample | None,
) -> GrownRun:
    """The run with a new host like that of the checkpoint."""
    settings: dict[str, Any] = dict(archive.notes["settings"])
    if model is None:
        raise GrowError(
            f"The model of {path} is needed to go on",
            fix="build it as for the run and pass it: resume(path, model=Net(), ...)",
        )
    require_module(model)
    move(model, device)
    sample = read_sample(path, device_of(model)) if sample is None else sample
    if sample is None:
        raise GrowError(
            f"{path} could not keep the sample of this model's inputs",
            fix="pass sample=, one batch of inputs",
        )
    host = wrap(
        model,
        sample,
        slots=[as_target(note) for note in settings["slots"]],
        budget=Budget(settings["budget"], settings["epochs"]),
        blueprints=settings["blueprints"],
        isolation=Isolation.DUAL_PASS,
        seed=settings["seed"],
    )
    return GrownRun(host, settings, path=Path(path))


def _asked(settings: Mapping[str, Any], key: str, given: Any, name: str | None = None) -> Any:
    """What the run was asked for, or what stands for it now."""
    name = name or key
    if given is not None:
        return given
    if settings[key] is None:
        raise GrowError(
            f"The run's {name} was a function or an object, which is not stored",
            fix=f"pass it again: resume(path, ..., {name}=...)",
        )
    return settings[key]


def _same(settings: Mapping[str, Any], key: str, given: Any) -> Any:
    """What the run was asked for; something else would make its scores mean something else."""
    was, now = settings[key], given if isinstance(given, str) else None
    if given is not None and now != was:
        raise GrowError(
            f"The run has another {key}",
            given="a function" if now is None else repr(now),
            valid="the function that grow was given" if was is None else repr(was),
            fix=f"leave {key} away" if was is not None else f"pass that {key}",
        )
    return _asked(settings, key, given)


def _require_given(
    settings: Mapping[str, Any], train: object, val: object, test: object, scheduler: object
) -> None:
    needed = {
        "train": train is None,
        "val": val is None,
        "test": test is None and "test" in settings["data"],
        "scheduler": scheduler is None and settings["scheduled"],
    }
    missing = [name for name, lacks in needed.items() if lacks]
    if missing:
        raise GrowError(
            "Going on needs what the run was given",
            given=f"no {', no '.join(missing)}",
            fix=f"pass {', '.join(missing)} to resume, as to grow",
        )
    if scheduler is not None and not settings["scheduled"]:
        raise GrowError("The run has no scheduler", given="one", fix="leave scheduler away")


def _require_same_data(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    for name, was in saved.items():
        now = present.get(name)
        if now != was:
            raise DataError(
                f"The {name} data are not those of the run",
                given=_told(now),
                valid=_told(was),
                fix="load the same data, in the same order",
            )


def _told(fingerprint: Mapping[str, Any] | None) -> str:
    if fingerprint is None:
        return "none"
    return f"{fingerprint['batches']} batches, the first one {fingerprint['first']}"
