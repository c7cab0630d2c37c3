"""Grow a network in one call: train, measure, decide, and leave with a plain module; and go on
with a run that was interrupted, as if it had not been.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.api import ranks
from esper.api.batches import Batches, Data, Pair, Source, first_of, samples_of
from esper.api.contributions import measure_contributions
from esper.api.devices import device_name, placed, require_ordinary
from esper.api.fitting_controllers import made
from esper.api.grow_settings import AUTO, EVERY, OPTIMIZER, Budget, BudgetLike, GrowSettings, listed
from esper.api.growing_model import GrowingModel, wrap
from esper.api.grown_runs import GrownRun, GrowthFolder
from esper.api.host_state import pack, unpack
from esper.api.inspection import Slots, audited
from esper.api.observers import EpochNews, GrowthTelemetry, Observer, OnEpoch, Shown
from esper.api.optimizers import MakeOptimizer, make_optimizer, name_of_optimizer
from esper.api.run_records import (
    rolled_back,
    shadow_notes,
    size_of,
    slot_notes,
    step_flops,
    total_flops,
)
from esper.api.schedulers import MakeScheduler, Schedule
from esper.api.scoring import Loss, Metric, Scores, Scoring
from esper.api.ticking import GrowthDecision, NotFiniteError, StageChange, measuring
from esper.api.tryouts import Trained, Tryouts, casting_of
from esper.archive import Archive
from esper.kasmina.isolation import Isolation, randomness_kept
from esper.kasmina.probe import Sample, Target
from esper.kasmina.shadow_seeds import CHECKED, PartLoss
from esper.leyline import LIVING_STAGES
from esper.leyline.errors import EsperError, require_equal
from esper.leyline.streams import derive_seed
from esper.nissa import Clock, Sink
from esper.show.audit_facts import Audit
from esper.show.growth_facts import Contribution
from esper.tamiyo.controllers.protocol import Auditioning, Controller

_ONE_VALUE = "more than 1 value per channel"  # what torch says of a batch of one
LEAST_BATCHES = 2  # that shadows are measured on


@ranks.together
def grow(
    model: nn.Module,
    train: Source,
    val: Source,
    *,
    loss: str | Loss,
    budget: BudgetLike,
    slots: Slots = AUTO,
    controller: Controller | str | Path = GrowSettings.controller,
    epochs: int | None = None,
    optimizer: str | MakeOptimizer = OPTIMIZER,
    lr: float = GrowSettings.lr,
    weight_decay: float | None = GrowSettings.weight_decay,
    scheduler: MakeScheduler | None = None,
    batch_size: int = GrowSettings.batch_size,
    device: torch.device | str | None = None,
    precision: str = GrowSettings.precision,
    seed: int = GrowSettings.seed,
    out: str | Path | None = None,
    metric: str | Metric = AUTO,
    test: Source | None = None,
    blueprints: Sequence[str] | None = None,
    sample: Sample | None = None,
    audit: Audit | None = None,
    origin: Mapping[str, Any] | None = None,
    on_epoch: OnEpoch | None = None,
    sinks: Sequence[Sink | str] = (),
    quiet: bool = False,
) -> GrownRun:
    """Train a model that may grow within a budget, and keep what pays.

    `train`, `val` and `test` are loaders, data sets, or pairs of tensors; items are pairs of
    inputs and targets. `loss` is a name ("cross_entropy", "mse", "l1") or a function of outputs
    and targets. Scores are accuracies where there is a class for each sample, else made of the
    loss; or choose "accuracy" or "loss", or pass a `metric`: a function of outputs and targets in
    percent, or an object with update, compute and reset, such as those of torchmetrics. `epochs`
    may stand in the budget. `optimizer` is the name of one of torch's or a class, `weight_decay` is
    its own unless given; `scheduler`, a function that makes a scheduler for it, steps once per
    epoch (one that waits for a plateau looks at the validation loss, or at the score if its mode is
    "max"). The model is trained in place and where it is, unless `device` says otherwise ("auto":
    on CUDA where there is one); `precision="bf16"` runs it under autocast. With `out` the run is
    kept there after every epoch, and `esper.resume(out, ...)` goes on after whatever ended it.
    With an `audit` of this model what it found missing is planted after the first epoch.
    `sinks` hear of everything too: "tensorboard", "wandb", "mlflow", or objects of yours.
    How it goes is shown on standard error, in a notebook below the cell, and nowhere if `quiet`.
    """
    require_ordinary()
    observers = _observers(on_epoch, sinks, kept=out is not None, quiet=quiet)
    where = placed(model, device)
    if audit is not None:
        controller, slots = audited(audit, model, controller, slots)
    folder = None if out is None else GrowthFolder(out)
    if folder is not None and ranks.is_restart_of(model, folder):
        return resume(
            folder.path, model, train, val, loss=loss, metric=metric, optimizer=optimizer,
            scheduler=scheduler, controller=controller, test=test, sample=sample,
            on_epoch=on_epoch, sinks=sinks, quiet=quiet,
        )  # fmt: skip
    limits = Budget.of(budget, epochs)
    settings = GrowSettings(
        budget=limits.params,
        epochs=GrowSettings.epochs if limits.epochs is None else limits.epochs,
        blueprints=listed("blueprints", blueprints),
        loss=loss if isinstance(loss, str) else None,
        metric=metric if isinstance(metric, str) else None,
        optimizer=optimizer if isinstance(optimizer, str) else name_of_optimizer(optimizer),
        lr=lr,
        weight_decay=weight_decay,
        precision=precision,
        scheduled=scheduler is not None,
        batch_size=batch_size,
        seed=seed,
        origin=None if origin is None else dict(origin),
    )
    scoring = Scoring.of(loss, metric, where, settings.autocast(where.type))
    data = Data(train, val, test, batch_size)
    first = data["train"].first(seed, where)
    leader = made(controller) if isinstance(controller, (str, Path)) else controller
    if isinstance(slots, str) and slots == AUTO and isinstance(leader, Auditioning):
        slots = EVERY  # it hears shadows of every place before it plants
    host = _host(model, first[0] if sample is None else sample, slots, settings)
    run = GrownRun(host, settings, folder=folder, train_plain=lambda *of: growth.trained_plain(*of))
    run.settle(slots=tuple(map(asdict, host.targets)), data=data.fingerprints(seed))
    if folder is not None and folder.holds_run:  # other files in it do not matter
        fix = f"go on with esper.resume({str(folder.path)!r}, ...), or name another directory"
        raise EsperError(f"{folder.path} holds a run already", fix=fix)
    ranks.share(model)
    ranks.require_same(model, "settings or data", str(replace(run.settings, origin=None)))
    growth = Growth(run, data, scoring, controller, optimizer, scheduler, observers)
    with nullcontext() if folder is None or ranks.rank() else folder.locked():
        growth.begin(first)
        growth.go()
    return run


@ranks.together
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
    sinks: Sequence[Sink | str] = (),
    quiet: bool = False,
) -> GrownRun:
    """Go on with the run in this folder, bit for bit as if it had never stopped (on a CPU).

    Code is not stored, so model and data are built anew and given here; its weights do not
    matter. So are functions and objects that `grow` was given: a loss, a metric, an optimiser, a
    scheduler or a controller of your own. What was given by name is known. Data that are not those
    of the run are refused. A run that was finished comes back as it is; then the model is enough.
    """
    require_ordinary()
    observers = _observers(on_epoch, sinks, kept=True, quiet=quiet)
    folder = GrowthFolder(path)
    folder.require_old()
    with nullcontext() if ranks.rank() else folder.locked():
        run = load_run(path, model, device=device, sample=sample)
        if run.finished:
            return run
        settings = run.settings
        auto = isinstance(metric, str) and metric == AUTO
        where = next(run.host.parameters()).device
        scoring = Scoring.of(
            settings.again("loss", loss, fixed=True),
            settings.again("metric", None if auto else metric, fixed=True),
            where,
            settings.autocast(where.type),
        )
        kind = settings.again("optimizer", optimizer)
        leader = settings.again("controller", controller)
        settings.require_given(train=train, val=val, test=test, scheduler=scheduler)
        data = Data(train, val, test, settings.batch_size)
        data.require_same(settings.data, settings.seed)
        run = replace(run, folder=folder)  # this one is locked
        run = replace(run, train_plain=lambda *of: growth.trained_plain(*of))
        growth = Growth(run, data, scoring, leader, kind, scheduler, observers)
        growth.go_on(folder.checkpoint())
        growth.go()
    return run


def load_run(
    path: str | Path,
    model: nn.Module | None,
    *,
    device: torch.device | str | None = None,
    sample: Sample | None = None,
) -> GrownRun:
    """The run in this folder as it is, without going on: to report on it or to export it."""
    folder = GrowthFolder(path)
    archive = folder.checkpoint()
    if model is None:
        raise EsperError(
            f"The model of {folder.path} is needed to go on",
            fix="build it as for the run and pass it: resume(path, model=Net(), ...)",
        )
    where = placed(model, device)
    sample = folder.sample(where) if sample is None else sample
    if sample is None:
        raise EsperError(
            f"{folder.path} could not keep the sample of this model's inputs",
            fix="pass sample=, one batch of inputs",
        )
    settings = GrowSettings.of(archive.notes["settings"])
    slots = [Target(**note) for note in settings.slots]
    run = GrownRun(_host(model, sample, slots, settings), settings, folder=folder)
    run.restore(archive)
    return run


@dataclass
class Growth:
    """The loop of one run."""

    run: GrownRun
    data: Data
    scoring: Scoring
    controller: Controller | str | Path
    kind: str | MakeOptimizer
    scheduler: MakeScheduler | None
    observers: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        self.host, self.seed = self.run.host, self.run.settings.seed
        self.device = next(self.host.parameters()).device
        self.optimizer = make_optimizer(self.kind, self.host, self.run.settings)
        self.flops: dict[str, float | None] = {}  # of a step, by what the slots hold
        # FLOPs of every epoch that this process trained, failed and rewound ones included.
        self.trained_flops: list[float | None] = []
        self.steps = 0  # of an epoch
        made = self.scheduler
        self.schedule = None if made is None else Schedule(made, self.optimizer)
        self.by_name = isinstance(self.controller, (str, Path))
        casting = casting_of(self.host.require_controller(self.controller), self.host)
        self.tryouts = None if casting is None else Tryouts(self, casting)
        self.controller = casting or self.controller

    def trained_plain(self, plain: nn.Module, rate: float) -> GrownRun:
        """A network that does not grow, trained like this one, at another rate."""
        kept, scoring = ("epochs", "weight_decay", "precision", "seed"), self.scoring
        same: dict[str, Any] = {name: getattr(self.run.settings, name) for name in kept}
        same |= {name: part.loader for name, part in self.data.items()}
        return grow(
            plain, lr=rate, loss=scoring.loss, metric=scoring.metric, optimizer=self.kind,
            scheduler=self.scheduler, budget=None, controller="never", quiet=True, **same,
        )  # fmt: skip

    def begin(self, batch: tuple[Any, Any]) -> None:
        """Before the first epoch: what the model is worth untrained, and a first checkpoint."""
        leader = self._leader()
        self.run.settle(**leader, leader=leader["controller"] if self.by_name else None)
        with self._explaining():
            self._settle(batch)
        self._keep()

    def _leader(self) -> dict[str, Any]:
        """What tells the controller from others: its name, and what it has learned."""
        chosen = self.host.require_controller(self.controller)
        return {"controller": chosen.name, "fingerprint": getattr(chosen, "fingerprint", None)}

    def go_on(self, archive: Archive) -> None:
        """From this checkpoint of the run, which holds its optimiser and its scheduler too."""
        self.return_to(archive)
        what, fix = "The run was led by another controller", "go on with the one that it began with"
        for name, now in self._leader().items():
            require_equal(what, now, getattr(self.run.settings, name), fix)
        self._settle(self.data["train"].first(self.seed, self.device))
        if self.tryouts is not None:
            self.tryouts.go_on()

    def go(self) -> None:
        """Train to the end."""
        with ExitStack() as ends:  # of which all are told, the last one first
            for observer in self.observers:
                observer.begin(self.run)
                ends.push(lambda _, failure, *__, to=observer: to.close(failure))
            while not self.host.memory.ended:
                with self._explaining():
                    news = self._lived()
                if self.tryouts is not None and self.tryouts.casting.finalists:
                    news = self.tryouts.held(news)
                self.run.history.append(news.record)
                self.run.seconds.append(dict(news.seconds))
                if self.host.memory.ended:
                    self.run.finish(self._final_scores(news.record), self._contributions())
                for observer in self.observers:
                    observer.epoch(news)
                self._keep(self._ready)
                for observer in self.observers:
                    observer.kept(news)

    def _lived(self) -> EpochNews:
        """The next epoch. If its numbers fail while a seed grows, it is lived again without the
        newest one, once in a run.
        """
        host, number = self.host, int(self.host.lifecycle.epoch)
        living = [slot for slot in host.seed_slots.values() if slot.stage in LIVING_STAGES]
        again = any("rollback" in record for record in self.run.history)
        good = self.state() if living and not again else None
        first_attempt = len(self.trained_flops)
        try:
            return self.epoch(number)
        except NotFiniteError as error:
            if good is None or self.data.broken(self.scoring.classes) is not None:
                raise
            what, given = error.what, str(error.given)
        failed_flops = total_flops(self.trained_flops[first_attempt:])
        shadow_flops = self._shadow_flops()
        self.return_to(good)
        newest = min(living, key=lambda each: int(host.lifecycle.age[0, each.slot]))
        kind = host.catalogue.names[int(host.lifecycle.blueprint[0, newest.slot])]
        note: dict[str, Any] = {"what": what, "given": given, "seed": f"{kind} at {newest.name}"}
        note["flops"] = total_flops([failed_flops, shadow_flops])
        for observer in self.observers:
            observer.trying(rolled_back(note))
        gone = host.remove_now(newest.name)
        news = self.epoch(number)
        events = [asdict(StageChange.by(each, host.catalogue)) for each in gone]
        events += news.record["events"]
        return replace(news, record=news.record | {"rollback": note, "events": events})

    def state(self) -> Archive:
        """All that training goes on from, in memory."""
        tensors, notes = pack(self.host)
        schedule = None if self.schedule is None else self.schedule.note()
        copies = {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()}
        return Archive(copies, notes | {"scheduler": schedule})

    def return_to(self, state: Archive) -> None:
        unpack(self.host, state)
        if self.schedule is not None:
            self.schedule.restore(state.notes["scheduler"])

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Where numbers or labels fail, the data are looked through for the first that is wrong."""
        try:
            yield
        except EsperError as error:
            if (found := self.data.broken(self.scoring.classes)) is None:
                raise
            given = found if error.given is None else f"{error.given}; {found}"
            raise type(error)(error.what, given=given, valid=error.valid, fix=error.fix) from error

    def _final_scores(self, last: Mapping[str, Any]) -> dict[str, float]:
        after = {"loss": last["val_loss"], "score": last["score"]}
        if last["events"]:  # seeds went in the last tick: it is another network
            after = asdict(self._scores(self.data["val"]))
        if "test" in self.data:
            test = asdict(self._scores(self.data["test"]))
            after |= {f"test_{name}": value for name, value in test.items()}
        return after

    def _contributions(self) -> dict[str, Contribution]:
        """Measure the contribution of every permanent seed to the finished network."""
        validation = self.data["val"]
        stream = derive_seed(self.seed, "scores", validation.name)
        return measure_contributions(self.host, self.scoring, validation, stream)

    def _settle(self, batch: tuple[Any, Any]) -> None:
        """How models are scored, and what the one before training was worth."""
        with measuring(self.host):
            self.scoring = self.scoring.settled(self.host, batch)
            for part in ("val", "test"):  # what does not fit is said now, and not after hours
                if part in self.data:
                    other = self.data[part].first(self.seed, self.device)
                    self.scoring.settled(self.host, other, part)
        if self.scoring.named is not None:
            self.run.settle(metric=self.scoring.named)
        if not self.run.before:
            self.run.begin(asdict(self._scores(self.data["val"])))
        first_loss = self.run.before["loss"]
        self.scoring = replace(self.scoring, first_loss=first_loss)
        self.run.settle(score=self.scoring.meaning, device=device_name(self.device))
        self.host.memory.take_reference(self.scoring.classes, first_loss)

    def epoch(self, number: int) -> EpochNews:
        trained = self._trained(number)
        if self.tryouts is not None and number + 1 == self.tryouts.casting.first:
            self.tryouts.begin(trained)
        return self.decided(trained)

    def _trained(self, number: int) -> Trained:
        """One epoch, and what the host is worth after it."""
        clock, stream = Clock(), derive_seed(self.seed, "epoch", number)
        step = self._step_flops()
        with clock.phase("train"), randomness_kept(self.host, stream=stream):
            batch_losses, size = self._train(derive_seed(self.seed, "order", number))
        flops = None if step is None else step * size / max(size_of(self.host.sample), 1)
        self.trained_flops.append(flops)
        train_loss = self._mean_loss(batch_losses)
        with clock.phase("measure"):
            scores = self._scores(self.data["val"])
        return Trained(train_loss, scores, flops, clock)

    def decided(self, trained: Trained) -> EpochNews:
        """The decision that ends an epoch, and what the epoch came to."""
        host, clock, scores = self.host, trained.clock, trained.scores
        most_added = host.added

        def measured() -> float:
            with clock.phase("measure"):
                return self._scores(self.data["val"]).score

        shadowed = host.shadows.flops if host.shadows.learned else 0.0
        before = clock.spent.get("measure", 0.0)
        with clock.phase("decide"):
            tick = host.tick(
                self.controller,
                train_loss=trained.loss,
                val_loss=scores.loss,
                val_score=scores.score,
                evaluate=lambda _: measured(),
                losses=self._losses,
            )
        within = clock.spent.get("measure", 0.0) - before  # what was measured meanwhile
        clock.spent["decide"] -= within
        if self.schedule is not None:
            self.schedule.step(scores.loss, scores.score)
        heard = {} if not shadowed else {"shadow_cost": shadowed, "shadows": shadow_notes(host)}
        told = asdict(tick)
        del told["changed"]
        record = told | {
            "events": list(told["events"]),  # as JSON holds it
            "train_loss": trained.loss,
            "val_loss": scores.loss,
            "most_added": max(most_added, tick.added),
            "device": self.run.settings.device,
            "precision": self.run.settings.precision,
            "slots": slot_notes(host),
            "flops": trained.flops,
            **heard,
        }
        return EpochNews(record, clock.spent)

    def _step_flops(self) -> float | None:
        """Of a step as the host is now; counted anew when that has changed."""
        life = self.host.lifecycle
        now = str([life.stage.tolist(), life.blueprint.tolist(), (life.alpha > 0).tolist()])
        if now not in self.flops:
            self.flops[now] = step_flops(self.host)
        return self.flops[now]

    def _shadow_flops(self) -> float | None:
        """Count the FLOPs of the shadows that learned in the epoch that was trained last."""
        shadows = self.host.shadows
        if not shadows.learned:
            return 0.0
        # Shadows learn only after an epoch of the model alone, which is the unit of their cost.
        model_flops = self.run.history[0]["flops"]
        return None if model_flops is None else float(shadows.flops * model_flops)

    def _train(self, stream: int) -> tuple[Tensor, int]:
        """Train on every batch once.

        Returns:
            The training loss of every batch, [batches], and how many numbers the inputs held.
        """
        host, scoring = self.host, self.scoring
        host.train()
        losses, size = [], 0
        for whole in self.data["train"](stream, self.device):
            batch, weight = ranks.own_part(whole, scoring.ignored)
            self.optimizer.zero_grad()
            try:
                _, value = scoring.run(host, batch)
            except ValueError as error:
                if _ONE_VALUE not in str(error):
                    raise
                fix = "make batch_size larger, or the loader with drop_last=True"
                raise EsperError("Batches of one cannot be normalised", fix=fix) from error
            value = value * weight
            if value.requires_grad:
                value.backward()
            elif any(p.requires_grad for p in host.model.parameters()):
                # (A frozen model has no gradient while seeds learn in passes of their own.)
                raise EsperError(
                    "The loss does not depend on any parameter that learns",
                    fix="make the loss of what the model returns, without argmax, detach() or "
                    "item()",
                )
            host.seed_step(partial(self._loss, batch, weight), self._part_loss(batch, weight))
            ranks.average_step(host.model)
            self.optimizer.step()
            losses.append(value.detach())
            size += size_of(whole[0])
        ranks.average_tensors(each for each in host.buffers() if each.is_floating_point())
        self.steps = len(losses)
        return ranks.averaged(host, torch.stack(losses)).cpu().double(), size

    def _mean_loss(self, batch_losses: Tensor) -> float:
        """Average the losses of an epoch's batches, [batches], and refuse ones that are not finite.

        Raises:
            NotFiniteError: A batch has a loss that is NaN or infinite.
        """
        broken = (~batch_losses.isfinite()).nonzero().flatten().tolist()
        if broken:
            last = [record["decision"] for record in self.run.history if record["events"]][-1:]
            grown = f"last: {GrowthDecision(**last[0])}" if last else "nothing has grown"
            raise NotFiniteError(
                f"The loss is not finite in batch {broken[0] + 1} of {len(batch_losses)}",
                given=grown,
                fix="look for NaN in the data, or start again with a smaller learning rate",
            )
        return float(batch_losses.mean())

    def _loss(self, batch: Pair, weight: float) -> Tensor:
        return self.scoring.run(self.host, batch)[1] * weight

    def _part_loss(self, batch: Pair, weight: float) -> PartLoss | None:
        """Few samples cost as much time as many in a small model: not where time counts."""
        if self.tryouts is None or not samples_of(batch):
            return None
        return lambda share: self._loss(first_of(batch, share), weight)

    def _scores(self, batches: Batches) -> Scores:
        """Of the host as it is now, always on the same draws where the data draw at random."""
        stream = derive_seed(self.seed, "scores", batches.name)
        with measuring(self.host), randomness_kept(self.host, stream=stream):
            found, scoring = batches(stream, self.device), self.scoring
            if scoring.collects:  # what it makes of all is no sum of what it makes of parts
                own = scoring.scores(self.host, found)
                both = torch.tensor([own.loss, own.score], dtype=torch.float64)
                return Scores(*ranks.shared(self.host, both).tolist())
            total = partial(ranks.summed, self.host)
            return scoring.scores(self.host, ranks.own_parts(found), total)

    def _losses(self, model: nn.Module) -> Tensor:
        """Of validation samples, for shadows; the same ones for all of them."""
        stream = derive_seed(self.seed, "scores", "val")
        with randomness_kept(self.host, stream=stream):
            most = max(math.ceil(CHECKED * self.host.shadows.share * self.steps), LEAST_BATCHES)
            batches = self.data["val"].spread(stream, self.device, most)
            return self.scoring.losses(model, ranks.own_parts(batches))

    def _keep(self, ready: Callable[[], object] = lambda: None) -> None:
        if self.run.folder is not None and ranks.rank() == 0:
            self.run.keep(None if self.schedule is None else self.schedule.note(), ready)
            if self.tryouts is not None:
                self.tryouts.kept()

    def _ready(self) -> None:
        for observer in self.observers:
            observer.keeping()


def _observers(
    on_epoch: OnEpoch | None, sinks: Sequence[Sink | str], *, kept: bool, quiet: bool
) -> list[Observer]:
    """Who goes along: telemetry first, since it must not be behind what is kept; with the first of
    several processes only.
    """
    if ranks.rank():
        return []
    found: list[Observer] = [GrowthTelemetry(sinks)] if kept or sinks else []
    return [*found, Shown(on_epoch, quiet=quiet)]


def _host(model: nn.Module, sample: Sample, slots: Slots, settings: GrowSettings) -> GrowingModel:
    return wrap(
        model,
        sample,
        slots=slots,
        budget=settings.limits,
        blueprints=settings.blueprints,
        isolation=Isolation.DUAL_PASS,
        seed=settings.seed,
    )
