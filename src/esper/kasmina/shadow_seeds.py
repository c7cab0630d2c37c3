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
from functools import partial
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
from esper.leyline.constants import TRAINING_PASSES as STEP
from esper.leyline.errors import DataError, OptimizerMismatchError, first_line
from esper.leyline.shadows import MEASURED, AuditionPlan, ShadowReadings
from esper.leyline.streams import derive_seed

if TYPE_CHECKING:
    from esper.kasmina.slotted import SlottedModel

Losses = Callable[[nn.Module], Tensor]
PartLoss = Callable[[float], Tensor]  # of a share of a batch
Rescale = Callable[[float], float]
Agree = Callable[[list[Tensor]], None]
Counts = Mapping[str, Any]
CHECKED = 1 / 2  # samples that they are measured on, over those that they learn from in an epoch
PART = 1 / 8  # of a batch: many steps on few samples teach more than few steps on many
UNCOUNTED = 2 / 3  # cost of a shadow's step where FLOPs cannot be counted: forward and back
_NUMBERS = (int, float, str, type(None))
COUNTS = ("share", "seen", "learned", "owed", "batches", "passes", "flops")  # that are saved


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

    def learn(
        self, like: Optimizer, rate: float, base: Tensor, value: Tensor, scale: float, agree: Agree
    ) -> None:
        """One step at this share of the rate, from this loss; the model alone had `base`. Gradients
        go back times `scale`, so that half precision does not lose them, and all processes `agree`.
        """
        optimizer = self.equip(like)
        for mine, other in zip(optimizer.param_groups, like.param_groups, strict=True):
            mine["lr"] = rate * other["lr"]
        optimizer.zero_grad()
        if value.requires_grad:  # else nothing from its place reaches the loss
            (value if scale == 1.0 else value * scale).backward()
        gradients = [each.grad for each in self.seed.parameters() if each.grad is not None]
        agree(gradients)
        if scale != 1.0:  # a step whose gradients overflow is left out, as a scaler does it
            finite = all(bool(each.div_(scale).isfinite().all()) for each in gradients)
            gradients = gradients if finite else []
        self.squares.append(get_total_norm(gradients).to(base.device, torch.float32).square())
        self.gains.append((base - value.detach()).float())
        try:
            if gradients:
                optimizer.step()
        except (AttributeError, KeyError) as error:
            what = "Shadows cannot learn with this optimiser, which keeps more than numbers"
            given = f"{type(optimizer).__name__}: {first_line(error)}"
            fix = "take one of torch's, or another controller, such as 'heuristic'"
            raise OptimizerMismatchError(what, given=given, fix=fix) from error

    def equip(self, like: Optimizer) -> Optimizer:
        """Its optimiser, made when it is first needed, or when the model's is another."""
        mine, groups = self.optimizer, len(like.param_groups)
        if mine is None or type(mine) is not type(like) or len(mine.param_groups) != groups:
            mine = self.optimizer = _twin(like, self.seed)
        return mine

    def pass_on(self, seed: Seed, optimizers: Sequence[Optimizer]) -> None:
        """Let a newborn of the same kind be what this one has become."""
        seed.body.load_state_dict(self.seed.body.state_dict())
        pairs = zip(seed.body.parameters(), self.seed.body.parameters(), strict=True)
        for optimizer in optimizers[:1]:  # which its own is like
            known = self.equip(optimizer).state
            optimizer.state.update({mine: known[its] for mine, its in pairs if its in known})


def _twin(like: Optimizer, seed: Seed) -> Optimizer:
    """An optimiser of the same kind and settings, for the seed alone."""
    twin = copy.copy(like)  # which leaves out all that a kind of the user's keeps
    lists = ("params", "param_names")
    groups = [{**each, **{k: [] for k in lists if k in each}} for each in like.param_groups]
    numbers = {name: each for name, each in vars(like).items() if isinstance(each, _NUMBERS)}
    vars(twin).update(numbers, state=defaultdict(dict), param_groups=copy.deepcopy(groups))
    surgery.add_parameters(twin, dict(seed.named_parameters()), learning_rate_scales(seed))
    return twin


class Shadows:
    """All shadows of one host, and what they showed."""

    def __init__(self, agree: Agree = lambda gradients: None) -> None:
        self.agree = agree  # of processes that train copies of the host, on one gradient
        self.living: dict[ShadowKey, Shadow] = {}
        self.readings: ShadowReadings | None = None  # None: nothing was ever asked for
        self.share = 0.0  # of the epoch's samples that they learn from
        self.seen, self.learned = 0, 0.0  # batches of this epoch
        self.owed = 0.0  # of a batch, from epochs with less than one for them
        self.batches = 0  # of an epoch, as far as is known
        self.passes = 0  # in all: their random numbers depend on it
        self.flops = 0.0  # of this epoch, with measuring, over those of the host's own

    def __bool__(self) -> bool:
        return bool(self.living)

    def open(self, host: "SlottedModel", sample: Any) -> ShadowReadings:
        """What they have shown; before the first of them, what each would cost."""
        if self.readings is None:
            self.readings = ShadowReadings.none(1, shadow_costs(host, sample))
        return self.readings

    def end(self) -> None:
        self.living, self.seen, self.learned = {}, 0, 0.0

    def restore(
        self, living: dict[ShadowKey, Shadow], readings: ShadowReadings | None, counts: Counts
    ) -> None:
        """Go on from what was saved; `counts` by the names of `COUNTS`."""
        self.living, self.readings = living, readings
        for name in COUNTS:
            setattr(self, name, counts[name])

    def adopt(self, host: "SlottedModel", plan: AuditionPlan, batches: int) -> None:
        """For an epoch of so many batches: newborns join, what the plan leaves out is given up."""
        self.batches = batches
        wanted = plan.where[0] & ~host.lifecycle.occupied[0][:, None]
        keys = [ShadowKey(*each) for each in wanted.nonzero().tolist()]
        self.living = {key: self.living.get(key) or Shadow(host.shadow_seed(*key)) for key in keys}
        self.share, self.seen, self.learned = float(plan.share[0]), 0, 0.0
        assert self.readings is not None
        alone = (1.0 + CHECKED) / STEP  # what they are compared with
        costs = alone + sum(float(self.readings.cost[0][key]) for key in keys)
        self.flops = self.share * costs if keys else 0.0

    def learn(
        self,
        host: "SlottedModel",
        loss: Callable[[], Tensor],
        part: PartLoss | None = None,
        scale: float = 1.0,
    ) -> None:
        """From one batch, if it is its turn; `loss` runs the model and returns its, `part` that of
        a share of the batch: a part of many batches, where nothing goes by whole ones.
        """
        if not self.living:
            self.seen += 1
            return
        whole = part is None or any(isinstance(each, _BatchNorm) for each in host.modules())
        size = 1.0 if whole else min(max(self.share, PART), 1.0)
        self.seen, self.owed = self.seen + 1, self.owed + self.share
        if self.owed < size - 1e-9:
            return
        self.owed -= size
        if part is not None and size < 1.0:
            loss = partial(part, size)
        # Down to nothing over the epoch: at a constant rate their weights would be noisier than
        # what they would become, and what they show with them.
        rate = 1.0 - min(self.learned / max(self.share * self.batches, size), 1.0)
        self.learned, self.passes = self.learned + size, self.passes + 1
        stream = derive_seed(host.seed, "shadow pass", self.passes)
        with host.beside(stream):
            with torch.no_grad():
                base = loss().detach()
            for key, shadow in self.living.items():
                with host.trying(key.slot, shadow.seed, stream):
                    shadow.learn(host.optimizers[0], rate, base, loss(), scale, self.agree)

    def measure(
        self,
        host: "SlottedModel",
        losses: Losses,
        relative: Rescale,
        host_gradient: float,
        mean: Callable[[Tensor], Tensor] = lambda figures: figures,
    ) -> None:
        """After an epoch, where the model is measured: `losses` gives one for each sample, which
        `relative` turns into the unit of readings. `mean` is that over processes.
        """
        readings = self.readings
        if not self.living or not self.learned or readings is None:
            return
        with _batch_statistics(host):
            base, gains = _of_samples(losses, host), {}
            for key, shadow in self.living.items():
                with host.trying(key.slot, shadow.seed):
                    gains[key] = base - _of_samples(losses, host)
        shape = readings.epochs.shape
        found = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in MEASURED}
        del found["slope"]
        epochs, where = readings.epochs.clone(), torch.zeros(shape, dtype=torch.bool)
        for key, shadow in self.living.items():
            shadow.epochs += self.learned / self.seen
            place, better = (0, *key), gains[key]
            epochs[place], where[place] = shadow.epochs, True
            figures = {
                "gain": better.mean(),
                "error": better.std() / math.sqrt(len(better)) if len(better) > 1 else math.nan,
                "train_gain": torch.stack(shadow.gains).mean(),
            }
            for name, figure in figures.items():
                found[name][place] = relative(float(figure))
            norm = float(torch.stack(shadow.squares).mean().sqrt())
            found["gradient"][place] = norm / (host_gradient or math.nan)
            shadow.gains, shadow.squares = [], []
        alike = {name: mean(figures) for name, figures in found.items()}
        self.readings = readings.updated(where, epochs, **alike)

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

    def go_by_batch(norm: nn.Module, inputs: tuple[Any, ...]) -> None:  # unless that is of one
        norm.training = all(each.numel() > each.shape[1] for each in inputs[:1])

    hooks = [norm.register_forward_pre_hook(go_by_batch) for norm in norms]
    try:
        yield
    finally:
        for norm, hook in zip(norms, hooks, strict=True):
            hook.remove()
            norm.training = False


def _of_samples(losses: Losses, host: nn.Module) -> Tensor:
    found = losses(host)
    if not isinstance(found, Tensor) or found.dim() != 1:
        what = "losses(model) must return the loss of every validation sample, a tensor [samples]"
        given = f"{type(found).__name__} {list(getattr(found, 'shape', ()))}"
        raise DataError(what, given=given, fix="take no mean of them: reduction='none'")
    return found.detach().double()


def shadow_costs(host: "SlottedModel", sample: Any) -> Tensor:
    """[S, P], NaN where none fits: FLOPs of a shadow's epoch over those of the model's own.

    A step of a shadow is forward through the whole model, and back to the slot; then it is
    measured.
    """
    costs = torch.full((len(host.specs), len(host.catalogue.names)), torch.nan, dtype=torch.float64)
    try:
        with host.beside(0), torch.no_grad():
            whole = STEP * counted(lambda: call(host, sample))
    except Exception:  # the counter cannot follow all code, and no run fails for that
        whole = 0
    for slot, row in enumerate(host.catalogue.costs):
        for blueprint, cost in enumerate(row):
            if cost < 0:
                continue
            step, forward = UNCOUNTED, 1 / STEP
            if whole > 0:
                with host.beside(0), host.trying(slot, host.shadow_seed(slot, blueprint)):
                    with torch.no_grad():
                        forward = counted(lambda: call(host, sample)) / whole
                    step = counted(lambda: run_back(call(host, sample))) / whole
            costs[slot, blueprint] = step + CHECKED * forward
    return costs


def counted(run: Callable[[], object]) -> int:
    """FLOPs of whatever this runs."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def run_back(outputs: object) -> None:
    """From all that a model returned, as far as anything learns from it."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    total = [leaf.float().sum() for leaf in leaves if leaf.requires_grad]
    if total:
        torch.stack(total).sum().backward()
