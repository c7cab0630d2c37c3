"""What does a model lack, and where? All that could be planted learns beside a copy of it."""

import copy
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from esper.api.batches import Batches, Data, Source
from esper.api.devices import find_device
from esper.api.grow_loop import grow
from esper.api.grow_settings import AUTO, EVERY, OPTIMIZER, Budget, BudgetLike
from esper.api.grow_settings import GrowSettings as Default
from esper.api.growing_model import GrowingModel, wrap
from esper.api.grown_runs import GrownRun
from esper.api.inspection import Slots, require_module
from esper.api.optimizers import MakeOptimizer
from esper.api.run_records import UNTOLD
from esper.api.scoring import IGNORED, LOSSES, Loss, Metric
from esper.kasmina.isolation import Isolation, randomness_kept
from esper.kasmina.probe import Sample
from esper.kasmina.shadow_seeds import CHECKED, run_back
from esper.kasmina.watching import call
from esper.leyline import Blend
from esper.leyline.constants import TRAINING_PASSES
from esper.leyline.errors import EsperError, in_words
from esper.show.audit_facts import Audit, Candidate, judged
from esper.show.terminal import duration
from esper.tamiyo.controllers.auditioning import Listening

LEAST_SHARE = 0.2  # of an epoch's batches: with less, fewer seeds are heard
MOST = 100.0  # epochs of the model that shadows may cost, in FLOPs, where no time is given
TIMED = 8  # shadows whose passes are timed
UPDATE = 1.3  # times a pass: a step with its update


def audit(
    model: nn.Module, train: Source, val: Source, *, loss: str | Loss, budget: BudgetLike = "+15%",
    slots: Slots = EVERY, blueprints: Sequence[str] | None = None, epochs: int = 3, first: int = 1,
    lr: float = Default.lr, optimizer: str | MakeOptimizer = OPTIMIZER,
    weight_decay: float | None = Default.weight_decay, batch_size: int = Default.batch_size,
    device: torch.device | str | None = None, precision: str = Default.precision,
    seed: int = Default.seed, metric: str | Metric = AUTO, sample: Sample | None = None,
    seconds: float | None = None, quiet: bool = False,
) -> Audit:  # fmt: skip
    """Say what a model lacks and where, by measurement; the model is left as it is.

    A copy trains alone for `first` epochs; then every seed that fits a place and the budget learns
    beside it for `epochs` more, which the copy never notices. What it costs is said before it
    starts. Within `seconds`, or above the cost of a hundred epochs of the model, seeds learn from a
    share of the batches, and where that would be little, fewer of them. All else is as in `grow`.
    """
    began = time.monotonic()
    counts = all(type(each) is int and each > 0 for each in (first, epochs))
    if not counts or (seconds is not None and not seconds > 0):
        given, valid = f"{first=}, {epochs=}, {seconds=}", "whole numbers above 0, and some seconds"
        raise EsperError("An audit takes epochs and time", given=given, valid=valid)
    require_module(model)
    limits = Budget(Budget.of(budget).params, first + epochs)
    with randomness_kept(model):
        what = "The model cannot be copied, and an audit leaves yours alone"
        with in_words(what, fix="audit a new one"):
            twin, tried = copy.deepcopy(model), copy.deepcopy(model)
        if device is not None:
            tried.to(find_device(device))
        where = next((each.device for each in tried.parameters()), torch.device("cpu"))
        data = Data(train, val, None, batch_size)
        batch = data["train"].first(seed, where)[0]
        host = wrap(
            tried, batch if sample is None else sample, slots=slots, budget=limits,
            blueprints=blueprints, isolation=Isolation.DUAL_PASS, seed=seed,
        )  # fmt: skip
        steps = data["train"].fingerprint(seed)["batches"]
        listener, plan = _listener(host, batch, first, epochs, seconds, steps)
        if not quiet:
            print(f"Audit of {type(model).__name__}: {plan}", file=sys.stderr, flush=True)
        run = grow(
            twin, train, val, loss=loss, budget=limits, slots=host.targets, controller=listener,
            optimizer=optimizer, lr=lr, weight_decay=weight_decay, batch_size=batch_size,
            device=where, precision=precision, seed=seed, metric=metric, blueprints=blueprints,
            sample=sample, quiet=quiet,
        )  # fmt: skip
        guess = abs(_guess(run, data["val"], loss) or run.before["loss"]) or 1.0
    spent = sum(1.0 + record.get("shadow_cost", 0.0) for record in run.history)
    lasted = time.monotonic() - began
    return _found(run, guess, first=first, epochs=epochs, spent=spent, seconds=lasted)


def _guess(run: GrownRun, val: Batches, loss: str | Loss) -> float:
    """The loss of who knows how often there is what, or the mean of it, and nothing else."""
    try:
        labels = torch.cat([y for _, y in val(run.settings.seed, torch.device("cpu"))])
        if run.host.memory.classes is not None:
            counts = labels[labels != IGNORED].unique(return_counts=True)[1]
            return float(Categorical(counts / counts.sum()).entropy())
        known = LOSSES[loss] if isinstance(loss, str) else loss
        return min(float(known(labels.mean(0).expand_as(labels), labels)), run.before["loss"])
    except Exception:  # targets of another form: then it is what the model knew untrained
        return run.before["loss"]


def _found(run: GrownRun, guess: float, **asked: Any) -> Audit:
    (*_, before, last), host, heard = run.history, run.host, []
    fell = before["val_loss"] - last["val_loss"]
    catalogue, unit = host.catalogue, host.memory.relative(1.0)
    for note in last["shadows"]:
        found = {name: note[name] / unit for name in ("gain", "train_gain", "slope")}
        if not math.isfinite(sum(found.values())):  # it has diverged
            continue
        found["error"] = note["error"] / unit if math.isfinite(note["error"]) else None
        same = {name: note[name] for name in ("slot", "blueprint", "cost", "epochs")}
        place = catalogue.slots.index(note["slot"]), catalogue.index(note["blueprint"])
        params = catalogue.costs[place[0]][place[1]]
        verdict = judged(found["gain"], found["error"], found["train_gain"], guess, fell)
        heard.append(Candidate(params=params, verdict=verdict, **same, **found))
    if not heard:
        raise EsperError("No seed could be heard: all diverged", fix="take a smaller rate, lr=")
    settings = {name: each for name, each in asdict(run.settings).items() if name not in UNTOLD}
    return Audit(
        model=type(host.model).__name__, host_params=catalogue.host_params, room=host.room,
        slots=tuple(run.settings.slots), places=catalogue.slots.names, blueprints=catalogue.names,
        costs=catalogue.costs, guess=guess, settings=settings,
        candidates=tuple(sorted(heard, key=lambda each: each.low, reverse=True)),
        train_loss=last["train_loss"], val_loss=last["val_loss"],
        fell=fell, **asked,
    )  # fmt: skip


def _listener(
    host: GrowingModel, batch: Sample, first: int, epochs: int, seconds: float | None,
    steps: int | None,
) -> tuple[Listening, str]:  # fmt: skip
    """Who hears as much as may be, and what that costs; an epoch has so many steps."""
    sizes = host.catalogue.total_costs[:, :, Blend.RAMP]  # [S, P]
    fits = (sizes >= 0) & (sizes <= (torch.inf if host.room is None else host.room))
    if not fits.any():
        fix = "allow more parameters, other places or other blueprints; see esper.inspect"
        raise EsperError("There is nothing to audit: no seed fits the budget", fix=fix)
    shadows, count = host.shadows.open(host, host.sample), int(fits.sum())
    step = float(shadows.cost[0][fits].mean())
    alone, epoch = first + epochs, (steps or 0) * _step_seconds(host, batch, fits)
    # In epochs of the model, or in time, of which a shadow needs about as much as the model.
    timed = 1.0 + CHECKED / TRAINING_PASSES
    most, each = (MOST, step) if seconds is None else (seconds / (epoch or math.inf) - alone, timed)
    turns: float = count * epochs
    share = min(max(most / turns / each, 0.01 if seconds is None else 0.0), 1.0)
    if share <= 0.0:
        least = math.ceil((alone + turns * LEAST_SHARE) * epoch)
        valid = f"about {least}" if epoch else "None, since these data do not know their length"
        raise EsperError("There is no time for an audit", given=f"{seconds=:g}", valid=valid)
    every = max(math.ceil(LEAST_SHARE / share), 1)
    share, turns = max(share, LEAST_SHARE), turns / every
    total, lasting = (alone + turns * share * rate for rate in (step, timed))
    told = (
        f"{math.ceil(count / every)} of {count} seeds that fit, on {share:.0%} of the batches: "
        f"as much as {total:.1f} epochs of the model, about {duration(lasting * epoch or None)}"
    )
    return Listening(first, share, every), told


def _step_seconds(host: GrowingModel, batch: Sample, fits: Tensor) -> float:
    """Of some shadows, on average."""
    keys = fits.nonzero()[:: math.ceil(int(fits.sum()) / TIMED)].tolist()
    seeds = [(slot, host.shadow_seed(slot, blueprint)) for slot, blueprint in keys]
    for _ in range(2):  # the first time is slower
        began = time.monotonic()
        for slot, seed in seeds:
            with host.beside(0), host.trying(slot, seed):
                run_back(call(host, batch))
            float(next(seed.parameters()).detach().sum())  # what a GPU has begun is then done
    return UPDATE * (time.monotonic() - began) / len(seeds)
