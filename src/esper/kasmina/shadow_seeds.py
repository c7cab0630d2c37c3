"""Shadows of a model with slots: seeds that learn beside it, in passes of their own.

The model never sees them: its weights, buffers, gradients, optimiser and random numbers are the
same to the bit with and without. Each learns with an optimiser of its own, of the model's kind and
at its rates, from `h + g(h)` with everything else frozen.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina import optimizer_surgery as surgery
from esper.kasmina.blueprints import learning_rate_scales
from esper.kasmina.slot import Seed
from esper.kasmina.watching import call
from esper.leyline.shadows import MEASURED, AuditionPlan, ShadowReadings
from esper.leyline.streams import derive_seed

if TYPE_CHECKING:
    from esper.kasmina.slotted import SlottedModel

Losses = Callable[[nn.Module], Tensor]
CHECKED = 1 / 8  # samples that they are measured on, over those of an epoch, at most
STEP = 3.0  # forward passes that a training step costs
UNCOUNTED = 2 / 3  # cost of a shadow's step where FLOPs cannot be counted: forward and back


COUNTS = ("share", "seen", "learned", "batches", "passes", "flops")  # that are saved


class ShadowKey(NamedTuple):
    slot: int
    blueprint: int


@dataclass
class Shadow:
    """One candidate: its seed, its optimiser, and what was seen since it was last measured."""

    seed: Seed
    epochs: float = 0.0  # passes over the training data that it has learned from
    optimizer: Optimizer | None = None  # made when it first learns
    kept: Any = None  # the optimiser's state from a checkpoint, until it is made
    gains: list[Tensor] = field(default_factory=list)  # on training batches
    squares: list[Tensor] = field(default_factory=list)  # of the gradient's norm

    def learn(self, like: Optimizer, rate: float, base: Tensor, value: Tensor) -> None:
        """One step at this share of the rate, from this loss; the model alone had `base`."""
        optimizer = self.equip(like)
        for mine, other in zip(optimizer.param_groups, like.param_groups, strict=True):
            mine["lr"] = rate * other["lr"]
        optimizer.zero_grad()
        value.backward()
        gradients = [each.grad for each in self.seed.parameters() if each.grad is not None]
        self.squares.append(get_total_norm(gradients).float().square())
        self.gains.append((base - value.detach()).float())
        optimizer.step()

    def revived(self, like: Optimizer) -> tuple[Optimizer, Any]:
        """Its optimiser, and the state that this is to be given."""
        kept, self.kept = self.kept, None
        return self.equip(like), kept

    def seen(self) -> dict[str, Tensor]:
        """What was seen since it was last measured."""
        found = {"gains": self.gains, "squares": self.squares}
        return {name: torch.stack(each) for name, each in found.items() if each}

    def go_on(self, gains: Tensor | None = None, squares: Tensor | None = None) -> None:
        device = next(self.seed.parameters()).device
        self.gains = [] if gains is None else list(gains.to(device))
        self.squares = [] if squares is None else list(squares.to(device))

    def equip(self, like: Optimizer) -> Optimizer:
        """Its optimiser, made like this one when it is first needed."""
        if self.optimizer is None:
            self.optimizer = _twin(like, self.seed)
        return self.optimizer

    def pass_on(self, seed: Seed, optimizers: Sequence[Optimizer]) -> None:
        """Let a newborn of the same kind be what this one has become."""
        seed.body.load_state_dict(self.seed.body.state_dict())
        pairs = list(zip(seed.body.parameters(), self.seed.body.parameters(), strict=True))
        for optimizer in optimizers:
            for mine, shadows in pairs:
                if self.optimizer is not None and shadows in self.optimizer.state:
                    optimizer.state[mine] = self.optimizer.state[shadows]


def _twin(optimizer: Optimizer, seed: Seed) -> Optimizer:
    """An optimiser of the same kind and settings, for the seed alone."""
    twin = copy.copy(optimizer)
    groups = [
        {**group, **{key: [] for key in ("params", "param_names") if key in group}}
        for group in optimizer.param_groups
    ]
    vars(twin).update(state=defaultdict(dict), param_groups=groups)
    surgery.add_parameters(twin, dict(seed.named_parameters()), learning_rate_scales(seed))
    return twin


class Shadows:
    """All shadows of one host, and what they showed."""

    def __init__(self) -> None:
        self.living: dict[ShadowKey, Shadow] = {}
        self.readings: ShadowReadings | None = None  # None: nothing was ever asked for
        self.share = 0.0  # of the epoch's batches that they learn from
        self.seen = self.learned = 0  # batches of this epoch
        self.batches = 0  # of an epoch, as far as is known
        self.passes = 0  # in all: their random numbers depend on it
        self.flops = 0.0  # of this epoch, with measuring, over those of the host's own

    def __bool__(self) -> bool:
        return bool(self.living)

    def open(self, host: "SlottedModel", sample: Any) -> ShadowReadings:
        """What they have shown; before the first of them, what each would cost."""
        if self.readings is None:
            self.readings = ShadowReadings.none(1, *shadow_costs(host, sample))
        return self.readings

    def end(self) -> None:
        self.living = {}

    def restore(
        self,
        living: dict[ShadowKey, Shadow],
        readings: ShadowReadings | None,
        counts: Mapping[str, Any],
    ) -> None:
        """Go on from what was saved; `counts` by the names of `COUNTS`."""
        self.living, self.readings = living, readings
        for name in COUNTS:
            setattr(self, name, counts[name])

    def adopt(self, host: "SlottedModel", plan: AuditionPlan, batches: int) -> None:
        """For the coming epoch of so many batches: newborns join, and all that the plan leaves out
        are given up.
        """
        self.batches = batches
        free = ~host.lifecycle.occupied[0]
        wanted = (plan.where[0] & free[:, None]).nonzero().tolist()
        keys = [ShadowKey(*each) for each in wanted]
        self.living = {key: self.living.get(key) or Shadow(host.shadow_seed(*key)) for key in keys}
        self.share, self.seen, self.learned = float(plan.share[0]), 0, 0
        assert self.readings is not None
        costs = self.share * self.readings.cost[0] + self.readings.check[0]
        alone = (self.share + CHECKED) / STEP  # what they are compared with
        self.flops = alone + sum(float(costs[key]) for key in keys) if keys else 0.0

    def learn(self, host: "SlottedModel", loss: Callable[[], Tensor]) -> None:
        """From one batch, if it is among their share; `loss` runs the model and returns its."""
        turn = math.floor((self.seen + 1) * self.share) > math.floor(self.seen * self.share)
        self.seen += 1
        if not turn:
            return
        # Down to nothing over the epoch: at a constant rate their weights would be noisier than
        # what they would become, and what they show with them.
        rate = 1.0 - min(self.learned / max(self.share * self.batches, 1.0), 1.0)
        self.learned += 1
        self.passes += 1
        stream = derive_seed(host.seed, "shadow pass", self.passes)
        with host.beside(stream):
            with torch.no_grad():
                base = loss().detach()
            for key, shadow in self.living.items():
                with host.trying(key.slot, shadow.seed, stream):
                    shadow.learn(host.optimizers[0], rate, base, loss())

    def measure(
        self,
        host: "SlottedModel",
        losses: Losses,
        relative: Callable[[float], float],
        host_gradient: float,
    ) -> None:
        """After an epoch, where the model is measured: `losses` gives one for each sample, which
        `relative` turns into the unit of readings.
        """
        if not self.living or not self.learned or self.readings is None:
            return
        with _batch_statistics(host):
            self._compare(host, losses, relative, host_gradient, self.readings)

    def _compare(
        self,
        host: "SlottedModel",
        losses: Losses,
        relative: Callable[[float], float],
        host_gradient: float,
        readings: ShadowReadings,
    ) -> None:
        base = losses(host).detach().double()
        shape = readings.epochs.shape
        found = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in MEASURED}
        del found["slope"]
        epochs, where = readings.epochs.clone(), torch.zeros(shape, dtype=torch.bool)
        for key, shadow in self.living.items():
            with host.trying(key.slot, shadow.seed):
                better = base - losses(host).detach().double()
            shadow.epochs += self.learned / self.seen
            place = (0, *key)
            epochs[place], where[place] = shadow.epochs, True
            figures = {
                "gain": better.mean(),
                "error": better.std() / math.sqrt(max(len(better), 1)),
                "train_gain": torch.stack(shadow.gains).mean(),
            }
            for name, figure in figures.items():
                found[name][place] = relative(float(figure))
            norm = float(torch.stack(shadow.squares).mean().sqrt())
            found["gradient"][place] = norm / host_gradient
            shadow.gains, shadow.squares = [], []
        self.readings = readings.updated(where, epochs, **found)

    def take(self, key: ShadowKey) -> Shadow | None:
        """The shadow there, to be planted with what it has learned; the slot's others go."""
        chosen = self.living.pop(key, None)
        self.living = {each: one for each, one in self.living.items() if each.slot != key.slot}
        return chosen


@contextmanager
def _batch_statistics(host: nn.Module) -> Iterator[None]:
    """Inside, batch normalisation goes by the batch: averages over past batches are of the model
    alone, and say nothing of what passes when a shadow is on.
    """
    norms = [each for each in host.modules() if isinstance(each, _BatchNorm) and not each.training]
    try:
        for norm in norms:
            norm.training = True
        yield
    finally:
        for norm in norms:
            norm.training = False


def shadow_costs(host: "SlottedModel", sample: Any) -> tuple[Tensor, Tensor]:
    """[S, P] each, NaN where none fits: FLOPs of a shadow's epoch over those of the model's own,
    and of measuring it once.

    A step of a shadow is forward through the whole model, and back to the slot.
    """
    costs = torch.full((len(host.specs), len(host.catalogue.names)), torch.nan, dtype=torch.float64)
    checks = costs.clone()
    try:
        with host.beside(0), torch.no_grad():
            whole = STEP * _counted(lambda: call(host, sample))
    except Exception:  # the counter cannot follow all code, and no run fails for that
        whole = 0.0
    for slot, row in enumerate(host.catalogue.costs):
        for blueprint, cost in enumerate(row):
            if cost < 0:
                continue
            step, forward = UNCOUNTED, 1 / STEP
            if whole > 0.0:
                with host.beside(0), host.trying(slot, host.shadow_seed(slot, blueprint)):
                    with torch.no_grad():
                        forward = _counted(lambda: call(host, sample)) / whole
                    step = _counted(lambda: _back(call(host, sample))) / whole
            costs[slot, blueprint], checks[slot, blueprint] = step, CHECKED * forward
    return costs, checks


def _counted(run: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def _back(outputs: object) -> None:
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    total = [leaf.float().sum() for leaf in leaves if leaf.requires_grad]
    if total:
        torch.stack(total).sum().backward()
