"""The rule `audition`: every seed that could be planted shows what it can do, the best are planted.

The host trains alone at first. Then shadows of all candidates train beside it, in rounds: after
each round the better part goes on, so that all of them together cost no more than a stated share of
the host's training. Those whose gain on validation data is certain are planted, the best of every
slot, with what they have learned. Where none is certain and the host still has much to learn, it
lacks no mechanism but capacity: the largest seed that fits is planted. What was planted is judged
by what it contributes, as every seed is.

Shapes: `N` environments, `S` slots, `P` blueprints.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import Actions, Blend, BlueprintCatalogue, Legality, LifecycleOp
from esper.leyline.constants import BY_HEART, CERTAIN, UNLEARNED
from esper.leyline.errors import EsperError
from esper.leyline.settings import Count, NotNegative, Positive, Share, Whole, require_settings
from esper.leyline.shadows import AuditionPlan, ShadowReadings
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.proposals import (
    Proposal,
    epochs_to_permanence,
    first_legal,
    in_time,
    judged,
    open_plants,
)
from esper.tamiyo.controllers.protocol import restarted
from esper.tamiyo.controllers.rules import relative_losses, require_first_in_time
from esper.tamiyo.controllers.specs import spec_of

DOUBT = 2.0  # standard errors by which a gain is taken to be smaller than it seems
LARGE = 0.5  # of the largest seed that fits
ROUND_OF = 5  # epochs of the whole training for each epoch of the audition, at least
LEAST_SHARE = 0.2  # of an epoch's batches: what could train on less does not take part


@dataclass(frozen=True, kw_only=True)
class AuditionConfig:
    # The audition
    first: Count = 1  # epochs that the host trains alone
    rounds: Count = 3  # epochs of the audition
    spend: Positive = 0.6  # FLOPs of shadows in all, over those of the host's training
    survive: Share = 0.33  # of the candidates, after each round
    finalists: Count = 4  # that are in the last round at least
    # What is planted
    certain: NotNegative = CERTAIN  # gain over its standard error
    least: NotNegative = 0.003  # gain, in units of guessing
    seeds: Count = 3  # at most
    unlearned: Share = (
        UNLEARNED  # training loss, in units of guessing, above which capacity may lack
    )
    most_gap: float = BY_HEART  # validation minus training loss above which it does not
    # What is kept
    probation: Whole = 1  # epochs in HOLDING before a seed may be kept
    trial: Count = 3  # epochs in HOLDING after which one that is not worth it is pruned
    margin: float = 0.0  # points of contribution that a seed must be worth
    rent: float = 0.0  # and as many more per 100 % of the host's parameters

    def __post_init__(self) -> None:
        require_settings(self, "In controller 'audition' setting")


@dataclass
class _Memory:
    """What the rule remembers of its rows."""

    going: Tensor  # [N, S, P] bool: shadows that are still in the race
    spent: Tensor  # [N] float64: cost of shadows so far, in epochs of the host
    rounds: Tensor  # [N] int64: that are over
    large: Tensor  # [N] bool: to be planted, the largest newborn
    planted: Tensor  # [N] int64: how many were

    @classmethod
    def fresh(cls, hosts: int, slots: int, blueprints: int) -> "_Memory":
        none = torch.zeros(hosts, slots, blueprints, dtype=torch.bool)
        count = torch.zeros(hosts, dtype=torch.int64)
        return cls(none, count.double(), count, count.bool(), count.clone())


class Audition:
    """Plants what showed that it helps."""

    needs_contributions = True

    def __init__(self, config: AuditionConfig | None = None) -> None:
        self.config = config or AuditionConfig()
        self._memory: _Memory | None = None

    @property
    def name(self) -> str:
        return spec_of("audition", self.config)

    def memory(self) -> dict[str, Tensor]:
        return {} if self._memory is None else dict(vars(self._memory))

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._memory = _Memory(**memory) if memory else None

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        needed = 1 + epochs_to_permanence(Blend.IMMEDIATE)
        require_first_in_time("audition", self.config.first, needed, horizon, earliest=1)

    def _rounds(self, signals: Signals) -> Tensor:
        """[N]: fewer where there is little time."""
        return (signals.horizon // ROUND_OF).clamp(1, self.config.rounds)

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        shadows = self._readings(signals)
        fresh = vars(_Memory.fresh(*shadows.epochs.shape))
        last = {} if self._memory is None else vars(self._memory)
        memory = self._memory = _Memory(
            **{name: restarted(last.get(name), blank, starts) for name, blank in fresh.items()}
        )
        certain = self._certain(signals) & memory.going
        clear = self._clear(shadows, certain, memory.going)
        rounds = self._rounds(signals)
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

    def audition(self, signals: Signals, legality: Legality) -> AuditionPlan:
        """The next round, for rows whose host has trained alone for long enough."""
        config, shadows, memory = self.config, self._readings(signals), self._memory
        assert memory is not None  # it decides before it is asked
        life, open_ = signals.lifecycle, _fitting(signals)
        begins = (memory.rounds == 0) & (life.epoch >= config.first)
        left = self._rounds(signals) - memory.rounds
        going = torch.where(begins[:, None, None], open_, memory.going & open_)
        count = going.flatten(1).sum(1)
        kept = (count * config.survive).ceil().clamp(min=config.finalists).long()
        later = (memory.rounds > 0) & (left > 0)
        going = torch.where(later[:, None, None], _best(going, shadows.bound(-DOUBT), kept), going)
        going &= (left > 0)[:, None, None] | self._certain(signals)
        done = (left <= 0) & (memory.large | (memory.planted >= config.seeds))
        done |= ~in_time(signals, 1 + epochs_to_permanence(Blend.IMMEDIATE))  # to plant after it
        going &= ~done[:, None, None]
        # Half of what is left to spend, since most are heard in the first rounds; at last all.
        purse = (config.spend * signals.horizon.double() - memory.spent).clamp(min=0.0)
        purse = torch.where(left > 1, purse / 2, purse)
        costs, checks = shadows.cost.nan_to_num(1.0), shadows.check.nan_to_num(0.0)
        going = _affordable(going, LEAST_SHARE * costs + checks, purse)
        total, checked = ((each * going).flatten(1).sum(1) for each in (costs, checks))
        share = ((purse - checked) / total.clamp(min=1e-9)).clamp(0.0, 1.0)
        share = torch.where(total > 0, share, 0.0)
        memory.going = going
        memory.spent = memory.spent + share * total + checked
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


class Listening:
    """Hears what fits, or one of `every` so many, and plants nothing: for an audit of one host."""

    name = "listening"

    def __init__(self, first: int, share: float, survive: float, every: int) -> None:
        self.first, self.share, self.survive, self.every = first, share, survive, every
        self._going: Tensor | None = None

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        return Actions.of(legality.space, legality.hosts, op=LifecycleOp.WAIT)

    def audition(self, signals: Signals, legality: Legality) -> AuditionPlan:
        going, shadows = self._going, signals.shadows
        assert shadows is not None  # a host asks for a plan where it can follow it
        if going is None:
            going = _affordable(fits := _fitting(signals), fits.double(), fits.sum() / self.every)
        else:
            kept = (going.flatten(1).sum(1) * self.survive).ceil()
            going = _best(going, shadows.bound(-DOUBT), kept)
        waits = signals.lifecycle.epoch < self.first
        self._going = None if bool(waits) else going
        return AuditionPlan(going & ~waits, torch.full((1,), self.share, dtype=torch.float64))


def _fitting(signals: Signals) -> Tensor:
    """[N, S, P] bool: seeds that fit a free slot and what is left of the budget."""
    life = signals.lifecycle
    costs = signals.catalogue.total_costs()[:, :, Blend.RAMP]  # [S, P]
    room = (signals.budget - life.params.sum(1))[:, None, None]
    return (costs >= 0) & (costs <= room) & ~life.occupied[:, :, None]


def _best(going: Tensor, score: Tensor, count: Tensor) -> Tensor:
    """[N, S, P] bool: of those in `going` the `count` [N] with the highest scores."""
    flat = score.flatten(1).masked_fill(~going.flatten(1), -math.inf)
    order = flat.argsort(dim=1, descending=True, stable=True)
    rank: Tensor = order.argsort(dim=1, stable=True)
    return (rank < count[:, None]).view_as(going) & going


def _affordable(going: Tensor, costs: Tensor, most: Tensor) -> Tensor:
    """Of those in `going` [N, S, P], evenly spread ones that cost at most so much together."""
    total = (costs * going).flatten(1).sum(1)
    every = (total / most.clamp(min=1e-9)).ceil().clamp(min=1.0)[:, None]  # one of so many
    return going & (((going.flatten(1).cumsum(1) - 1) % every) == 0).view_as(going)
