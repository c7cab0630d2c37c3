"""Grow a network in one call: train, measure, decide, and leave with a plain module."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.api.batches import Batches, Source
from esper.api.budgets import Budget, BudgetLike
from esper.api.hosts import AUTO, GrowingModel, Slots, wrap
from esper.api.inspection import require_module
from esper.api.losses import Loss
from esper.api.runs import CHECKPOINT, GrowError, GrownRun, as_note, device_of, held, move
from esper.api.schedulers import MakeScheduler, Schedule
from esper.api.scoring import Metric, Scores, Scoring
from esper.api.ticking import measuring
from esper.archive import Archive
from esper.kasmina.isolation import Isolation, randomness_kept
from esper.kasmina.probe import Sample
from esper.kasmina.watching import call
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.streams import derive_seed
from esper.tamiyo.controllers.protocol import Controller

OnEpoch = Callable[[dict[str, Any]], object]
MakeOptimizer = Callable[..., Optimizer]


def grow(
    model: nn.Module,
    train: Source,
    val: Source,
    *,
    loss: str | Loss,
    budget: BudgetLike,
    slots: Slots = AUTO,
    controller: Controller | str | Path = "heuristic",
    epochs: int | None = None,
    optimizer: str | MakeOptimizer = "AdamW",
    lr: float = 1e-3,
    scheduler: MakeScheduler | None = None,
    batch_size: int = 64,
    device: torch.device | str | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    metric: str | Metric = "auto",
    test: Source | None = None,
    blueprints: Sequence[str] | None = None,
    sample: Sample | None = None,
    origin: Mapping[str, Any] | None = None,
    on_epoch: OnEpoch | None = None,
) -> GrownRun:
    """Train a model that may grow within a budget, and keep what pays.

    `train`, `val` and `test` are loaders, data sets, or pairs of tensors; items are pairs of
    inputs and targets. `loss` is a name ("cross_entropy", "mse", "l1") or a function of outputs
    and targets. Scores are accuracies where there are classes, else made of the loss; or pass a
    `metric`, a function of outputs and targets in percent. `epochs` may stand in the budget.
    `optimizer` is the name of one of torch's or a class; `scheduler`, a function that makes a
    scheduler for it, steps once per epoch (one that waits for a plateau looks at the validation
    loss, or at the score if its mode is "max"). With `out` the run is kept there after every epoch,
    and `esper.resume(out, ...)` goes on after whatever ended it. The model is trained in place.
    """
    require_module(model)
    move(model, device)
    limits = _limits(Budget.of(budget), epochs)
    _require_settings(lr, batch_size, seed)
    scoring = Scoring.of(loss, metric)
    data = Data.of(train, val, test, batch_size)
    first = data.train.first(seed, device_of(model))
    host = wrap(
        model,
        first[0] if sample is None else sample,
        slots=slots,
        budget=limits,
        blueprints=blueprints,
        isolation=Isolation.DUAL_PASS,
        seed=seed,
    )
    settings: dict[str, Any] = {
        "budget": limits.params,
        "epochs": limits.epochs,
        "slots": [as_note(target) for target in host.targets],
        "blueprints": None if blueprints is None else list(blueprints),
        "loss": loss if isinstance(loss, str) else None,
        "metric": metric if isinstance(metric, str) else None,
        "optimizer": _optimizer_name(optimizer),
        "lr": lr,
        "scheduled": scheduler is not None,
        "batch_size": batch_size,
        "seed": seed,
        "data": data.fingerprints(seed),
        "origin": _json(origin),
    }
    run = GrownRun(host, settings, path=_new_folder(out))
    growth = Growth(run, data, scoring, controller, optimizer, scheduler, on_epoch)
    with held(run.path):
        growth.begin(first)
        growth.go()
    return run


@dataclass(frozen=True)
class Data:
    """The three parts, as batches."""

    train: Batches
    val: Batches
    test: Batches | None

    @classmethod
    def of(cls, train: object, val: object, test: object, batch_size: int) -> "Data":
        return cls(
            Batches.of("train", train, batch_size, shuffle=True),
            Batches.of("val", val, batch_size, shuffle=False),
            None if test is None else Batches.of("test", test, batch_size, shuffle=False),
        )

    def fingerprints(self, seed: int) -> dict[str, Any]:
        parts = [part for part in (self.train, self.val, self.test) if part is not None]
        return {part.name: part.fingerprint(seed) for part in parts}


class Growth:
    """The loop of one run."""

    def __init__(
        self,
        run: GrownRun,
        data: Data,
        scoring: Scoring,
        controller: Controller | str | Path,
        optimizer: str | MakeOptimizer,
        scheduler: MakeScheduler | None,
        on_epoch: OnEpoch | None,
    ) -> None:
        self.run, self.data, self.scoring = run, data, scoring
        self.controller, self.on_epoch = controller, on_epoch
        kind = _optimizer_kind(optimizer)
        self.optimizer = run.host.optimizer(kind, lr=run.settings["lr"])
        self.schedule = None if scheduler is None else Schedule(scheduler, self.optimizer)
        self.seed = int(run.settings["seed"])

    @property
    def host(self) -> GrowingModel:
        return self.run.host

    def begin(self, batch: tuple[Any, Any]) -> None:
        """Before the first epoch: what the model is worth untrained, and a first checkpoint."""
        settings, by_name = self.run.settings, isinstance(self.controller, (str, Path))
        settings |= self._leader()
        settings["leader"] = settings["controller"] if by_name else None
        self._settle(batch)
        scores = self._scores(self.data.val)
        self.run.before = {"loss": scores.loss, "score": scores.score}
        self._set_reference()
        self.run.keep_sample()
        self._keep()

    def _leader(self) -> dict[str, Any]:
        """What tells the controller from others: its name, and what it has learned."""
        chosen = self.host.require_controller(self.controller)
        return {
            "controller": chosen.name,
            "fingerprint": getattr(chosen, "fingerprint", None),
        }

    def go_on(self, archive: Archive) -> None:
        """After the checkpoint was restored: whatever follows from it."""
        for what, now in self._leader().items():
            if now != self.run.settings[what]:
                raise GrowError(
                    "The run was led by another controller",
                    given=now,
                    valid=self.run.settings[what],
                    fix="go on with the one that it began with",
                )
        self._settle(self.data.train.first(self.seed, device_of(self.host)))
        self._set_reference()
        if self.schedule is not None:
            self.schedule.restore(archive.notes["scheduler"])

    def go(self) -> None:
        """Train to the end."""
        while not self.host.memory.ended:
            record = self._epoch(int(self.host.lifecycle.epoch))
            self.run.history.append(record)
            if self.host.memory.ended:
                self._finish()
            self._keep()
            if self.on_epoch is not None:
                self.on_epoch(record)

    def _settle(self, batch: tuple[Any, Any]) -> None:
        with measuring(self.host):
            self.scoring = self.scoring.settled(self.host, batch)
        self.host.memory.classes = self.scoring.classes
        if isinstance(self.scoring.metric, str):
            self.run.settings["metric"] = self.scoring.metric

    def _set_reference(self) -> None:
        self.scoring = replace(self.scoring, first_loss=self.run.before["loss"])
        self.host.memory.unit = self.run.before["loss"]

    def _epoch(self, number: int) -> dict[str, Any]:
        host = self.host
        most_added = host.added
        with randomness_kept(host, stream=derive_seed(self.seed, "epoch", number)):
            train_loss = self._train(derive_seed(self.seed, "order", number))
        scores = self._scores(self.data.val)
        tick = host.tick(
            self.controller,
            train_loss=train_loss,
            val_loss=scores.loss,
            val_score=scores.score,
            evaluate=lambda _: self._scores(self.data.val).score,
        )
        if self.schedule is not None:
            self.schedule.step(scores.loss, scores.score)
        return {
            "epoch": tick.epoch,
            "train_loss": train_loss,
            "val_loss": scores.loss,
            "score": tick.score,
            "committed": tick.committed,
            "contributions": dict(tick.contributions),
            "decision": tick.decision,
            "events": list(tick.events),
            "added": tick.added,
            "most_added": max(most_added, tick.added),
        }

    def _train(self, stream: int) -> float:
        """One pass over the training data; returns the mean loss over batches."""
        host, scoring = self.host, self.scoring
        host.train()
        losses = []
        for inputs, targets in self.data.train(stream, device_of(host)):
            self.optimizer.zero_grad()
            value = scoring.loss(call(host, inputs), targets)
            if _leads_to_parameters(value, host):
                value.backward()
            host.seed_step(lambda x=inputs, y=targets: scoring.loss(call(host, x), y))  # type: ignore[misc]
            self.optimizer.step()
            losses.append(value.detach())
        return float(torch.stack(losses).cpu().double().mean())

    def _scores(self, batches: Batches) -> Scores:
        """Of the host as it is now, always on the same draws where the data draw at random."""
        stream = derive_seed(self.seed, "scores", batches.name)
        with measuring(self.host), randomness_kept(self.host, stream=stream):
            return self.scoring.scores(self.host, batches(stream, device_of(self.host)))

    def _finish(self) -> None:
        scores = self._scores(self.data.val)
        self.run.after = {"loss": scores.loss, "score": scores.score}
        if self.data.test is not None:
            scores = self._scores(self.data.test)
            self.run.after |= {"test_loss": scores.loss, "test_score": scores.score}
        self.host.eval()

    def _keep(self) -> None:
        if self.run.path is not None:
            self.run.keep(None if self.schedule is None else self.schedule.note())


def _leads_to_parameters(loss: Tensor, host: GrowingModel) -> bool:
    """A model that is frozen has no gradient while seeds learn in passes of their own."""
    if not loss.requires_grad and any(p.requires_grad for p in host.model.parameters()):
        raise GrowError(
            "The loss does not depend on any parameter that learns",
            fix="make the loss of what the model returns, without argmax, detach() or item()",
        )
    return loss.requires_grad


# --- settings ------------------------------------------------------------------------------


def _limits(budget: Budget, epochs: int | None) -> Budget:
    if epochs is not None and budget.epochs is not None and epochs != budget.epochs:
        raise GrowError(
            "The budget and the call disagree on the epochs",
            given=f"Budget(epochs={budget.epochs}) and epochs={epochs}",
            fix="give them once",
        )
    if epochs is None:
        epochs = DEFAULT_EPISODE_LENGTH if budget.epochs is None else budget.epochs
    return Budget(budget.params, epochs)


def _require_settings(lr: object, batch_size: object, seed: object) -> None:
    if not isinstance(lr, (int, float)) or not lr > 0.0:
        raise GrowError("The learning rate must be above 0", given=repr(lr), valid="such as 1e-3")
    for name, value, least in (("batch size", batch_size, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise GrowError(f"The {name} is a whole number from {least}", given=repr(value))


def _optimizer_kind(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    if not isinstance(optimizer, str):
        return optimizer
    known = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    for name, kind in known.items():
        if name.lower() == optimizer.lower():
            return kind
    raise UnknownNameError.of("optimiser", optimizer, known)


def _optimizer_name(optimizer: str | MakeOptimizer) -> str | None:
    """Its name, if that is enough to make it again."""
    if isinstance(optimizer, str):
        return optimizer
    name = getattr(optimizer, "__name__", "")
    return name if getattr(torch.optim, name, None) is optimizer else None


def _json(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise EsperError(
            "Something to be kept with the run is not of the kind that JSON holds",
            given=error,
            valid="numbers, texts, lists and dicts",
        ) from error
    return found


def _new_folder(out: str | Path | None) -> Path | None:
    if out is None:
        return None
    folder = Path(out)
    if (folder / CHECKPOINT).exists():
        raise GrowError(
            f"{folder} holds a run already",
            fix=f"go on with esper.resume({str(folder)!r}, ...), or name another directory",
        )
    if folder.exists() and not folder.is_dir():
        raise GrowError(f"{folder} is a file", fix="name a directory for the run")
    return folder
