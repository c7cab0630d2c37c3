"""The rule `audition`: every seed that could be planted shows what it can do, the best are planted.

The host trains alone at first. Then shadows of all candidates train beside it: all of them for one
round, then the most promising ones for some more. Together they cost no more than a stated share of
the host's training.

A shadow learns beside a host that does not answer, and what speeds up its first epochs need not
help in the end. So where a host can be trained again from where the audition began (`Casting`), it
is: with those planted there together whose shadows gained most, up to now; if that is not ahead of
the host alone, with the most promising one by itself, by what seeds of its kind are worth elsewhere
and what its shadow showed. It goes on with what is ahead; else the host does, as if nothing had
been.

Elsewhere (`Audition`) those whose gain on validation data is certain are planted, the best of every
slot, with what they have learned. Where none is certain and the host still has much to learn, it
lacks no mechanism but capacity: the largest seed that fits is planted. What was planted is judged
by what it contributes, as every seed is.

Shapes: `N` environments, `S` slots, `P` blueprints.
"""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from esper.leyline import Actions, Blend, BlueprintCatalogue, Legality, LifecycleOp, Trait
from esper.leyline.constants import BY_HEART, CERTAIN, UNLEARNED
from esper.leyline.errors import EsperError
from esper.leyline.settings import Count, NotNegative, Positive, Share, Whole
from esper.leyline.shadows import AuditionPlan, ShadowReadings
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.proposals import (
    Proposal,
    epochs_to_permanence,
    first_legal,
    in_time,
    judged,
    open_plants,
    tended,
)
from esper.tamiyo.controllers.protocol import restarted
from esper.tamiyo.controllers.rules import relative_losses, require_first_in_time
from esper.tamiyo.controllers.schedules import plans_of
from esper.tamiyo.controllers.specs import Arm, RuleSettings

DOUBT = 2.0  # standard errors by which a gain is taken to be smaller than it seems
LARGE = 0.5  # of the largest seed that fits
AUDITION_OF = 0.4  # of the epochs of the whole training, at most
TRIED_OF = 0.3  # and where finalists are then trained for as long
TRIED_SPEND = 5 / 6  # of what shadows may cost, since tryouts cost as well
LEAST_SHARE = 0.02  # of an epoch's samples: what could train on less does not take part
FIRST_ROUND = 1 / 4  # of what may be spent: most are heard in it
FORGET = 0.5  # of what a shadow gained in earlier rounds, with every later one
SILENT, LOUDEST = 0.003, 30.0  # gain that says nothing of a seed, and how many of it count
LOUD = 0.6  # that ten times as much is worth, as a share of the best seed
LEAST_TRIED = 3  # epochs of the audition, for the best to be tried out
Cast = tuple[int, ...]  # numbers of seeds: of a slot's first blueprint, and so on
LISTENING: Cast = (-1,)
ALONE: Cast = ()


@dataclass(frozen=True, kw_only=True)
class AuditionConfig(RuleSettings):
    kind: ClassVar[str] = "audition"
    # The audition
    first: Count = 1  # epochs that the host trains alone
    rounds: Count = 7  # epochs of the audition, at most
    spend: Positive = 0.3  # FLOPs of shadows in all, over those of the host's training
    finalists: Count = 8  # that go on after the first round, of every kind as many
    # Where the host can be trained again
    tries: Whole = 4  # seeds that are tried out together; 0: none
    casts: Count = 2  # that are tried out, until one is ahead
    ahead: NotNegative = 0.001  # share of the host's validation loss that they must be better by
    # What is planted
    certain: NotNegative = CERTAIN  # gain over its standard error
    least: NotNegative = 0.003  # gain, in units of guessing
    seeds: Count = 3  # at most
    unlearned: Share = UNLEARNED  # training loss, over guessing, above which capacity may lack
    most_gap: float = BY_HEART  # validation minus training loss above which it does not
    # What is kept
    probation: Whole = 1  # epochs in HOLDING before a seed may be kept
    trial: Count = 3  # epochs in HOLDING after which one that is not worth it is pruned
    margin: float = 0.0  # points of contribution that a seed must be worth
    rent: float = 0.0  # and as many more per 100 % of the host's parameters


# Advises a network over tokens: one epoch of a shadow says little of what will come of its seed.
ATTENTIVE = AuditionConfig(rounds=20, spend=2.0)


@dataclass
class _Memory:
    """What the rule remembers of its rows."""

    going: Tensor  # [N, S, P] bool: shadows that are still in the race
    gain: Tensor  # [N, S, P] float64: of each, over its rounds
    spent: Tensor  # [N] float64: cost of shadows so far, in epochs of the host
    rounds: Tensor  # [N] int64: that are over
    large: Tensor  # [N] bool: to be planted, the largest newborn
    planted: Tensor  # [N] int64: how many were

    @classmethod
    def fresh(cls, hosts: int, slots: int, blueprints: int) -> "_Memory":
        none = torch.zeros(hosts, slots, blueprints, dtype=torch.bool)
        count = torch.zeros(hosts, dtype=torch.int64)
        gain = torch.full(none.shape, -math.inf, dtype=torch.float64)
        return cls(none, gain, count.double(), count, count.bool(), count.clone())


class Audition:
    """Plants what showed that it helps."""

    needs_contributions = True

    def __init__(self, config: AuditionConfig | None = None) -> None:
        self.config = config or AuditionConfig()
        self.lasts, self.spend = AUDITION_OF, self.config.spend
        self._memory: _Memory | None = None

    @property
    def name(self) -> str:
        return self.config.name

    def memory(self) -> dict[str, Tensor]:
        return {} if self._memory is None else dict(vars(self._memory))

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._memory = _Memory(**memory) if memory else None

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        needed = 1 + epochs_to_permanence(Blend.IMMEDIATE)
        require_first_in_time("audition", self.config.first, needed, horizon, earliest=1)

    def rounds(self, horizon: Tensor) -> Tensor:
        """[N]: fewer where there is little time."""
        return (self.lasts * horizon).ceil().long().clamp(1, self.config.rounds)

    def remember(self, signals: Signals, starts: Tensor) -> _Memory:
        """What is known of these rows, nothing of those that start; asked after every round."""
        shadows = self._readings(signals)
        fresh = vars(_Memory.fresh(*shadows.epochs.shape))
        last = {} if self._memory is None else vars(self._memory)
        memory = _Memory(
            **{name: restarted(last.get(name), blank, starts) for name, blank in fresh.items()}
        )
        now = memory.going & shadows.gain.isfinite()
        mixed = FORGET * shadows.gain + (1.0 - FORGET) * memory.gain
        mixed = torch.where(memory.gain.isfinite(), mixed, shadows.gain)
        memory.gain = torch.where(now, mixed, memory.gain)
        self._memory = memory
        return memory

    @property
    def remembered(self) -> _Memory:
        assert self._memory is not None  # it decides before it is asked
        return self._memory

    def heard(self, signals: Signals) -> Tensor:
        """[N] bool: is the audition over?"""
        return self.remembered.rounds >= self.rounds(signals.horizon)

    def best(self, signals: Signals, hopes: Tensor) -> tuple[Cast, ...]:
        """Of one host: those whose shadows gained most together; then alone who is hoped [S, P]
        most of."""
        gradient = self._readings(signals).gradient[0]
        # Where all that was heard is without one, no way leads to the loss.
        ways = (gradient.nan_to_num(0.0) != 0.0).any(1) | gradient.isnan().all(1)
        open_ = fitting(signals)[0] & (gradient != 0.0) & ways[:, None]
        order = _in_order(hopes, open_)
        together = self._together(signals, _in_order(self.remembered.gain[0], open_))
        alone = [(number,) for number in order if (number,) != together]
        return ((together,) * bool(together) + tuple(alone))[: self.config.casts]

    def _together(self, signals: Signals, order: list[int]) -> Cast:
        """Of those still in the race: the first of every kind, each in a slot of its own, as far as
        they fit; then more of the same kinds. What is silent alone need not be beside others.
        """
        sizes, going = signals.catalogue.total_costs[:, :, Blend.IMMEDIATE], self.remembered.going
        room, found = float(signals.budget[0]), dict[int, int]()  # by slot
        for again in (False, True):
            for number in order:
                slot, kind = divmod(number, going.shape[2])
                size = int(sizes[slot, kind])
                known = any(each % going.shape[2] == kind for each in found.values())
                fits = slot not in found and size <= room and known <= again
                if fits and going[0, slot, kind] and len(found) < self.config.tries:
                    found[slot], room = number, room - size
        return tuple(found.values())

    def hopes(self, signals: Signals) -> Tensor:
        """[S, P] of one host: what seeds are expected to be worth, as a share of the best one; of
        what was heard of them only that counts which is loud.
        """
        gains = self.remembered.gain[0].nan_to_num(0.0, neginf=0.0)
        loud = (gains / SILENT).clamp(1.0, LOUDEST).log10()
        return expected(signals.catalogue) + LOUD * loud

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        shadows, memory = self._readings(signals), self.remember(signals, starts)
        certain = self._certain(signals) & memory.going
        clear = self._clear(shadows, certain, memory.going)
        rounds = self.rounds(signals.horizon)
        memory.rounds = torch.where(clear, rounds, memory.rounds)
        heard = (memory.rounds >= rounds) & (memory.planted < self.config.seeds)
        first_time = heard & (memory.planted == 0)
        memory.large = torch.where(first_time, self._lacks_capacity(signals, certain), memory.large)
        score = shadows.bound(-DOUBT).clamp(min=-1e9)
        sizes = torch.tensor(signals.catalogue.costs).double().expand(score.shape)
        reaches = shadows.gradient != 0.0  # the loss
        open_ = open_plants(legality, Blend.IMMEDIATE) & reaches
        most = sizes.masked_fill(~open_, 0.0).flatten(1).amax(1)[:, None, None]
        capacity = memory.large[:, None, None]  # of seeds about as large, the most promising
        wanted = torch.where(capacity, open_ & (sizes >= LARGE * most), certain)
        slow = in_time(signals, epochs_to_permanence(Blend.RAMP)) & ~memory.large
        quick = in_time(signals, epochs_to_permanence(Blend.IMMEDIATE))
        plants = [
            self._plant(wanted, score, legality, heard & slow, Blend.RAMP),
            self._plant(wanted, score, legality, heard & quick, Blend.IMMEDIATE),
        ]
        actions = first_legal(legality, [*judged(signals, legality, self.config), *plants])
        memory.planted += (actions["op"] == LifecycleOp.GERMINATE).long()
        return actions

    def overruled(self, advised: Actions, done: Actions) -> None:
        """Something else was done than it said: count what was planted."""
        planted, meant = (each["op"] == LifecycleOp.GERMINATE for each in (done, advised))
        self.remembered.planted += planted.long() - meant.long()

    def audition(
        self, signals: Signals, legality: Legality, among: Tensor | None = None
    ) -> AuditionPlan:
        """The next round, for rows whose host has trained alone for long enough; of all that fits,
        or of those `among` [N, S, P].
        """
        config, shadows, memory = self.config, self._readings(signals), self.remembered
        life, open_ = signals.lifecycle, fitting(signals) if among is None else among
        begins = (memory.rounds == 0) & (life.epoch >= config.first)
        left = self.rounds(signals.horizon) - memory.rounds
        going = torch.where(begins[:, None, None], open_, memory.going & open_)
        later = (memory.rounds > 0) & (left > 0)
        best = _best_of_kinds(going, memory.gain, shadows.gradient, config.finalists)
        going = torch.where(later[:, None, None], best, going)
        going &= (left > 0)[:, None, None] | self._certain(signals)
        done = (left <= 0) & (memory.large | (memory.planted >= config.seeds))
        done |= ~in_time(signals, 1 + epochs_to_permanence(Blend.IMMEDIATE))  # to plant after it
        going &= ~done[:, None, None]
        purse = (self.spend * signals.horizon.double() - memory.spent).clamp(min=0.0)
        equal = purse / left.clamp(min=1)
        purse = torch.where(begins, torch.maximum(equal, FIRST_ROUND * purse), equal)
        costs = shadows.cost.nan_to_num(1.0)
        going = _affordable(going, LEAST_SHARE * costs, purse)
        total = (costs * going).flatten(1).sum(1)
        share = (purse / total.clamp(min=1e-9)).clamp(0.0, 1.0)
        share = torch.where(total > 0, share, 0.0)
        memory.going = going
        memory.spent = memory.spent + share * total
        memory.rounds = memory.rounds + (begins | later).long()
        return AuditionPlan(going, share)

    def _readings(self, signals: Signals) -> ShadowReadings:
        if signals.shadows is None:
            raise EsperError(
                "Controller 'audition' decides by shadows, which cannot train here",
                fix="use esper.grow, or hand over losses in your own loop: wrap with "
                "isolation='dual_pass', call host.seed_step(...) in every step, and pass "
                "losses= to tick",
            )
        return signals.shadows

    def _clear(self, shadows: ShadowReadings, certain: Tensor, going: Tensor) -> Tensor:
        """[N] bool: is one of them so far ahead that no other round is needed?"""
        sure = self.config.certain
        low = shadows.bound(-sure).masked_fill(~certain, -math.inf).flatten(1)
        best, place = low.max(1)
        high = shadows.bound(sure).masked_fill(~going, -math.inf).flatten(1)
        rival = high.scatter(1, place[:, None], -math.inf).amax(1)
        return best > rival.clamp(min=0.0)

    def _certain(self, signals: Signals) -> Tensor:
        """[N, S, P] bool: shadows that help, beyond noise."""
        shadows = self._readings(signals)
        return (shadows.t >= self.config.certain) & (shadows.gain >= self._least(signals))

    def _lacks_capacity(self, signals: Signals, certain: Tensor) -> Tensor:
        """[N] bool: nothing in particular is missing, and yet the host has much to learn.

        Not where it learns its samples by heart, or where shadows would.
        """
        shadows, config = self._readings(signals), self.config
        train, gap = relative_losses(signals)
        by_heart = (shadows.t <= -config.certain) & (shadows.train_gain >= self._least(signals))
        heart = by_heart.flatten(1).any(1) | (gap > config.most_gap)
        return ~certain.flatten(1).any(1) & (train >= config.unlearned) & ~heart

    def _least(self, signals: Signals) -> float:
        return self.config.least * math.log(max(signals.classes, 2))

    @staticmethod
    def _plant(
        chosen: Tensor, score: Tensor, legality: Legality, where: Tensor, blend: Blend
    ) -> Proposal:
        """The one of `chosen` [N, S, P] with the highest score that may be planted."""
        open_ = (open_plants(legality, blend) & chosen).flatten(1)
        best = score.flatten(1).masked_fill(~open_, -math.inf).argmax(1)
        slot, kind = best // score.shape[2], best % score.shape[2]
        return Proposal(where & open_.any(1), LifecycleOp.GERMINATE, slot, kind, int(blend))


class Adviser(Protocol):
    """Has a say in who is tried out alone."""

    @property
    def name(self) -> str: ...

    def hopes(self, signals: Signals) -> Tensor:
        """[S, P] of one host: what is to be added to the rule's own hopes."""


class Casting:
    """The rule for one host that can be trained again from where its audition began.

    It hears seeds that bring what a host may lack, and those of plain capacity only where no other
    fits: their shadows are silent, so what is expected of them must do. Whoever trains it plants
    the `finalists` there with `take`, one cast after the other, and goes on with the first that is
    ahead, or with the host alone.
    """

    def __init__(self, rule: Audition, adviser: "Adviser | None" = None) -> None:
        self.rule = copy(rule)  # whoever gave it may use it elsewhere
        self.adviser = adviser
        self.rule.lasts, self.rule.spend = TRIED_OF, TRIED_SPEND * rule.spend
        self.cast = LISTENING  # or what was planted, or nothing
        self.finalists: tuple[Cast, ...] = ()  # once the audition is over
        self._taken: Cast | None = None  # instead of what is remembered

    @property
    def name(self) -> str:
        return (self.adviser or self.rule).name

    @property
    def first(self) -> int:
        """Epochs before the audition."""
        return self.rule.config.first

    def take(self, cast: Cast) -> None:
        """Go on with these, from an earlier decision or from this one."""
        self.cast = self._taken = cast
        self.finalists = ()

    def memory(self) -> dict[str, Tensor]:
        return self.rule.memory() | {"cast": torch.tensor(self.cast, dtype=torch.int64)}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        cast = tuple(memory["cast"].tolist())
        self.cast = cast if self._taken is None else self._taken
        self.rule.recall({name: each for name, each in memory.items() if name != "cast"})

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        self.rule.require_possible(catalogue, horizon)

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        self._taken = None
        self.rule.remember(signals, starts)
        if self.cast == LISTENING and bool(self.rule.heard(signals)):
            hopes = self.rule.hopes(signals)
            if self.adviser is not None:
                hopes = hopes + self.adviser.hopes(signals)
            self.finalists = self.rule.best(signals, hopes)
            self.cast = self.cast if self.finalists else ALONE
        if self.cast in (LISTENING, ALONE):
            return Actions.of(legality.space, legality.hosts, op=LifecycleOp.WAIT)
        plan = plans_of((self.arms(self.cast, signals.catalogue),), signals.catalogue)
        due = signals.lifecycle.epoch[:, None] >= plan.epoch
        # All are planted before the first is made permanent: every epoch of waiting costs.
        return first_legal(legality, [*plan.plants(due), *tended(signals, legality, plan.train)])

    def arms(self, cast: Cast, catalogue: BlueprintCatalogue) -> tuple[Arm, ...]:
        """What is planted, one after the other from the first decision of the audition on."""
        places = (divmod(number, len(catalogue.names)) for number in cast)
        names = ((catalogue.slots.names[slot], catalogue.names[kind]) for slot, kind in places)
        return tuple(
            Arm(slot=slot, blueprint=blueprint, epoch=self.first + turn)
            for turn, (slot, blueprint) in enumerate(names)
        )

    def audition(self, signals: Signals, legality: Legality) -> AuditionPlan:
        fits = fitting(signals)
        if self.cast != LISTENING or self.finalists:
            nobody = torch.zeros(len(signals), dtype=torch.float64)
            return AuditionPlan(torch.zeros_like(fits), nobody)
        bring = fits & ~signals.catalogue.has(Trait.PLAIN)
        return self.rule.audition(signals, legality, bring if bool(bring.any()) else fits)


class Listening:
    """Hears what fits, or one of `every` so many, and plants nothing: for an audit of one host."""

    name = "listening"

    def __init__(self, first: int, share: float, every: int) -> None:
        self.first, self.share, self.every = first, share, every

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        return Actions.of(legality.space, legality.hosts, op=LifecycleOp.WAIT)

    def audition(self, signals: Signals, legality: Legality) -> AuditionPlan:
        going = _affordable(fits := fitting(signals), fits.double(), fits.sum() / self.every)
        waits = signals.lifecycle.epoch < self.first
        return AuditionPlan(going & ~waits, torch.full((1,), self.share, dtype=torch.float64))


def expected(catalogue: BlueprintCatalogue) -> Tensor:
    """[S, P]: what a seed is worth, as a share of what the best one is, if nothing was heard of it.

    Fitted to all candidates of 39 tasks in benchmarks/growing_tasks.py (docs/growing-results.md).
    """
    brings = ~catalogue.has(Trait.PLAIN)
    near, far = catalogue.has(Trait.LOCAL) & brings, catalogue.has(Trait.GLOBAL) & brings
    fits = catalogue.total_costs[:, :, Blend.RAMP] >= 0
    lines = (near & ~far & fits).any(1, keepdim=True)  # slots whose places lie side by side
    late = 0.1 * torch.linspace(-0.5, 0.5, len(catalogue.slots), dtype=torch.float64)[:, None]
    worth = torch.where(near, torch.where(lines, 0.3 + late, 0.1), 0.06 * brings)
    worth = torch.where(catalogue.has(Trait.NORMALISES), torch.where(lines, 0.1, -0.1), worth)
    return torch.where(~brings & ~lines & catalogue.has(Trait.CONTENT), late, worth)


def _in_order(score: Tensor, among: Tensor) -> list[int]:
    """Numbers of those `among` [S, P], highest score first, of equal ones the first slot."""
    order = score.masked_fill(~among, -math.inf).flatten().argsort(descending=True, stable=True)
    return [int(number) for number in order[: int(among.sum())]]


def fitting(signals: Signals) -> Tensor:
    """[N, S, P] bool: seeds that fit a free slot and what is left of the budget."""
    life = signals.lifecycle
    costs = signals.catalogue.total_costs[:, :, Blend.RAMP]  # [S, P]
    room = (signals.budget - life.params.sum(1))[:, None, None]
    return (costs >= 0) & (costs <= room) & ~life.occupied[:, :, None]


def _best_of_kinds(going: Tensor, gain: Tensor, gradient: Tensor, count: int) -> Tensor:
    """[N, S, P] bool: about `count` of those in `going`, as many of every blueprint: those with the
    highest gain or with the strongest gradient, since what the loss asks for shows there first.
    """
    kinds = going.any(1).sum(1)  # [N]
    each = (count / kinds.clamp(min=1)).ceil().clamp(min=2)[:, None, None]
    columns = going.transpose(1, 2).flatten(0, 1)[:, :, None]  # [N * P, S, 1]
    ranks = [
        _ranks(score.transpose(1, 2).flatten(0, 1)[:, :, None].masked_fill(~columns, -math.inf))
        for score in (gain, gradient)
    ]
    best = torch.maximum(*ranks) + ranks[0] / (1 + ranks[0].shape[1])  # of equal ones, by gain
    order = _ranks(best.masked_fill(~columns, -math.inf))
    shape = (going.shape[0], going.shape[2], going.shape[1])
    return going & (order.view(shape).transpose(1, 2) >= going.shape[1] - each)


def _ranks(score: Tensor) -> Tensor:
    """[N, S, P]: from 0 for the lowest of a row; of equal ones the first is the highest."""
    order = score.nan_to_num(-math.inf).flatten(1).argsort(dim=1, descending=True, stable=True)
    ranks: Tensor = order.argsort(dim=1, stable=True)
    return (order.shape[1] - 1 - ranks).view_as(score).double()


def _affordable(going: Tensor, costs: Tensor, most: Tensor) -> Tensor:
    """Of those in `going` [N, S, P], evenly spread ones that cost at most so much together."""
    total = (costs * going).flatten(1).sum(1)
    every = (total / most.clamp(min=1e-9)).ceil().clamp(min=1.0)[:, None]  # one of so many
    return going & (((going.flatten(1).cumsum(1) - 1) % every) == 0).view_as(going)
