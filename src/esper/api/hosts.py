"""A model in a training loop of your own: slots, an optimiser that knows them, and a tick."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.api.budgets import Budget, BudgetError, BudgetLike
from esper.api.distributed import require_averaged
from esper.api.host_state import load_host, save_host
from esper.api.inspection import offers, require_module, within
from esper.api.signal_window import GrowthMemory
from esper.api.sites import Refusals, auto_places, no_place
from esper.api.steps import StepWatch
from esper.api.ticking import Evaluate, Tick, choose_controller, tick
from esper.kasmina.export import export_module
from esper.kasmina.gates import UNLIMITED, GateRules
from esper.kasmina.isolation import Isolation
from esper.kasmina.probe import Sample, Sighting, Target
from esper.kasmina.slot import Seed
from esper.kasmina.slotted import SlottedModel
from esper.leyline.errors import EsperError, OptimizerMismatchError, SlotError, first_line
from esper.leyline.lifecycle import Lifecycle, Transitions
from esper.leyline.signals import SignalWindow
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.protocol import Controller

AUTO = "auto"
Slots = str | Sequence[Target | str]


def wrap(
    model: nn.Module,
    sample: Sample,
    *,
    slots: Slots = AUTO,
    budget: BudgetLike = None,
    blueprints: Sequence[str] | None = None,
    isolation: Isolation | str = Isolation.STRAIGHT_THROUGH,
    rules: GateRules | None = None,
    classes: int | None = None,
    seed: int = 0,
) -> "GrowingModel":
    """Give a model slots, for a training loop of your own. The model itself is not changed.

    `sample` is one batch of inputs. `slots` are paths of submodules, or "auto" (see `inspect`).
    Isolated seeds learn from the gradient of your own pass ("straight_through"), or in a pass of
    their own that you run with `seed_step` ("dual_pass"), which is better and costs more.
    `classes`: of a classifier, so that controllers know what guessing is worth.

    Wrap before torch.compile. DistributedDataParallel is made from the host, and made anew when
    `tick(...).changed`; every process ticks, and all decide by what the first one measured. Its
    isolated seeds learn straight-through: a pass of their own would not be averaged.
    """
    require_module(model)
    budget = Budget.of(budget)
    host_params = sum(parameter.numel() for parameter in model.parameters())
    room = budget.allowed(host_params)
    places = _places(model, sample, slots, room, blueprints)
    host = GrowingModel(
        model,
        places,
        sample,
        isolation=isolation,
        rules=rules,
        budget=room,
        blueprints=blueprints,
        seed=seed,
    )
    host.limits, host.targets, host.memory.classes = budget, tuple(places), classes
    _require_room(host, room)
    require_averaged(host.isolation)
    return host


class GrowingModel(SlottedModel):
    """A model with slots that takes part in a loop of your own. Made by `wrap`::

    host = esper.wrap(model, sample=x, slots="auto", budget="+15%")
    opt = host.optimizer(torch.optim.AdamW, lr=1e-3)
    for epoch in range(epochs):
        for x, y in batches:                     # as ever
            ...
        host.tick("heuristic", train_loss=…, val_score=…, evaluate=score)
    """

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[Target | str] | None,
        sample: Sample,
        **options: Any,
    ) -> None:
        super().__init__(model, places, sample, **options)
        self.sample = sample
        self.targets: tuple[Target, ...] = ()
        self.limits = Budget()
        self.memory = GrowthMemory(SignalWindow(*self.lifecycle.shape))
        self.watch = StepWatch(self)
        self._given_rules = self.rules

    # --- training ------------------------------------------------------------------------

    def optimizer(
        self,
        kind: Callable[..., Optimizer],
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        **settings: Any,
    ) -> Optimizer:
        """An optimiser of this kind that seeds join and leave, as in `optimizer(AdamW, lr=1e-3)`.

        `groups`: parameter groups of the model as torch knows them; seeds join the first. One more
        group is made, empty at first, for scalar gates that learn at ten times the rate: a
        scheduler with a list of settings needs one for it too. Make schedulers after this.
        """
        wanted = [dict(group) for group in groups or [{"params": self.model.parameters()}]]
        try:
            made = kind(wanted, **settings)
        except (TypeError, ValueError) as error:
            raise OptimizerMismatchError(
                "The optimiser could not be made",
                given=f"{getattr(kind, '__name__', type(kind).__name__)}: {first_line(error)}",
                fix="pass the class and its settings, as in host.optimizer(torch.optim.AdamW, "
                "lr=1e-3)",
            ) from error
        if not isinstance(made, Optimizer):
            raise OptimizerMismatchError(
                "This does not make an optimiser",
                given=type(made).__name__,
                valid="a class such as torch.optim.AdamW",
            )
        self._optimizers.clear()
        self._let_seeds_join(made)
        self.track(made)
        return made

    def track(self, optimizer: Optimizer) -> None:
        """Let seeds join and leave this optimiser, which was made from the host's parameters."""
        if not isinstance(optimizer, Optimizer):
            raise OptimizerMismatchError(
                "Only an optimiser can be tracked",
                given=type(optimizer).__name__,
                fix="pass the optimiser itself, before a scheduler is made",
            )
        if optimizer not in self._optimizers:  # `optimizer` tracks what it makes
            super().track(optimizer)
            self.watch.follow(optimizer)

    def seed_step(self, loss: Callable[[], Tensor]) -> None:
        """Let isolated seeds learn from a loss: call it after the model's own backward.

        `loss` runs the model and returns the loss (scaled, if you scale it), as in
        `host.seed_step(lambda: loss_fn(host(x), y))`. Does nothing while there is no such seed.
        """
        require_averaged(self.isolation)
        if self.isolation is not Isolation.DUAL_PASS:
            raise EsperError(
                "Seeds of this host learn in its own pass",
                given=f"isolation {self.isolation.value!r}",
                fix="leave seed_step out, or wrap with isolation='dual_pass'",
            )
        if self.has_isolated_seeds:
            with self.seed_pass():
                loss().backward()

    def train(self, mode: bool = True) -> Self:
        if mode and not self.training:
            self.watch.returned_to_training()
        return super().train(mode)

    def seeds(self) -> Iterator[tuple[str, Seed]]:
        """Those that exist, by slot."""
        for spec, slot in zip(self.specs, self._slots(), strict=True):
            if slot.seed is not None:
                yield spec.name, slot.seed

    def _become(self, life: Lifecycle, record: Transitions) -> Transitions:
        made = super()._become(life, record)
        self.watch.present = list(self.seeds())
        return made

    # --- growing -------------------------------------------------------------------------

    def tick(
        self,
        controller: "Controller | str | Path" = "heuristic",
        *,
        train_loss: float,
        val_score: float | None = None,
        val_loss: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> Tick:
        """An epoch is over: measure, let time pass, let the controller decide, carry it out.

        `val_score` is in percent, higher is better (`score_of_loss` makes one of a loss).
        `evaluate(model)` returns the same score of the model that it is given; with it the
        contribution of every seed is measured by leaving it out, without it gates that need
        contributions are off, and controllers that need them are refused. The tick that ends the
        budget's epochs decides nothing and takes out what is not permanent.
        """
        return tick(self, controller, train_loss, val_score, val_loss, evaluate)

    def require_controller(self, controller: "Controller | str | Path") -> Controller:
        """The controller that a tick with `evaluate` would take; refused now and not then."""
        return choose_controller(self, controller, measured=True)

    @property
    def horizon(self) -> int | None:
        """Epochs in all, if the budget says so."""
        return self.limits.epochs

    @property
    def room(self) -> int | None:
        """Parameters that seeds may have in all; None: no limit."""
        limit = int(self.budget)
        return None if limit == UNLIMITED else limit

    @property
    def added(self) -> int:
        """Parameters in seeds that exist."""
        return int(self.lifecycle.params.sum())

    def gate_contributions(self, measured: bool) -> None:
        """Turn the gates that look at contributions on or off."""
        least = self._given_rules.min_contribution if measured else None
        self.rules = replace(self._given_rules, min_contribution=least)

    def finish(self) -> Transitions:
        """Take out every seed that is not permanent: what is left is what `export` gives."""
        kept = self.lifecycle.occupied & ~self.lifecycle.at(SeedStage.FOSSILIZED)
        names = [spec.name for spec, gone in zip(self.specs, kept[0].tolist(), strict=True) if gone]
        return self.remove_now(*names) if names else Transitions.none()

    def export(self, sample: Sample | None = None) -> nn.Module:
        """A plain copy of the committed network, without Esper; checked on a sample."""
        return export_module(self, self.sample if sample is None else sample)

    # --- keeping -------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write host, seeds, optimiser and what the controller remembers to a directory."""
        return save_host(self, path)

    def load(self, path: str | Path) -> None:
        """Take over what was saved. The optimiser must exist and be of the same kind."""
        load_host(self, path)


def _places(
    model: nn.Module,
    sample: Sample,
    slots: Slots,
    room: int | None,
    blueprints: Sequence[str] | None,
) -> list[Target]:
    if not isinstance(slots, str):
        if not slots:
            raise SlotError(
                "A model needs at least one slot to grow",
                given="an empty list",
                fix='name submodules, slots=["layer1"], or let Esper choose, slots="auto"',
            )
        return [Target.parse(place) for place in slots]
    if slots != AUTO:
        raise SlotError(
            "Slots are a list of paths",
            given=repr(slots),
            valid='"auto" or a list',
            fix=f"write slots=[{slots!r}]",
        )
    useful: dict[int | None, list[Sighting]] = {room: [], None: []}  # by what may be added
    refusals: Refusals = {}
    for sighting, costs in offers(model, sample, blueprints):
        target, found = sighting.target, sighting.place
        if isinstance(found, EsperError):
            refusals[target] = found
        elif not costs:
            refusals[target] = SlotError(f"No blueprint fits the output of {target.where}")
        for limit, fitting in useful.items():
            if within(costs, limit):
                fitting.append(sighting)
    # Where nothing fits the budget, that is what is to be said, and not that there is no place.
    for fitting in useful.values():
        if chosen := auto_places(model, sample, fitting, refusals):
            return chosen
    raise no_place(model, refusals)


def _require_room(host: GrowingModel, room: int | None) -> None:
    """A budget too small for any seed would never grow without anyone noticing; 0 says so."""
    costs = host.catalogue.total_costs()
    fitting = costs[costs >= 0]
    cheapest = int(fitting.min()) if len(fitting) else math.inf
    if room is not None and 0 < room < cheapest:
        raise BudgetError(
            "The budget has no room for any seed in these slots",
            given=f"{room:,} parameters, the cheapest seed adds {cheapest:,}",
            fix="allow more, choose narrower slots, or say params=0 to train without growing",
        )
