"""A model in a training loop of your own: slots, an optimiser that knows them, and a tick."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from esper.api.fitting_controllers import ENDLESS, require_fitting, resolve
from esper.api.grow_settings import AUTO, OWN_LOOP, Budget, BudgetLike, listed
from esper.api.host_state import (
    KIND,
    MEMORY,
    VERSION,
    memory_state,
    pack,
    recall_memory,
    revive_shadows,
    unpack,
)
from esper.api.inspection import Slots, chosen_places, require_module
from esper.api.ranks import average_gradients, average_tensors, averaged, gathered, shared
from esper.api.ticking import (
    END,
    FEWEST_CLASSES,
    Evaluate,
    GrowthDecision,
    GrowthMemory,
    StageChange,
    Tick,
    measuring,
    number,
    slot_flow,
)
from esper.archive import read_archive, write_archive
from esper.kasmina import GateRules, Isolation, SlottedModel, export_module, require_same_parameters
from esper.kasmina.gates import closed_gates
from esper.kasmina.probe import Sample
from esper.kasmina.shadow_seeds import Losses, PartLoss, ShadowKey, Shadows
from esper.kasmina.slot import GrowthLostWarning as GrowthLostWarning
from esper.kasmina.slot import Slot
from esper.leyline import Actions, Blend, SeedStage, Transitions
from esper.leyline.errors import EsperError, OptimizerMismatchError, in_words, require_equal
from esper.leyline.lifecycle import Lifecycle
from esper.leyline.shadows import AuditionPlan
from esper.leyline.signals import Signals
from esper.leyline.streams import derive_seed
from esper.tamiyo.controllers import Auditioning, Controller, LearnedController, needs_contributions
from esper.tolaria.random_streams import uniform

Scaler = torch.amp.GradScaler
HOST_EVERY = 32  # steps between two looks at the gradient of the whole host
UNTICKED_STEPS = 1000  # without any tick, until it is said that one seems to be forgotten
_HOST = ""  # no slot has this name
LONGER_EPOCHS = 3  # times the longest epoch so far without a tick, until the same is said


class ForgottenTickWarning(UserWarning):
    """Training goes on and on, and nothing can grow because `tick` is not called."""


class GrowingModel(SlottedModel):
    """A model with slots, for a training loop of your own. The model itself is not changed:

        host = esper.wrap(model, sample=x, slots="auto", budget="+15%")
        opt = host.optimizer(torch.optim.AdamW, lr=1e-3)
        for epoch in range(epochs):
            for x, y in batches:                     # as ever
                ...
            host.tick("heuristic", train_loss=…, val_score=…, evaluate=score)

    `sample` is one batch of inputs. `slots` are paths of submodules, or "auto" (see `inspect`).
    Isolated seeds learn from the gradient of your own pass ("straight_through"), or in a pass of
    their own that you run with `seed_step` ("dual_pass"), which is better and costs more.
    `classes`: of a classifier, so that controllers know what guessing is worth.

    Wrap before torch.compile. DistributedDataParallel is made from the host, once: gradients of
    seeds and shadows are averaged here. Every process ticks, perhaps with validation data of its
    own: scores and losses are averaged, and the first one decides for all.
    """

    def __init__(
        self,
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
    ) -> None:
        require_module(model)
        limits, blueprints = Budget.of(budget), listed("blueprints", blueprints)
        room = limits.allowed(sum(parameter.numel() for parameter in model.parameters()))
        targets, places = chosen_places(model, sample, slots, room, blueprints)
        super().__init__(
            model,
            places,
            sample,
            isolation=isolation,
            rules=rules,
            budget=room,
            blueprints=blueprints,
            seed=seed,
        )
        self.sample = sample
        self.targets = targets  # how the places were named
        self.room = room  # parameters that seeds may have in all; None: no limit
        self.horizon = limits.epochs  # in all, if the budget says so
        self.memory = GrowthMemory(len(self.specs), classes)
        self.shadows = Shadows(average_tensors)
        self.watch = StepWatch(model, dict(zip(self.seed_slots, self._slots, strict=True)))
        self._given_rules = self.rules
        self._made: dict[str, Controller] = {}  # by the word that asked for it
        costs = self.catalogue.total_costs
        cheapest = min(costs[costs >= 0].tolist(), default=math.inf)
        if room is not None and 0 < room < cheapest:  # would never grow, and nobody would notice
            raise EsperError(
                "The budget has no room for any seed in these slots",
                given=f"{room:,} parameters, the cheapest seed adds {cheapest:,}",
                fix="allow more, as a number of parameters or as a share such as '+15%', choose "
                "narrower slots, or use 0 to train without growing",
            )

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
        what, error = "The optimiser could not be made", OptimizerMismatchError
        given = f"{getattr(kind, '__name__', type(kind).__name__)}: "
        fix = "pass the class and its settings, as in host.optimizer(torch.optim.AdamW, lr=1e-3)"
        with in_words(what, given=given, fix=fix, error=error):
            made = kind(wanted, **settings)
        if isinstance(made, Optimizer):
            self.optimizers.clear()
            self._let_seeds_join(made)
        self.track(made)
        return made

    def track(self, optimizer: Optimizer) -> None:
        """Let seeds join and leave this optimiser, which was made from the host's parameters."""
        if not isinstance(optimizer, Optimizer):
            raise OptimizerMismatchError(
                "This is no optimiser",
                given=type(optimizer).__name__,
                fix="pass the optimiser itself, made of a class such as torch.optim.AdamW",
            )
        if optimizer not in self.optimizers:  # `optimizer` tracks what it makes
            super().track(optimizer)
            watch = self.watch  # without the host: optimisers do not keep it alive
            optimizer.register_step_pre_hook(watch.before_step)
            optimizer.register_load_state_dict_pre_hook(_require_fitting_state)
            revive_shadows(self)

    def seed_step(
        self, loss: Callable[[], Tensor], part: PartLoss | None = None, scaler: Scaler | None = None
    ) -> None:
        """Let isolated seeds learn from a loss: call it after the model's own backward.

        `loss` runs the model and returns the loss, which `scaler` scales if there is one, as in
        `host.seed_step(lambda: loss_fn(host(x), y))`. Shadows learn from it too, or from `part`,
        which gives the loss of a share of the batch. Does nothing while there is neither.
        """
        if self.isolation is not Isolation.DUAL_PASS:
            raise EsperError(
                "Seeds of this host learn in its own pass",
                given=f"isolation {self.isolation.value!r}",
                fix="leave seed_step out, or wrap with isolation='dual_pass'",
            )
        scale = 1.0 if scaler is None else scaler.get_scale()
        if self.has_isolated_seeds:
            with self.seed_pass():
                (scale * loss()).backward()
        self.shadows.learn(self, loss, part, scale)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        for shadow in self.shadows.living.values():  # which are no parts of it
            shadow.seed._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Torch's parallel wrapper asks for it, and would wait for seeds that are gone."""
        return [f"slots.{name}" for name, _ in self.slots.named_parameters()]

    # --- growing -------------------------------------------------------------------------

    def tick(
        self,
        controller: "Controller | str | Path" = OWN_LOOP,
        *,
        train_loss: float,
        val_score: float | None = None,
        val_loss: float | None = None,
        evaluate: Evaluate | None = None,
        losses: Losses | None = None,
    ) -> Tick:
        """An epoch is over: measure, let time pass, let the controller decide, carry it out.

        `val_score` is in percent, higher is better (`score_of_loss` makes one of a loss).
        `evaluate(model)` returns the same score of the model that it is given; with it the
        contribution of every seed is measured by leaving it out, without it gates that need
        contributions are off, and controllers that need them are refused. `losses(model)` returns
        the loss of every validation sample, [samples]: with it and `seed_step` shadows can be
        heard, which "audition" needs. The tick that ends the budget's epochs decides nothing and
        takes out what is not permanent.
        """
        measured = evaluate is not None
        chosen = self.require_controller(controller, measured=measured)
        self._require_heard(chosen, losses)
        self._require_trained()
        before = list(self.slots.parameters())  # kept, since a freed one's id may come again
        loss = number("train_loss", train_loss)
        held_out = math.nan if val_loss is None else number("val_loss", val_loss)
        found = self.memory.measure(self, val_score, evaluate)
        self.memory.report(self, loss, held_out, found)
        if losses is not None and self.shadows:
            gradient, mean = self.watch.gradients()[1], partial(averaged, self)
            with measuring(self):  # on the samples of all processes
                everyones = lambda model: gathered(self, losses(model))  # noqa: E731
                self.shadows.measure(self, everyones, self.memory.relative, gradient, mean)
        least = self._given_rules.min_contribution if measured else None
        self.rules = replace(self._given_rules, min_contribution=least)  # that gate is on or off
        transitions = self.pass_time()
        if self.memory.ended:
            decision = GrowthDecision(END)
            transitions = transitions + self.finish()
            self.shadows.end()
        else:
            actions, plan = self._decide(chosen)
            decision = GrowthDecision.by(actions, self)
            transitions = transitions + self.apply(actions)
            if plan is None:  # whoever asked for them does not decide any more
                self.shadows.end()
            else:
                self.shadows.adopt(self, plan, self.shadows.seen or self.watch.steps)
        self.watch.go_on(0, max(self.watch.longest, self.watch.steps))
        return Tick(
            epoch=int(self.lifecycle.epoch),
            decision=decision,
            events=tuple(StageChange.by(record, self.catalogue) for record in transitions),
            **vars(found),
            added=self.added,
            changed=[*map(id, before)] != [*map(id, self.slots.parameters())],
        )

    def require_controller(
        self, asked: "Controller | str | Path", *, measured: bool = True
    ) -> Controller:
        """The controller that was asked for, if it can decide here with what is measured."""
        if isinstance(asked, (str, Path)):
            if str(asked) not in self._made:
                self._made[str(asked)] = resolve(asked, self.catalogue, self.horizon)
            chosen = self._made[str(asked)]
        elif isinstance(asked, Controller) and not isinstance(asked, type):
            chosen = asked
            if chosen is not self.memory.controller:
                require_fitting(chosen, self.catalogue, self.horizon)
        else:
            raise EsperError(
                "This is no controller",
                given=getattr(asked, "__name__", type(asked).__name__),
                valid='a name such as "heuristic", the path of a trained one, or an object with '
                "act()",
            )
        if not measured and needs_contributions(chosen):
            raise EsperError(
                f"Controller {chosen.name!r} judges seeds by what they contribute",
                given="no evaluate=",
                fix="pass evaluate=, a function that scores the model it is given, or take a "
                "controller that does without, such as 'plateau' or 'periodic'",
            )
        return chosen

    def _require_trained(self) -> None:
        if self.memory.ended:
            raise EsperError(
                "The budget's epochs are over",
                given=f"tick {int(self.lifecycle.epoch) + 1} of {self.horizon}",
                fix="give Budget(epochs=...) as many epochs as the loop has",
            )
        self._require_optimizer()
        if self.watch.steps == 0:
            raise OptimizerMismatchError(
                "The optimiser that this host knows has made no step since the last tick",
                fix="train with the optimiser that host.optimizer(...) returned, and call tick "
                "once after each epoch",
            )
        for optimizer in self.optimizers:
            require_same_parameters(optimizer, self)
        gradients, _ = self.watch.gradients()
        training = [n for n, slot in self.seed_slots.items() if slot.stage is SeedStage.TRAINING]
        starved = [name for name in training if name not in gradients]
        if starved and self.has_isolated_seeds:
            raise EsperError(
                "Isolated seeds got no gradient in the last epoch",
                given=", ".join(starved),
                fix="call host.seed_step(lambda: loss_fn(host(x), y)) after each backward, or wrap "
                "with isolation='straight_through'",
            )

    def _require_optimizer(self) -> None:
        if not self.optimizers:
            raise OptimizerMismatchError(
                "This host knows no optimiser, so seeds would never learn",
                fix="make it with host.optimizer(torch.optim.AdamW, lr=...), or hand yours over "
                "with host.track(optimizer)",
            )

    def pass_time(self) -> Transitions:
        """An epoch has ended; without an optimiser that they are in, seeds would never learn."""
        if self.added:
            self._require_optimizer()
        return super().pass_time()

    def _require_heard(self, chosen: Controller, losses: Losses | None) -> None:
        """Refuse a controller that needs shadows where they get no loss to learn from."""
        if not isinstance(chosen, Auditioning):
            return
        given = None
        if self.isolation is not Isolation.DUAL_PASS:
            given = f"isolation {self.isolation.value!r}"
        elif losses is None:
            given = "no losses="
        elif self.shadows and not self.shadows.seen:
            given = "no seed_step() since the last tick"
        if given is not None:
            raise EsperError(
                f"Controller {chosen.name!r} listens to shadows, which need a loss to learn from",
                given=given,
                fix="wrap with isolation='dual_pass', call host.seed_step(lambda: loss_fn(host(x), "
                "y)) in every step and pass losses= to tick, a function that gives the loss of "
                "every validation sample; or use esper.grow, or another controller",
            )

    def _decide(self, controller: Controller) -> tuple[Actions, AuditionPlan | None]:
        window, life = self.memory.window, self.lifecycle
        if isinstance(controller, LearnedController):  # only these look at it; it costs a pass
            window.remember_flow(slot_flow(self))
        auditioning = isinstance(controller, Auditioning)
        stream = torch.tensor([derive_seed(self.seed, "decisions")])
        signals = Signals(
            self.catalogue,
            life,
            self.budget,
            horizon=torch.tensor([self.horizon or ENDLESS]),
            classes=self.memory.classes or FEWEST_CLASSES,
            draws=uniform(stream, "decision", life.epoch, len(self.space)),
            shadows=self.shadows.open(self, self.sample) if auditioning else None,
            **window.measured(),
        )
        legality = self.legal()
        refused = closed_gates(self.situation)
        starts = torch.tensor([self.memory.hand_over(controller, legality, refused)])
        chosen = controller.act(signals, legality, starts)
        if not isinstance(chosen, Actions):
            what, given = f"Controller {controller.name!r} must return actions", repr(chosen)
            fix = "return Actions.of(legality.space, op=LifecycleOp.WAIT) to do nothing"
            raise EsperError(what, given=given, fix=fix)
        chosen = Actions(chosen.space, shared(self, chosen.values))
        self.memory.actions = chosen
        if isinstance(controller, Auditioning):
            wanted = controller.audition(signals, legality)
            return chosen, AuditionPlan(*(shared(self, each) for each in wanted))
        return chosen, None

    def _become(self, life: Lifecycle, record: Transitions) -> Transitions:
        transitions = super()._become(life, record)
        self.watch.look_again()
        return transitions

    def _plant(self, index: int, slot: Slot, blueprint: int, blend: Blend) -> None:
        super()._plant(index, slot, blueprint, blend)
        if blend is not Blend.IMMEDIATE and slot.seed is not None:  # that one has to be newborn
            shadow = self.shadows.take(ShadowKey(index, blueprint))
            if shadow is not None:
                shadow.pass_on(slot.seed, self.optimizers)
        average_gradients(slot)

    @property
    def added(self) -> int:
        """Parameters in seeds that exist."""
        return int(self.lifecycle.params.sum())

    def finish(self) -> Transitions:
        """Take out every seed that is not permanent: what is left is what `export` gives."""
        seeds = [slot for slot in self.seed_slots.values() if slot.seed is not None]
        return self.remove_now(*(s.name for s in seeds if s.stage is not SeedStage.FOSSILIZED))

    def export(self, sample: Sample | None = None) -> nn.Module:
        """A plain copy of the committed network, without Esper; checked on a sample."""
        return export_module(self, self.sample if sample is None else sample)

    # --- keeping -------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """What ticks and the controller remember goes along, so that growing goes on as it was."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: each for name, each in memory_state(self).items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        own = f"{prefix}{MEMORY}"
        found = {
            name.removeprefix(prefix): state_dict.pop(name)
            for name in list(state_dict)
            if name.startswith(own)
        }
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if found:
            recall_memory(self, found)
        else:
            warnings.warn(
                "The loaded state does not hold what the controller remembers, so it decides as if "
                "this were its first epoch; load all of what host.state_dict() gave.",
                GrowthLostWarning,
                stacklevel=2,
            )

    def save(self, path: str | Path) -> Path:
        """Write host, seeds, optimiser and what the controller remembers to a directory."""
        tensors, notes = pack(self)
        return write_archive(path, kind=KIND, version=VERSION, tensors=tensors, notes=notes)

    def load(self, path: str | Path) -> None:
        """Take over what was saved. The optimiser must exist and be of the same kind."""
        unpack(self, read_archive(path, kind=KIND, version=VERSION))


wrap = GrowingModel
"""Makes a growing model: the same class, under the name of what it does."""


def _require_fitting_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse a saved state of an optimiser before the host has grown to what it was then."""
    here, saved = (
        [f"{len(group['params'])} parameters" for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    what = "The optimiser's state is not of what has grown here"
    fix = "load the host's state first, host.load_state_dict(...), and then the optimiser's"
    require_equal(what, here, saved, fix, OptimizerMismatchError)


class StepWatch:
    """Goes with every step of the optimiser; costs next to nothing while no seed is there."""

    def __init__(self, model: nn.Module, slots: Mapping[str, Slot], warns: bool = True) -> None:
        self._model, self.slots, self._warns = model, slots, warns
        self._seeds: dict[str, nn.Module] = {}  # by slot
        self.go_on(0, 0)

    def look_again(self) -> None:
        """Seeds came or went; asked for in every step, so they are looked up once."""
        slots = self.slots.items()
        self._seeds = {name: slot.seed for name, slot in slots if slot.seed is not None}

    def go_on(self, steps: int, longest: int) -> None:
        """From here, with so many steps since the last tick, and between any two at most."""
        self.steps, self.longest = steps, longest
        # Sums of squared gradient norms and their counts, by slot, and the host's.
        self._squares: dict[str, tuple[Tensor | float, int]] = {}

    def pack(self) -> dict[str, Any]:
        """All since the last tick, as JSON holds it."""
        squares = {name: (float(total), count) for name, (total, count) in self._squares.items()}
        return {"steps": [self.steps, self.longest], "squares": squares}

    def unpack(self, notes: Mapping[str, Any]) -> None:
        self.go_on(*notes["steps"])
        self._squares = {name: (total, count) for name, (total, count) in notes["squares"].items()}

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self.steps += 1
        if self._warns and self.steps == (LONGER_EPOCHS * self.longest or UNTICKED_STEPS):
            warnings.warn(
                f"{self.steps} optimiser steps without host.tick(...), so nothing can grow; "
                "call it once after every epoch.",
                ForgottenTickWarning,
                stacklevel=3,
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            if self._seeds or self.steps % HOST_EVERY == 1:
                self._look_at_gradients(optimizer)
            return None

        def looking() -> Any:  # a closure makes the gradients within the step
            loss = closure()
            self._look_at_gradients(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": looking}

    def _look_at_gradients(self, optimizer: Optimizer) -> None:
        watched = self._seeds
        if self.steps % HOST_EVERY == 1:
            watched = {**watched, _HOST: self._model}
        scale = getattr(optimizer, "grad_scale", None)  # fused optimisers undo it themselves
        for name, module in watched.items():
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            if gradients:
                with torch.no_grad():
                    norm = get_total_norm(gradients).float()
                    square = (norm if scale is None else norm / scale).square()
                total, count = self._squares.get(name, (0.0, 0))
                self._squares[name] = total + square, count + 1

    def gradients(self) -> tuple[dict[str, float], float]:
        """Root mean squares of the gradient norms since the last tick: seeds', and the host's."""
        found = {
            name: math.sqrt(float(total) / count) for name, (total, count) in self._squares.items()
        }
        return found, found.pop(_HOST, math.nan)
