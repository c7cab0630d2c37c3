"""Controllers that do something in particular, for tests that need bad ones.

Shapes: `N` environments, `S` slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.leyline import Actions, Blend, BlueprintCatalogue, Legality, LifecycleOp
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import Arm, Controller, FixedSchedule, Proposal, first_legal
from esper.tamiyo.controllers.proposals import (
    at_best_slot,
    first_plant,
    open_plants,
    tended,
)

LATE = 18


@dataclass(frozen=True)
class Scripted:
    """A name, and what it wants in order of importance."""

    name: str
    wishes: Callable[[Signals, Legality], list[Proposal]]

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        return first_legal(legality, self.wishes(signals, legality))


def _plant(where: Tensor, catalogue: BlueprintCatalogue, arm: Arm) -> Proposal:
    slot, blueprint = arm.place(catalogue)
    return Proposal(where, LifecycleOp.GERMINATE, slot, blueprint, int(Blend.named(arm.blend)))


def wasteful() -> Controller:
    """Plants the dearest blueprint in every slot as fast as it can, and keeps all of them."""

    def wishes(signals: Signals, legality: Legality) -> list[Proposal]:
        catalogue, always = signals.catalogue, signals.lifecycle.epoch >= 0
        costs = catalogue.total_costs[..., Blend.IMMEDIATE]  # [S, B]
        by_cost = costs.flatten().argsort(descending=True, stable=True)
        places = torch.stack([by_cost // costs.shape[1], by_cost % costs.shape[1]], 1)
        wanted = open_plants(legality, Blend.IMMEDIATE)[:, places[:, 0], places[:, 1]]
        plant = first_plant(always, wanted, places, Blend.IMMEDIATE)
        return [plant, *tended(signals, legality, 1)]

    return Scripted("wasteful", wishes)


def destructive(arm: Arm, before_end: int = 2) -> Controller:
    """Plants, lets the host come to lean on the seed, and takes it out just before the end."""

    def wishes(signals: Signals, legality: Legality) -> list[Proposal]:
        life = signals.lifecycle
        ending = signals.horizon - life.epoch <= before_end
        plant = ~ending & (life.epoch >= arm.epoch)
        return [
            at_best_slot(legality, LifecycleOp.PRUNE, ending[:, None]),
            _plant(plant, signals.catalogue, replace(arm, blend="immediate")),
        ]

    return Scripted("destructive", wishes)


def unfinished(arm: Arm) -> Controller:
    """Plants and never makes permanent."""

    def wishes(signals: Signals, legality: Legality) -> list[Proposal]:
        return [_plant(signals.lifecycle.epoch >= arm.epoch, signals.catalogue, arm)]

    return Scripted("unfinished", wishes)


def spammy(arm: Arm) -> Controller:
    """Plants and prunes in turns, in whatever slot is open."""

    def wishes(signals: Signals, legality: Legality) -> list[Proposal]:
        catalogue, always = signals.catalogue, signals.lifecycle.epoch >= 0
        places = [replace(arm, slot=slot) for slot in catalogue.slots.names]
        return [
            at_best_slot(legality, LifecycleOp.PRUNE),
            *(_plant(always, catalogue, place) for place in places),
        ]

    return Scripted("spammy", wishes)


@dataclass(frozen=True)
class Renamed:
    """Another controller under a name of its own."""

    name: str
    inner: Controller

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        return self.inner.act(signals, legality, starts)


def late(arm: Arm) -> Controller:
    """A good arm, far too late."""
    return Renamed("late", FixedSchedule(replace(arm, epoch=LATE)))


def wrong_slot(arm: Arm, slot: str) -> Controller:
    """A good arm's blueprint in another slot."""
    assert slot != arm.slot
    return Renamed("wrong_slot", FixedSchedule(replace(arm, slot=slot)))
