"""One tick: measure what the epoch did, let time pass, decide, carry it out."""

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from esper.api.controllers import ENDLESS, needs_contributions, require_fitting, resolve
from esper.api.distributed import agreed, shared
from esper.api.flowing import slot_flow
from esper.api.signal_window import flag
from esper.api.steps import FractionWarning
from esper.kasmina.isolation import Isolation, randomness_kept, state_kept
from esper.kasmina.optimizer_surgery import require_same_parameters
from esper.leyline.errors import EsperError, OptimizerMismatchError
from esper.leyline.legality import Actions
from esper.leyline.lifecycle import TransitionRecord
from esper.leyline.ops import Blend, LifecycleOp
from esper.leyline.stages import SeedStage
from esper.leyline.streams import derive_seed
from esper.tamiyo.controllers import LearnedController
from esper.tamiyo.controllers.protocol import Controller, Remembering
from esper.tolaria.random_streams import uniform

if TYPE_CHECKING:
    from esper.api.hosts import GrowingModel

Evaluate = Callable[[nn.Module], "float | Tensor"]
SAME_SCORE = 0.5  # points that two measurements of one score may differ by
ROUNDING = 1e-3  # points by which a score made of float32 may exceed 100
SCORES_SEEN = 3  # until it is said that they look like fractions


class TickError(EsperError):
    """A tick that was called with what it cannot use."""


@dataclass(frozen=True)
class Tick:
    """What one tick saw and did."""

    epoch: int  # epochs lived, this one included
    decision: str
    events: tuple[str, ...]  # stage changes
    score: float  # percent
    committed: float | None  # with only permanent seeds on; None: not measured
    contributions: Mapping[str, float]  # score with a seed minus without it, by slot
    added: int  # parameters in seeds, after the decision
    changed: bool  # did parameters join or leave? then a DistributedDataParallel is made anew


@dataclass(frozen=True)
class Measured:
    score: float
    committed: float | None
    contributions: Mapping[str, float]


def tick(
    host: "GrowingModel",
    controller: Controller | str | Path,
    train_loss: float,
    val_score: float | None,
    val_loss: float | None,
    evaluate: Evaluate | None,
) -> Tick:
    """See `GrowingModel.tick`."""
    host.watch.bring_back()
    chosen = choose_controller(host, controller, measured=evaluate is not None)
    _recall(host, chosen)
    _require_trained(host)
    before = list(host.slots.parameters())  # kept, since a freed one's id may come again
    loss = _number("train_loss", train_loss)
    held_out = math.nan if val_loss is None else _number("val_loss", val_loss)
    found = measure(host, val_score, evaluate)
    _report(host, loss, held_out, found, measured=evaluate is not None)
    transitions = host.pass_time()
    epoch = int(host.lifecycle.epoch)
    if host.horizon is not None and epoch >= host.horizon:
        decision = "end"
        transitions = transitions + host.finish()
        host.memory.ended = True
    else:
        actions = _decide(host, chosen)
        decision = describe(host, actions)
        transitions = transitions + host.apply(actions)
    host.watch.start_epoch()
    return Tick(
        epoch=epoch,
        decision=decision,
        events=tuple(_event(host, record) for record in transitions),
        score=found.score,
        committed=found.committed,
        contributions=found.contributions,
        added=host.added,
        changed=not _are_same(before, list(host.slots.parameters())),
    )


def _are_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def choose_controller(
    host: "GrowingModel", asked: Controller | str | Path, *, measured: bool
) -> Controller:
    """The controller that was asked for, if it can decide for this host with what is measured."""
    if isinstance(asked, (str, Path)):
        made = host.memory.made
        if str(asked) not in made:
            made[str(asked)] = resolve(asked, host.catalogue, host.horizon)
        chosen = made[str(asked)]
    elif isinstance(asked, Controller):
        chosen = asked
        if chosen is not host.memory.controller:
            require_fitting(chosen, host.catalogue, host.horizon)
    else:
        raise TickError(
            "This is no controller",
            given=type(asked).__name__,
            valid='a name such as "heuristic", the path of a trained one, or an object with act()',
        )
    if not measured and needs_contributions(chosen):
        raise TickError(
            f"Controller {chosen.name!r} judges seeds by what they contribute",
            given="no evaluate=",
            fix="pass evaluate=, a function that scores the model it is given, or take a "
            "controller that does without, such as 'plateau' or 'periodic'",
        )
    return chosen


def _recall(host: "GrowingModel", controller: Controller) -> None:
    """After a saved host was loaded: tell its controller what it remembered."""
    pending = host.memory.pending
    if pending is not None and pending[0] == controller.name:
        if isinstance(controller, Remembering):
            controller.recall(pending[1])
        host.memory.controller, host.memory.pending = controller, None


def _require_trained(host: "GrowingModel") -> None:
    if host.memory.ended:
        raise TickError(
            "The budget's epochs are over",
            given=f"tick {int(host.lifecycle.epoch) + 1} of {host.horizon}",
            fix="give Budget(epochs=...) as many epochs as the loop has",
        )
    if not host.optimizers:
        raise OptimizerMismatchError(
            "This host knows no optimiser, so seeds would never learn",
            fix="make it with host.optimizer(torch.optim.AdamW, lr=...), or hand yours over "
            "with host.track(optimizer)",
        )
    if host.watch.steps == 0:
        raise OptimizerMismatchError(
            "The optimiser that this host knows has made no step since the last tick",
            fix="train with the optimiser that host.optimizer(...) returned, and call tick once "
            "after each epoch",
        )
    for optimizer in host.optimizers:
        require_same_parameters(optimizer, host)
    isolated = host.lifecycle.at(SeedStage.TRAINING)
    if host.isolation is Isolation.DUAL_PASS and bool(isolated.any()):
        gradients, _ = host.watch.gradients()
        starved = [
            spec.name
            for spec, alone in zip(host.specs, isolated[0].tolist(), strict=True)
            if alone and spec.name not in gradients
        ]
        if starved:
            raise TickError(
                "Isolated seeds got no gradient in the last epoch",
                given=", ".join(starved),
                fix="call host.seed_step(lambda: loss_fn(host(x), y)) after each backward, or wrap "
                "with isolation='straight_through'",
            )


# --- measuring -----------------------------------------------------------------------------


def measure(host: "GrowingModel", score: float | None, evaluate: Evaluate | None) -> Measured:
    """Score the host as it is, as committed and without each of its seeds."""
    if evaluate is None:
        if score is None:
            raise TickError(
                "A tick needs a score", given="neither val_score= nor evaluate=", fix="pass one"
            )
        return Measured(_score("val_score", score), None, {})
    shown = (host.lifecycle.alpha[0] > 0).tolist()
    kept = host.lifecycle.at(SeedStage.FOSSILIZED)[0].tolist()
    names = [spec.name for spec, on in zip(host.specs, shown, strict=True) if on]
    loose = frozenset(
        spec.name for spec, on, stays in zip(host.specs, shown, kept, strict=True) if on > stays
    )
    scores: dict[frozenset[str], float] = {}

    def without(*off: str) -> float:
        if frozenset(off) not in scores:
            with measuring(host), host.without(*off):
                scores[frozenset(off)] = _score("evaluate(model)", evaluate(host))
        return scores[frozenset(off)]

    if score is not None:
        scores[frozenset()] = _score("val_score", score)
        if names and not host.memory.compared:
            _require_same_score(host, evaluate, scores[frozenset()])
    whole = without()
    contributions = {name: whole - without(name) for name in names}
    return Measured(whole, without(*loose), contributions)


def _require_same_score(host: "GrowingModel", evaluate: Evaluate, score: float) -> None:
    """Once: contributions are differences between the two, so they must be one and the same."""
    with measuring(host):
        found = _score("evaluate(model)", evaluate(host))
    if abs(found - score) > SAME_SCORE:
        raise TickError(
            "val_score and evaluate(model) are not the same score",
            given=f"{score:g} and {found:g}",
            fix="leave val_score out: evaluate(model) is then called for it",
        )
    host.memory.compared = True


@contextmanager
def measuring(host: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode without gradients; afterwards all is as before:
    modes, buffers, random numbers.
    """
    modes = [(module, module.training) for module in host.modules()]
    with torch.no_grad(), state_kept(host), randomness_kept(host):
        try:
            nn.Module.train(host, False)
            yield
        finally:
            nn.Module.train(host, modes[0][1])
            for module, mode in modes:  # parts may be in a mode of their own
                module.training = mode


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        shown = value if isinstance(value, (int, float, str)) else type(value).__name__
        raise TickError(
            f"{name} is not a finite number",
            given=shown,
            valid="a number, or a tensor that holds one",
            fix="if training has diverged, start again with a smaller learning rate",
        )
    return number


def _score(name: str, value: object) -> float:
    number = _number(name, value)
    if number > 100.0 + ROUNDING:
        raise TickError(
            f"{name} is in percent, and higher is better",
            given=f"{number:g}",
            valid="at most 100",
            fix="turn a loss into a score with esper.api.score_of_loss",
        )
    return min(number, 100.0)


def _report(
    host: "GrowingModel", loss: float, held_out: float, found: Measured, *, measured: bool
) -> None:
    """Tell the gates and the memory."""
    memory = host.memory
    gradients, whole = host.watch.gradients()
    numbers = agreed(
        host,
        {"loss": loss, "val_loss": held_out, "score": found.score, "host": whole}
        | {"committed": math.nan if found.committed is None else found.committed}
        | {f"contribution {name}": value for name, value in found.contributions.items()}
        | {f"gradient {name}": gradients.get(name, math.nan) for name, _ in host.seeds()},
    )
    held_out = math.nan if math.isnan(held_out) else memory.relative(numbers["val_loss"])
    loss = memory.relative(numbers["loss"])
    host.measure(
        contribution={name: numbers[f"contribution {name}"] for name in found.contributions},
        gradient={name: numbers[f"gradient {name}"] for name, _ in host.seeds()},
        loss_rise=float(memory.window.loss_rise(_row(loss))),
    )
    host.gate_contributions(measured)
    latest = {
        "train_loss": loss,
        "validation_loss": held_out,
        "validation_accuracy": numbers["score"],
        "committed_accuracy": numbers["committed"],
    }
    memory.window.remember(
        {name: _row(value) for name, value in latest.items()}, _row(numbers["host"])
    )
    scores = memory.window.recent("validation_accuracy", SCORES_SEEN)
    _warn_of_fractions(scores[0], int(host.lifecycle.epoch) + 1)


def _row(value: float) -> Tensor:
    """[1]"""
    return torch.tensor([value], dtype=torch.float64)


def _warn_of_fractions(seen: Tensor, epoch: int) -> None:
    if epoch == SCORES_SEEN and bool(((seen >= 0.0) & (seen <= 1.0)).all()) and seen.any():
        warnings.warn(
            f"Scores up to {float(seen.max()):g}: they are taken for percent; multiply fractions "
            "by 100.",
            FractionWarning,
            stacklevel=5,
        )


# --- deciding ------------------------------------------------------------------------------


def _decide(host: "GrowingModel", controller: Controller) -> Actions:
    memory, life = host.memory, host.lifecycle
    if isinstance(controller, LearnedController):  # only these look at it, and it costs a pass
        memory.window.remember_flow(_flow(host))
    stream = torch.tensor([derive_seed(host.seed, "decisions")])
    signals = memory.window.signals(
        host.catalogue,
        life,
        host.budget,
        horizon=torch.tensor([host.horizon or ENDLESS]),
        classes=memory.known_classes,
        draws=uniform(stream, "decision", life.epoch, len(host.space)),
    )
    starts = flag(memory.controller is not controller)
    memory.controller = controller
    return controller.act(signals, host.legal(), starts)


def _flow(host: "GrowingModel") -> Tensor:
    with measuring(host):  # every process has a sample of its own
        return shared(host, slot_flow(host))


def describe(host: "GrowingModel", actions: Actions) -> str:
    """One decision in words."""
    op = LifecycleOp(int(actions["op"]))
    if op is LifecycleOp.WAIT:
        return "wait"
    slot = host.catalogue.slots.names[int(actions["slot"])]
    if op is LifecycleOp.GERMINATE:
        blueprint = host.catalogue.names[int(actions["blueprint"])]
        return f"plant {blueprint} at {slot} ({Blend(int(actions['blend'])).name.lower()})"
    verb = {
        LifecycleOp.ADVANCE: "blend in",
        LifecycleOp.FOSSILIZE: "keep",
        LifecycleOp.PRUNE: "prune",
    }[op]
    return f"{verb} {host.seed_slots[slot].seed.blueprint} at {slot}"  # type: ignore[union-attr]


def _event(host: "GrowingModel", record: TransitionRecord) -> str:
    slot = host.catalogue.slots.names[record.slot]
    return f"{slot}: {record.before.name} -> {record.after.name} ({record.cause})"
