"""What the callbacks share: a model that carries what grows in it, so that a framework finds it.

Seeds live in a submodule `esper` of the model that the framework trains. Thereby they have all that
the model's own parts have: modes, devices, clipping, zeroed gradients, and a place in checkpoints.
The framework's optimiser is made before seeds are there and loaded before they are back, so its
saved state is that of the model alone; what concerns seeds is kept in `esper` too.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from esper.api import Budget, GrowingModel, Tick, score_of_loss
from esper.api.grow_settings import AUTO, OWN_LOOP, BudgetLike
from esper.api.growing_model import StepWatch
from esper.api.host_state import placed, read, written
from esper.api.inspection import Slots
from esper.api.ticking import SAME_SCORE, Evaluate, measuring, number
from esper.archive import packed, unpacked
from esper.kasmina import GateRules
from esper.kasmina.isolation import randomness_kept
from esper.kasmina.optimizer_surgery import SCALE_KEY, remove_parameters
from esper.kasmina.probe import Sample
from esper.leyline.constants import GATE_LEARNING_RATE_SCALE
from esper.leyline.errors import EsperError, require_known
from esper.leyline.slots import require_agreement
from esper.tamiyo.controllers import Controller

NAME = "esper"  # of the submodule
_NOTES, _KEPT = "notes", "optimizer"
_WRAPS = ("slots", "budget", "blueprints", "rules", "classes", "seed")  # settings of `esper.wrap`
# Lower is better; short ones are words of their own, unlike those in "answer" and "cancer".
_LOSSES = re.compile("loss|error|perplexity|mse|mae|(?<![a-z])(nll|ppl|wer|cer)(?![a-z])")
# What schedulers keep for every group: learning rates, and what is the same for gates.
_RATES = ("base_lrs", "_last_lr", "max_lrs", "min_lrs")
_ALIKE = ("lr_lambdas", "base_momentums", "max_momentums")
_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")

log = logging.getLogger("esper")


class IntegrationError(EsperError):
    """A training loop of another library in which nothing can grow as asked."""


@dataclass(frozen=True)
class CallbackSettings:
    """What a callback is asked for; the words are those of `esper.wrap` and `esper.grow`."""

    monitor: str
    mode: Literal["min", "max"] | None = None  # None: "min" if its name says that it is a loss
    percent: bool = False  # is a score in percent? else it is a fraction of 1
    budget: BudgetLike = None
    slots: Slots = AUTO
    blueprints: Sequence[str] | None = None
    controller: Controller | str | Path = OWN_LOOP
    sample: Sample | None = None
    evaluate: Evaluate | None = None
    rules: GateRules | None = None
    classes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode is not None:
            require_known("mode", self.mode, ("min", "max"))

    @property
    def lower_is_better(self) -> bool:
        if self.mode is None:
            return _LOSSES.search(self.monitor.lower()) is not None
        return self.mode == "min"


class Attachment(nn.Module):
    """The submodule `esper`: seeds, and all that growing goes on from, as tensors.

    Until the model was seen on a batch there are no slots; what is loaded then waits.
    """

    host: "AttachedHost | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, Tensor] = {}
        self.first_loss: float | None = None  # monitored, the first one
        self.losses: list[Tensor | float] = [0.0, 0]  # of training since the last tick: sum, number

    def forward(self, h: Tensor) -> Tensor:
        return h  # for a container that runs all its parts

    def hold(self, host: "AttachedHost") -> None:
        self.slots = host.slots
        vars(self)["host"] = host  # not as torch would, since it is no part of this

    def recover(self) -> None:
        """Load what waits, now that there are slots."""
        try:
            # Frameworks validate in inference mode, whose tensors could never be trained.
            with torch.inference_mode(False):
                if self.waiting:
                    self.load_state_dict(self.waiting)
        except (EsperError, RuntimeError, LookupError) as error:
            raise IntegrationError(
                "What grew cannot be put back into this model",
                given=" ".join(str(error).split()),
                fix="use the model, slots and blueprints that the checkpoint was made with",
            ) from error
        self.waiting = {}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        host = self.host
        if host is None:
            destination.update({prefix + name: value for name, value in self.waiting.items()})
            return
        host._save_to_state_dict(destination, prefix, keep_vars)
        total, count = self.losses
        notes: dict[str, Any] = {"losses": [float(total), count], "first_loss": self.first_loss}
        notes |= {"slots": [spec.name for spec in host.specs], "part": host.part}
        tensors: dict[str, Tensor] = {}
        notes["optimizer"] = packed(host.pack_seeds(), tensors, of="The optimiser", where=_KEPT)
        destination.update({f"{prefix}{name}": each for name, each in tensors.items()})
        destination[prefix + _NOTES] = written(notes)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        saved = [name for name in state_dict if name.startswith(prefix)]
        host = self.host
        if host is None or not host.optimizers:  # loaded again when there is one
            self.waiting = {name.removeprefix(prefix): state_dict[name].clone() for name in saved}
        if host is None or not saved:
            for name in saved:
                del state_dict[name]
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            return
        notes, start = read(state_dict.pop(prefix + _NOTES)), f"{prefix}{_KEPT}."
        slots = [spec.name for spec in host.specs]
        require_agreement("slots", ("model", slots), ("checkpoint", notes["slots"]))
        kept = {n.removeprefix(prefix): state_dict.pop(n) for n in saved if n.startswith(start)}
        host._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        host.unpack_seeds(unpacked(notes["optimizer"], kept))
        self.losses, self.first_loss = list(notes["losses"]), notes["first_loss"]


def attach(model: nn.Module) -> Attachment:
    """The model's submodule `esper`, which is made if there is none."""
    if not hasattr(model, NAME):
        model.add_module(NAME, Attachment())
    found = getattr(model, NAME)
    if not isinstance(found, Attachment):
        raise IntegrationError(
            f"The model has something of its own by the name of {NAME!r}",
            given=type(found).__name__,
            fix="rename it: seeds are kept there",
        )
    return found


class AttachedHost(GrowingModel):
    """A host whose seeds are in the submodule `esper` of the model that a framework trains."""

    def __init__(self, whole: nn.Module, part: nn.Module, sample: Sample, **settings: Any) -> None:
        """`whole`: what the optimiser trains; `part`: where seeds go, called with the sample."""
        super().__init__(part, sample, **settings)
        # The model's own parameters; those of seeds are among its parameters from now on.
        own = nn.ParameterList(part.parameters())
        # The framework says when an epoch is over; nobody can forget it.
        self.watch = StepWatch(own, self.watch.slots, warns=False)
        self.whole = whole
        self._bond.carry()
        self.part = next(name for name, each in whole.named_modules() if each is part)
        attach(whole).hold(self)

    def export(self, sample: Sample | None = None) -> nn.Module:
        """A plain copy of the committed network, without Esper; checked on a sample."""
        kept = self.whole._modules.pop(NAME)
        try:
            return super().export(sample)
        finally:
            self.whole._modules[NAME] = kept

    # --- the optimiser -------------------------------------------------------------------

    def join(self, optimizer: Optimizer, schedulers: Iterable[Any]) -> None:
        """Let seeds join a framework's optimiser, for which schedulers exist already."""
        if optimizer not in self.optimizers:
            self.optimizers.clear()
            self.leave(optimizer)
            _add_gate_group(optimizer, schedulers)
            self._let_seeds_join(optimizer)
            self.track(optimizer)
            optimizer.register_state_dict_post_hook(self._without_seeds)

    def leave(self, optimizer: Optimizer) -> None:
        """Take out seeds that it holds because it was made of a model that has grown."""
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        seeds = {n: p for n, p in self.slots.named_parameters() if id(p) in held}
        remove_parameters(optimizer, seeds)

    def live_for(self, ticks: int | None, *, resumed: bool) -> None:
        """A training has so many; those before it count if it is resumed."""
        lived = int(self.lifecycle.epoch)
        self.horizon = ticks if ticks is None or resumed else lived + ticks
        self.memory.expect(lived, self.horizon)

    def _without_seeds(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """What the optimiser saves: by position, of the model's own parameters."""
        seeds = {id(parameter) for parameter in self.slots.parameters()}
        order = [each for group in optimizer.param_groups for each in group["params"]]
        own = [place for place, each in enumerate(order) if id(each) not in seeds]
        places = {place: new for new, place in enumerate(own)}
        groups = []
        for group in (each for each in state["param_groups"] if SCALE_KEY not in each):
            stay = [index for index, place in enumerate(group["params"]) if place in places]
            named = {k: [group[k][i] for i in stay] for k in ("param_names",) if k in group}
            groups.append({**group, **named, "params": [places[group["params"][i]] for i in stay]})
        kept = {places[place]: each for place, each in state["state"].items() if place in places}
        return {**state, "state": kept, "param_groups": groups}

    def pack_seeds(self) -> list[dict[str, Any]]:
        """What the optimiser remembers of seeds, and the rates of their gates."""
        seeds, found = dict(self.slots.named_parameters()), []
        for optimizer in self.optimizers:
            group, known = _gate_group(optimizer), optimizer.state
            rates = {name: float(group[name]) for name in _GROUP_RATES if name in group}
            state = {name: dict(known[each]) for name, each in seeds.items() if each in known}
            found.append({"state": state, "rates": rates})
        return found

    def unpack_seeds(self, found: Sequence[Mapping[str, Any]]) -> None:
        seeds = dict(self.slots.named_parameters())
        for optimizer, kept in zip(self.optimizers, found, strict=False):
            group = _gate_group(optimizer)
            group.update(kept["rates"])
            for name, values in kept["state"].items():
                optimizer.state[seeds[name]].update(placed(values, seeds[name], group))


def _gate_group(optimizer: Optimizer) -> dict[str, Any]:
    return next(each for each in optimizer.param_groups if SCALE_KEY in each)


def _add_gate_group(optimizer: Optimizer, schedulers: Iterable[Any]) -> None:
    """A group for gates, which learn faster, and an entry for it in what schedulers keep."""
    groups, scale = optimizer.param_groups, GATE_LEARNING_RATE_SCALE
    model, before = groups[0], len(groups)
    empty: dict[str, Any] = {key: [] for key in ("params", "param_names") if key in model}
    rates = {name: model[name] * scale for name in _GROUP_RATES if name in model}
    groups.append({**model, **empty, **rates, SCALE_KEY: scale})
    pending = list(schedulers)
    while pending:
        scheduler = pending.pop()
        pending += getattr(scheduler, "_schedulers", ())
        for name in (*_RATES, *_ALIKE):
            each = getattr(scheduler, name, None)
            if isinstance(each, list) and len(each) == before:  # else it was loaded with the entry
                each.append(each[0] * scale if name in _RATES else _alike(each[0]))


def _alike(value: Any) -> Any:
    """The same for one more group. Schedulers save what is callable unless it is a function."""
    return (lambda epoch: value(epoch)) if callable(value) else value


# --- what a callback does ------------------------------------------------------------------


class GrowingCallback:
    """One model that grows in a framework's loop, whose callbacks tell what happens there.

    `host` is the growing model, `host.export()` a plain one, `ticks` what happened.
    """

    def __init__(self, monitor: str, **settings: Any) -> None:
        self._settings = CallbackSettings(monitor, **settings)
        self._growth = Attachment()  # of no model yet
        self.ticks: list[Tick] = []

    @property
    def host(self) -> AttachedHost:
        if self._growth.host is None:
            raise IntegrationError(
                "Nothing grows yet",
                given="a callback whose training has not begun",
                fix="ask for it when the trainer has begun to train",
            )
        return self._growth.host

    def _begin(self, whole: nn.Module, part: nn.Module, sample: Sample) -> None:
        """Put slots into the model."""
        same = {name: getattr(self._settings, name) for name in _WRAPS}
        with torch.inference_mode(False):
            AttachedHost(whole, part, on_device(sample, whole), **same)

    def _train(
        self, optimizer: Optimizer, schedulers: Iterable[Any], *, measured: bool, ticks: int | None,
        resumed: bool,
    ) -> None:  # fmt: skip
        """Seeds learn with this optimiser from now on, for so many ticks if that is known."""
        host, asked = self.host, self._settings
        host.join(optimizer, schedulers)
        self._growth.recover()
        if Budget.of(asked.budget).epochs is None:
            host.live_for(ticks, resumed=resumed)
        measured = measured or asked.evaluate is not None
        host.require_controller(asked.controller, measured=measured)

    def _saw_loss(self, loss: object) -> None:
        if isinstance(loss, Tensor):
            total, count = self._growth.losses
            self._growth.losses = [total + loss.detach().float().mean(), count + 1]

    def _score(self, value: float) -> float:
        """The monitored quantity in percent, higher is better."""
        asked, growth = self._settings, self._growth
        found = number(asked.monitor, value)
        if asked.lower_is_better:
            if growth.first_loss is None:
                growth.first_loss = found
            return score_of_loss(found, growth.first_loss)
        if asked.percent:
            return found
        if found > 1.0:
            raise IntegrationError(
                f"{asked.monitor} is more than a whole",
                given=f"{found:g}",
                fix="say percent=True if it is in percent, or mode='min' if it is a loss",
            )
        return 100.0 * found

    def _tick(self, value: float, again: Callable[[], float] | None) -> None:
        """An epoch is over: `value` was monitored, `again` measures it of the model as it is."""
        host, growth, asked = self.host, self._growth, self._settings
        if host.memory.ended or not host.watch.steps:
            return
        told, evaluate = None, asked.evaluate
        if evaluate is None:
            told = self._score(value)
            evaluate = None if again is None else self._compared_to(value, again)
        total, count = growth.losses
        if not count and not asked.lower_is_better:
            raise IntegrationError(
                "No loss of training was seen", fix="return it from the training step"
            )
        with torch.inference_mode(False), torch.no_grad():
            train_loss = float(total) / int(count) if count else value
            done = host.tick(asked.controller, train_loss=train_loss, val_score=told,
                             evaluate=evaluate)  # fmt: skip
        growth.losses = [0.0, 0]
        self.ticks.append(done)
        log.info("%s: %s, +%d parameters", done.epoch, done.decision, done.added)

    def _compared_to(self, value: float, again: Callable[[], float]) -> Evaluate:
        """Scores the model by measuring again, in units of what was monitored of it as it is.

        How a framework takes the mean of a loss is its own affair; other scores must be the same.
        """
        if not bool((self.host.lifecycle.alpha > 0.0).any()):
            return lambda _: self._score(again())
        with measuring(self.host):
            found = again()
        unit = value / found if found and self._settings.lower_is_better else 1.0
        if abs(self._score(found * unit) - self._score(value)) > SAME_SCORE:
            raise IntegrationError(
                f"{self._settings.monitor} is another one when it is measured again, so what seeds "
                "contribute cannot be known",
                given=f"{value:g} and {found:g}",
                fix="pass evaluate=, a function that scores the model in percent",
            )
        return lambda _: self._score(again() * unit)

    def _end(self) -> None:
        """Training is over: take out what is not permanent."""
        if self._growth.host is not None and not self.host.memory.ended:
            self.host.finish()


def on_device(sample: Sample, model: nn.Module) -> Any:
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return tree_map_only(Tensor, lambda each: each.detach().to(device, copy=True), sample)


def first_batch(loader: Any) -> Any:
    """A batch to look at; random numbers are left as they were, also a loader's own."""
    parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    found = [getattr(each, "generator", None) for each in parts]
    own = [(each, each.get_state()) for each in found if isinstance(each, torch.Generator)]
    with randomness_kept():
        batch = next(iter(loader), None)
    for generator, state in own:
        generator.set_state(state)
    if batch is None or isinstance(loader, (Mapping, list, tuple)):
        raise IntegrationError(
            "The training data has no first batch to look at",
            given=type(loader).__name__,
            fix="pass sample=, what the model is given",
        )
    return batch


def grown(model: nn.Module, state: Mapping[str, Tensor], sample: Sample) -> GrowingModel:
    """A model with what grew in it, from a framework's checkpoint of the model's state.

    `model` is built as it was for training, `state` holds its weights and, below `esper.`, what
    grew. `export()` of the result is a plain module.
    """
    packed = state.get(f"{NAME}.{_NOTES}")
    if packed is None:
        raise IntegrationError(
            "This state holds nothing that grew",
            given=f"no {NAME}.{_NOTES}",
            fix="take the state that was saved while EsperCallback was there",
        )
    notes, growth = read(packed), attach(model)
    told = model.load_state_dict(dict(state), strict=False)
    weights = model.state_dict()
    loaded = {each.data_ptr() for name, each in weights.items() if name in state}
    # Weights that are tied are saved once.
    missing = [name for name in told.missing_keys if weights[name].data_ptr() not in loaded]
    if missing or told.unexpected_keys:
        raise IntegrationError(
            "The state is of another model",
            given=", ".join([*missing, *told.unexpected_keys][:3]),
            fix="build the model as it was built for training",
        )
    host = AttachedHost(model, model.get_submodule(notes["part"]), sample, slots=notes["slots"])
    growth.recover()
    return host
