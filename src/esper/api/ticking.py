"""What a tick measures, remembers and says: the epoch's end in a training loop of your own.

`GrowingModel.tick` goes through it. Of several processes that train copies of one model, all know
the means of what they measured, and decide what the first one does.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.api.ranks import averaged, shared
from esper.kasmina.flow_statistics import flow_statistics
from esper.kasmina.isolation import randomness_kept, state_kept
from esper.kasmina.probe import Place
from esper.kasmina.slot import part_of
from esper.kasmina.watching import call
from esper.leyline import Actions, Blend, EsperError, Legality, LifecycleOp, SeedStage
from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.lifecycle import TransitionRecord
from esper.leyline.signals import FLOW_STATISTICS, SignalWindow
from esper.show.terminal import one_line_repr
from esper.tamiyo.controllers.protocol import Controller, Remembering

if TYPE_CHECKING:
    from esper.api.growing_model import GrowingModel

Refusals = list[tuple[int, int, LifecycleOp, str]]  # host, slot, op, why
Evaluate = Callable[[nn.Module], "float | Tensor"]
SAME_SCORE = 0.5  # points that two measurements of one score may differ by
ROUNDING = 1e-3  # points by which a score made of float32 may exceed 100
SCORES_SEEN = 3  # until it is said that they look like fractions
_KEPT = ("classes", "unit", "compared", "ended")  # of what a host remembers
FEWEST_CLASSES = 2  # where none are known: losses are then in units of the first one


class NotFiniteError(EsperError):
    """Training has diverged."""


class FractionWarning(UserWarning):
    """Scores seem to be fractions, where percent are expected."""


# --- what happened ---------------------------------------------------------------------------

WAIT, END = LifecycleOp.WAIT.name, "END"  # END: the budget's epochs are over
_VERBS = {
    LifecycleOp.GERMINATE.name: "plant",
    LifecycleOp.ADVANCE.name: "blend in",
    LifecycleOp.FOSSILIZE.name: "keep",
    LifecycleOp.PRUNE.name: "prune",
}


@dataclass(frozen=True)
class GrowthDecision:
    """What was decided, by names as JSON holds them; prints as words."""

    op: str
    slot: str | None = None
    blueprint: str | None = None
    blend: str | None = None  # of a seed that is planted

    @classmethod
    def by(cls, actions: Actions, host: "GrowingModel") -> "GrowthDecision":
        """The decision that these actions are, before they are carried out."""
        op = LifecycleOp(int(actions["op"]))
        if op is LifecycleOp.WAIT:
            return cls(WAIT)
        slot = host.catalogue.slots.names[int(actions["slot"])]
        if op is LifecycleOp.GERMINATE:
            blueprint = host.catalogue.names[int(actions["blueprint"])]
            return cls(op.name, slot, blueprint, Blend(int(actions["blend"])).name)
        return cls(op.name, slot, host.seed_slots[slot].blueprint)

    @property
    def changes_something(self) -> bool:
        return self.op not in (WAIT, END)

    def __repr__(self) -> str:
        return one_line_repr(self, str(self))

    def __str__(self) -> str:
        if not self.changes_something:
            return self.op.lower()
        blend = f" ({self.blend.lower()})" if self.blend else ""
        return f"{_VERBS[self.op]} {self.blueprint} at {self.slot}{blend}"


@dataclass(frozen=True)
class StageChange:
    """A slot that came from one stage to another, by names as JSON holds them."""

    slot: str
    before: str
    after: str
    cause: str
    reason: str = ""  # why its gate was open

    @classmethod
    def by(cls, record: TransitionRecord, catalogue: BlueprintCatalogue) -> "StageChange":
        slot = catalogue.slots.names[record.slot]
        stages = record.before.name, record.after.name
        return cls(slot, *stages, record.cause, record.reason)

    def __repr__(self) -> str:
        return one_line_repr(self, str(self))

    def __str__(self) -> str:
        return f"{self.slot}: {self.before} -> {self.after} ({self.cause})"


@dataclass(frozen=True)
class TickScores:
    """What one tick measured."""

    score: float  # percent
    committed: float | None  # with only permanent seeds on; None: not measured
    contributions: Mapping[str, float]  # score with a seed minus without it, by slot


@dataclass(frozen=True)
class Tick(TickScores):
    """What one tick saw and did."""

    epoch: int  # epochs lived, this one included
    decision: GrowthDecision
    events: tuple[StageChange, ...]
    added: int  # parameters in seeds, after the decision
    changed: bool  # did parameters join or leave?

    def __repr__(self) -> str:
        parameters = f"{self.added:,} parameters in seeds"
        text = f"epoch {self.epoch}: score {self.score:.2f}, {parameters}, {self.decision}"
        return one_line_repr(self, text)


# --- measuring -------------------------------------------------------------------------------


@contextmanager
def measuring(host: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode without gradients; afterwards all is as before:
    modes, buffers, random numbers.
    """
    mode = host.training
    with torch.no_grad(), state_kept(host), randomness_kept(host):
        try:
            nn.Module.train(host, False)
            yield
        finally:  # parts may be in a mode of their own, which is kept with their state
            nn.Module.train(host, mode)


def number(name: str, value: object) -> float:
    """A finite number, or a tensor that holds one."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not math.isfinite(found):
        shown = value if isinstance(value, (int, float, str)) else type(value).__name__
        raise NotFiniteError(
            f"{name} is not a finite number",
            given=shown,
            valid="a number, or a tensor that holds one",
            fix="if training has diverged, start again with a smaller learning rate; if not, look "
            "for NaN in the data",
        )
    return found


def percent(name: str, value: object) -> float:
    """A score."""
    found = number(name, value)
    if found > 100.0 + ROUNDING:
        raise EsperError(
            f"{name} is in percent, and higher is better",
            given=f"{found:g}",
            valid="at most 100",
            fix="turn a loss into a score with esper.api.score_of_loss (in esper.grow: leave "
            "metric away)",
        )
    return min(found, 100.0)


def slot_flow(host: "GrowingModel") -> Tensor:
    """[1, S, K]: statistics of what reaches each slot, on the sample of the first process; NaN
    where nothing did.
    """
    found = torch.full((len(host.specs), len(FLOW_STATISTICS)), torch.nan, dtype=torch.float64)

    def look(index: int, place: Place, module: nn.Module, args: Any, output: Any) -> None:
        if bool(found[index].isnan().all()):
            h = part_of(output, place.part).detach().permute(place.spec.to_canonical)
            found[index] = flow_statistics(h[None], place.spec.channel_axis)[0].double().cpu()

    with measuring(host), ExitStack() as hooks:
        for index, place in enumerate(host.slot_places):
            hook = place.module.register_forward_hook(partial(look, index, place), prepend=True)
            hooks.callback(hook.remove)
        call(host, host.sample)
    return shared(host, found[None])


# --- remembering -----------------------------------------------------------------------------


class GrowthMemory:
    """What a host remembers between ticks: the last epochs' measurements, and who decides."""

    def __init__(self, slots: int, classes: int | None = None) -> None:
        self.window = SignalWindow(1, slots)
        self.classes = classes  # of a classifier
        self.controller: Controller | None = None  # the one that decided last
        self.legality: Legality | None = None  # what it chose among
        self.refused: Refusals = []  # what gates kept it from
        self.actions: Actions | None = None  # what it chose
        self.compared = False  # were val_score and evaluate found to be the same score?
        self.ended = False  # are the budget's epochs over?
        self.unit: float | None = None  # the loss that counts as guessing without classes
        self._pending: tuple[str, Mapping[str, Tensor]] | None = None  # of a saved controller

    def take_reference(self, classes: int | None, loss: float) -> None:
        """What guessing is worth: known from the classes, or the loss of a model that guesses."""
        self.classes, self.unit = classes, abs(loss)

    def expect(self, epoch: int, horizon: int | None) -> None:
        """So many epochs are lived of so many in all."""
        self.ended = horizon is not None and epoch >= horizon

    def relative(self, loss: float) -> float:
        """A loss so that one of guessing is log(classes), as controllers expect it."""
        if self.classes is not None:
            return loss
        if self.unit is None and math.isfinite(loss) and loss != 0.0:
            self.unit = abs(loss)
        return loss / (self.unit or 1.0) * math.log(FEWEST_CLASSES)

    def measure(
        self, host: "GrowingModel", score: float | None, evaluate: Evaluate | None
    ) -> TickScores:
        """Score the host as it is, as committed and without each of its seeds."""
        told = None if score is None else float(averaged(host, row(percent("val_score", score))))
        if evaluate is None:
            if told is None:
                raise EsperError(
                    "A tick needs a score", given="neither val_score= nor evaluate=", fix="pass one"
                )
            return TickScores(told, None, {})
        shown = {name: slot for name, slot in host.seed_slots.items() if slot.alpha > 0.0}
        loose = [name for name, slot in shown.items() if slot.stage is not SeedStage.FOSSILIZED]

        @cache
        def without(*off: str) -> float:
            with measuring(host), host.without(*off):
                return float(averaged(host, row(percent("evaluate(model)", evaluate(host)))))

        if told is not None and shown and not self.compared:
            # Once: contributions are differences between the two, so they must be the same score.
            if abs(without() - told) > SAME_SCORE:
                raise EsperError(
                    "val_score and evaluate(model) are not the same score",
                    given=f"{told:g} and {without():g}",
                    fix="leave val_score out: evaluate(model) is then called for it",
                )
            self.compared = True
        whole = without() if told is None else told
        contributions = {name: whole - without(name) for name in shown}
        return TickScores(whole, without(*loose) if loose else whole, contributions)

    def report(self, host: "GrowingModel", loss: float, held_out: float, found: TickScores) -> None:
        """Tell the host's gates what all processes agree on, and remember it."""
        gradients, whole = host.watch.gradients()
        present = [name for name, slot in host.seed_slots.items() if slot.seed is not None]
        own = {"loss": loss, "val_loss": held_out, "score": found.score, "host": whole}
        own["committed"] = math.nan if found.committed is None else found.committed
        own |= {f"contribution {name}": value for name, value in found.contributions.items()}
        own |= {f"gradient {name}": gradients.get(name, math.nan) for name in present}
        values = averaged(host, torch.tensor(list(own.values()), dtype=torch.float64))
        numbers = dict(zip(own, values.tolist(), strict=True))
        if not math.isnan(held_out):
            held_out = self.relative(numbers["val_loss"])
        loss = self.relative(numbers["loss"])
        host.measure(
            contribution={name: numbers[f"contribution {name}"] for name in found.contributions},
            gradient={name: numbers[f"gradient {name}"] for name in present},
            loss_rise=float(self.window.loss_rise(row(loss))),
        )
        latest = {
            "train_loss": row(loss),
            "validation_loss": row(held_out),
            "validation_accuracy": row(numbers["score"]),
            "committed_accuracy": row(numbers["committed"]),
        }
        self.window.remember(latest, row(numbers["host"]))
        epoch = int(host.lifecycle.epoch) + 1
        self.expect(epoch, host.horizon)
        seen = self.window.recent("validation_accuracy", SCORES_SEEN)
        if epoch == SCORES_SEEN and bool(((seen >= 0.0) & (seen <= 1.0)).all()) and seen.any():
            warnings.warn(
                f"Scores up to {float(seen.max()):g}: they are taken for percent; multiply "
                "fractions by 100.",
                FractionWarning,
                stacklevel=3,
            )

    def hand_over(self, controller: Controller, legality: Legality, refused: Refusals) -> bool:
        """It decides from now on, among what is legal; is it another one than before?

        The one that decided before the host was saved is told what it remembered.
        """
        if self._pending is not None and self._pending[0] == controller.name:
            if isinstance(controller, Remembering):
                controller.recall(self._pending[1])
            self.controller, self._pending = controller, None
        starts = self.controller is not controller
        self.controller, self.legality, self.refused = controller, legality, refused
        return starts

    # --- keeping -------------------------------------------------------------------------

    def pack(self) -> dict[str, Any]:
        """All of it, with what the controller that decided last remembers."""
        controller, remembered = self._pending or (None, {})
        if self.controller is not None:
            controller, remembered = self.controller.name, {}
        if isinstance(self.controller, Remembering):
            remembered = self.controller.memory()
        known = {name: getattr(self, name) for name in _KEPT}
        window = {name: each.tolist() for name, each in self.window.state_dict().items()}
        return known | {"controller": controller, "remembered": dict(remembered), "window": window}

    def unpack(self, notes: Mapping[str, Any]) -> None:
        window = notes["window"].items()
        self.window.load_state_dict({n: torch.tensor(v, dtype=torch.float64) for n, v in window})
        vars(self).update({name: notes[name] for name in _KEPT})
        controller = notes["controller"]
        self.controller = None
        self._pending = None if controller is None else (controller, notes["remembered"])


def row(value: float) -> Tensor:
    """[1]"""
    return torch.tensor([value], dtype=torch.float64)
