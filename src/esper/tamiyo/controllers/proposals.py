"""From wishes to actions: proposals in order of importance, of which the first legal one wins.

Shapes: `N` environments, `S` slots, `B` blueprints, `H` heads, `A` actions of a head.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from esper.leyline import CANONICAL_ACTION, Actions, Blend, Legality, LifecycleOp, constants
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage


class Proposal(NamedTuple):
    """A wish for some environments; what is not named takes its canonical action."""

    where: Tensor  # [N] bool
    op: LifecycleOp
    slot: Tensor | int = CANONICAL_ACTION  # [N]
    blueprint: Tensor | int = CANONICAL_ACTION  # [N]
    blend: Tensor | int = CANONICAL_ACTION  # [N]


def first_legal(legality: Legality, proposals: Iterable[Proposal]) -> Actions:
    """Each environment's first proposal that is legal, and WAIT where there is none."""
    space, hosts = legality.space, legality.hosts
    values = Actions.of(space, hosts, op=LifecycleOp.WAIT).values
    undecided = torch.ones(hosts, dtype=torch.bool)
    for where, op, slot, blueprint, blend in proposals:
        if not bool((undecided & where).any()):
            continue
        named = {"op": int(op), "slot": slot, "blueprint": blueprint, "blend": blend}
        wish = Actions.of(space, hosts, **named).canonical()
        taken = undecided & where & legality.permits(wish)
        values = torch.where(taken[:, None], wish.values, values)
        undecided &= ~taken
    return Actions(space, values)


def open_slots(legality: Legality, op: LifecycleOp) -> Tensor:
    """[N, S] bool: where the op is legal."""
    return legality.masks["slot"][:, op]


def open_plants(legality: Legality, blend: Blend) -> Tensor:
    """[N, S, B] bool: which seeds may be planted with this blend."""
    open_ = open_slots(legality, LifecycleOp.GERMINATE)[:, :, None]
    return open_ & legality.masks["blueprint"] & legality.masks["blend"][..., int(blend)]


def at_best_slot(
    legality: Legality, op: LifecycleOp, where: Tensor | bool = True, score: Tensor | None = None
) -> Proposal:
    """The op in the legal slot of `where` [N, S] with the highest score [N, S]; else the first."""
    open_ = open_slots(legality, op) & where
    scores = torch.zeros(open_.shape) if score is None else score.nan_to_num(0.0)  # Inf: finite
    return Proposal(open_.any(1), op, scores.masked_fill(~open_, -math.inf).argmax(1))


def tended(signals: Signals, legality: Legality, train: Tensor | int) -> list[Proposal]:
    """What every patient gardener does: fossilize as soon as legal, the most useful seed first;
    start blending after `train` epochs (a number, or [N, S]) in isolation."""
    life = signals.lifecycle
    return [
        at_best_slot(legality, LifecycleOp.FOSSILIZE, score=life.contribution),
        at_best_slot(legality, LifecycleOp.ADVANCE, life.epochs_in_stage >= train),
    ]


class Judging(Protocol):
    """What a seed must be worth to be kept, in settings of a rule."""

    @property
    def probation(self) -> int: ...  # epochs in HOLDING before it may be kept
    @property
    def trial(self) -> int: ...  # and after which it is pruned if it is not worth it
    @property
    def margin(self) -> float: ...  # points of contribution
    @property
    def rent(self) -> float: ...  # and as many more per 100 % of the host's parameters


def judged(
    signals: Signals, legality: Legality, rule: Judging, *, train: int = 0
) -> list[Proposal]:
    """Keep what is worth its parameters, blend in after `train` epochs, take out what is not."""
    life = signals.lifecycle
    needed = rule.margin + rule.rent * life.params / max(signals.catalogue.host_params, 1)  # [N, S]
    worth = life.contribution_known & (life.contribution >= needed)
    late = closing(signals)[:, None]
    keep = worth & ((life.epochs_in_stage >= rule.probation) | late)
    over = life.contribution_known & ((life.epochs_in_stage >= rule.trial) | late)
    lost = life.at(SeedStage.HOLDING) & over & ~worth
    return [
        at_best_slot(legality, LifecycleOp.FOSSILIZE, keep, life.contribution - needed),
        at_best_slot(legality, LifecycleOp.ADVANCE, life.epochs_in_stage >= train),
        at_best_slot(legality, LifecycleOp.PRUNE, lost, needed - life.contribution),
    ]


def first_plant(where: Tensor, wanted: Tensor, places: Tensor, blend: Blend) -> Proposal:
    """Plant the first of the `places` [C, 2] (slot, blueprint) that is `wanted` [N, C]."""
    if len(places) == 0:
        return Proposal(torch.zeros_like(where), LifecycleOp.GERMINATE)
    first = wanted.to(torch.uint8).argmax(1)  # [N]
    slot, blueprint = places[first].unbind(1)
    return Proposal(where & wanted.any(1), LifecycleOp.GERMINATE, slot, blueprint, int(blend))


def epochs_to_permanence(blend: Blend, train: int = constants.DEFAULT_MIN_TRAINING_EPOCHS) -> int:
    """Epochs from planting to the first decision at which a seed can be made permanent."""
    if blend is Blend.IMMEDIATE:
        return constants.DEFAULT_MIN_HOLDING_EPOCHS
    # The first epoch of blending already moves alpha, hence one less than the tempo.
    return train + constants.DEFAULT_BLEND_TEMPO - 1 + constants.DEFAULT_MIN_HOLDING_EPOCHS


def in_time(signals: Signals, epochs: Tensor | int) -> Tensor:
    """[N] bool: could something that takes `epochs` still be permanent for the scored epochs?"""
    return signals.lifecycle.epoch + epochs <= signals.horizon - constants.SCORED_EPOCHS


def closing(signals: Signals) -> Tensor:
    """[N] bool: are only the scored epochs left? What is not permanent now counts for less."""
    return signals.horizon - signals.lifecycle.epoch <= constants.SCORED_EPOCHS


def youngest(signals: Signals) -> Tensor:
    """[N]: epochs since the last seed was planted, of those that exist; very many without one."""
    life = signals.lifecycle
    forever = torch.iinfo(life.age.dtype).max
    return life.age.masked_fill(~life.occupied, forever).amin(1)


def draw(weights: Tensor, draws: Tensor) -> Tensor:
    """[N]: an action for each row of non-negative weights [N, A], by its number from 0 to 1 [N].

    An action without weight is never drawn; every row needs one with weight.
    """
    reach = weights.double().cumsum(1)
    aim = draws.double().clamp(0.0, 1.0 - 1e-9) * reach[:, -1]
    return (reach <= aim[:, None]).sum(1)
