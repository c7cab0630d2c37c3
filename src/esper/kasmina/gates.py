"""Gates, one for each transition, as conditions over the lifecycle arrays; and what they permit.

Legality and gates are one thing: an action is legal exactly when its gate accepts. Every
condition can say, for any host and slot, why it is not met.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from esper.leyline import HEADS, ActionSpace, Legality, Lifecycle, constants
from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.errors import UnknownNameError
from esper.leyline.ops import Blend, LifecycleOp
from esper.leyline.settings import Count, Whole, require_settings
from esper.leyline.slots import require_agreement, require_form
from esper.leyline.stages import TRANSITIONS, SeedStage

# N hosts, O ops, S slots, P blueprints, K blends

UNLIMITED = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class GateRules:
    """How strict the gates are. None turns a measured condition off."""

    blend_tempo: Count = constants.DEFAULT_BLEND_TEMPO
    prune_tempo: Count = constants.DEFAULT_PRUNE_TEMPO
    embargo: Whole = constants.DEFAULT_EMBARGO
    min_host_epochs: Whole = 0  # that a host trains alone before anything is planted
    min_training_epochs: Whole = constants.DEFAULT_MIN_TRAINING_EPOCHS
    min_holding_epochs: Whole = constants.DEFAULT_MIN_HOLDING_EPOCHS
    min_gradient: float | None = constants.DEFAULT_MIN_GRADIENT
    min_contribution: float | None = constants.DEFAULT_MIN_CONTRIBUTION
    max_loss_rise: float | None = constants.DEFAULT_MAX_LOSS_RISE

    def __post_init__(self) -> None:
        require_settings(self, "The gates' rule")

    @classmethod
    def unmeasured(cls) -> "GateRules":
        """Rules for a host whose gradients, contributions and losses nobody measures."""
        return cls(min_gradient=None, min_contribution=None, max_loss_rise=None)


@dataclass(frozen=True)
class Situation:
    """All that a gate may look at."""

    life: Lifecycle
    catalogue: BlueprintCatalogue
    rules: GateRules
    budget: Tensor  # [N] int64: parameters that may exist in seeds at most

    def __post_init__(self) -> None:
        hosts, slots = self.life.shape
        require_agreement(
            "the number of slots", ("lifecycle", slots), ("catalogue", len(self.catalogue.slots))
        )
        require_form(
            "The budget must be one int64 for each host", self.budget, (hosts,), torch.int64
        )

    def room(self) -> Tensor:
        """[N] int64: parameters that may still be added."""
        return self.budget - self.life.params.sum(dim=1)

    def affordable(self, by: int = 3) -> Tensor:
        """[N, S, P, K] bool: which seeds fit the slot and the budget?

        With `by` below 3, does any of them: by slot and blueprint [N, S, P], or by slot [N, S].
        """
        costs = self.catalogue.total_costs  # [S, P, K]
        costs = torch.where(costs < 0, UNLIMITED, costs)
        costs = costs if by == 3 else costs.flatten(by).amin(dim=-1)
        room = self.room().clamp(max=UNLIMITED - 1)  # what does not fit is never affordable
        return costs <= room.view(-1, *(1,) * by)

    def facts(self, host: int, slot: int) -> dict[str, Any]:
        """By name, what refusals speak of: the rules, the slot's state, what there is room for."""
        known = {name: column[host][slot] for name, column in self._columns.items()}
        return vars(self.rules) | known | {"stage": SeedStage(known["stage"]).name}

    @cached_property
    def _columns(self) -> dict[str, list[list[Any]]]:
        """The state of every host and slot as numbers, fetched once for all who ask."""
        shape, arrays = self.life.shape, {**self.life.state_dict(), "room": self.room()}
        by_slot = {n: each if each.dim() > 1 else each[:, None] for n, each in arrays.items()}
        found = {name: array.expand(shape).tolist() for name, array in by_slot.items()}
        costs = self.catalogue.total_costs.flatten(1)
        cheapest = [min(each[each >= 0].tolist(), default=None) for each in costs]
        return found | {"cheapest": [cheapest] * shape[0]}


@dataclass(frozen=True)
class Condition:
    met: Callable[[Situation], Tensor]  # [N, S] bool, or [N, 1], [S] for all slots or hosts alike
    otherwise: str  # why not, to be filled in with the facts of one slot


class Gate:
    """The way into a stage: its conditions in order, the first about the stage it starts from."""

    def __init__(self, after: SeedStage, op: LifecycleOp | None, *conditions: Condition) -> None:
        self.after = after
        self.op = op  # None: passes by itself, with time
        before = [stage for stage in SeedStage if after in TRANSITIONS[stage]]
        reason = "the slot is {stage}, not " + " or ".join(stage.name for stage in before)
        self.conditions = (Condition(lambda now: now.life.at(*before), reason), *conditions)

    def met(self, situation: Situation) -> Tensor:
        """[conditions, N, S] bool."""
        shape = situation.life.shape
        return torch.stack([each.met(situation).expand(shape) for each in self.conditions])

    def accepts(self, situation: Situation) -> Tensor:
        """[N, S] bool."""
        return self.met(situation).all(dim=0)

    def refusals(
        self, situation: Situation, host: int, slot: int, met: Tensor | None = None
    ) -> list[str]:
        """Why the gate is closed here; empty when it is open. `met`, if it is known already.

        When the slot is in the wrong stage, the other conditions mean nothing and are left out.
        """
        here = (self.met(situation) if met is None else met)[:, host, slot].tolist()
        unmet = [each for each, is_met in zip(self.conditions, here, strict=True) if not is_met]
        facts = situation.facts(host, slot)
        return [each.otherwise.format(**facts) for each in (unmet if here[0] else unmet[:1])]


def _old_enough(rule: str) -> Condition:
    return Condition(
        lambda now: now.life.epochs_in_stage >= getattr(now.rules, rule),
        f"{{epochs_in_stage}} epochs in {{stage}}, at least {{{rule}}} needed",
    )


def _measured(name: str, rule: str, finding: str) -> tuple[Condition, Condition]:
    """The seed's gradient or contribution is known, and at least what the rule asks for."""
    known, seen, least = map(attrgetter, (f"life.{name}_known", f"life.{name}", f"rules.{rule}"))
    return (
        Condition(
            lambda now: known(now) | (least(now) is None),
            f"the seed's {name} has not been measured yet",
        ),
        Condition(
            lambda now: ~known(now) | (seen(now) >= (-inf if least(now) is None else least(now))),
            f"{finding}, at least {{{rule}}} needed",
        ),
    )


def _something_fits(now: Situation) -> Tensor:
    return (now.catalogue.total_costs >= 0).flatten(1).any(dim=1)


def _stable(now: Situation) -> Tensor:
    life, most = now.life, now.rules.max_loss_rise
    calm = ~life.loss_rise_known | (life.loss_rise <= (inf if most is None else most))
    return calm[:, None]


_STILL_MOVING = "alpha is {alpha:.3g} and still moving"
GATES = (
    Gate(
        SeedStage.GERMINATED,
        LifecycleOp.GERMINATE,
        Condition(
            lambda now: (now.life.epoch >= now.rules.min_host_epochs)[:, None],
            "the host has trained for {epoch} epochs, at least {min_host_epochs} needed",
        ),
        Condition(_something_fits, "no blueprint fits this slot"),
        Condition(
            lambda now: now.affordable(1) | ~_something_fits(now),
            "the cheapest seed costs {cheapest} parameters, the budget has room for {room}",
        ),
    ),
    Gate(SeedStage.TRAINING, None),
    Gate(
        SeedStage.BLENDING,
        LifecycleOp.ADVANCE,
        _old_enough("min_training_epochs"),
        *_measured("gradient", "min_gradient", "the seed's gradient norm is {gradient:.3g}"),
    ),
    Gate(SeedStage.HOLDING, None, Condition(lambda now: now.life.alpha >= 1.0, _STILL_MOVING)),
    Gate(
        SeedStage.FOSSILIZED,
        LifecycleOp.FOSSILIZE,
        _old_enough("min_holding_epochs"),
        *_measured("contribution", "min_contribution", "the seed contributes {contribution:.4g}"),
        Condition(
            _stable,
            "the training loss rose by {loss_rise:.0%} in the last epoch, at most "
            "{max_loss_rise:.0%} allowed",
        ),
    ),
    Gate(SeedStage.PRUNED, LifecycleOp.PRUNE),
    Gate(SeedStage.EMBARGOED, None, Condition(lambda now: now.life.alpha == 0.0, _STILL_MOVING)),
    Gate(
        SeedStage.RESETTING,
        None,
        Condition(lambda now: now.life.embargo <= 0, "the slot rests for {embargo} more epochs"),
    ),
    Gate(
        SeedStage.DORMANT,
        None,
        Condition(
            lambda now: now.life.epochs_in_stage >= 1,
            "{epochs_in_stage} epochs in {stage}, at least 1 needed",
        ),
    ),
)
GATES_INTO = {gate.after: gate for gate in GATES}
OP_GATES = {gate.op: gate for gate in GATES if gate.op is not None}
assert set(OP_GATES) == set(LifecycleOp) - {LifecycleOp.WAIT}, "every op but WAIT needs a gate"
assert set(GATES_INTO) == set(SeedStage), "every stage needs a gate into it"


# --- what is open, and why the rest is not ---------------------------------------------------


def legality(situation: Situation, space: ActionSpace | None = None) -> Legality:
    """Masks for every head, from the gates."""
    space = space or HEADS.resolve(situation.catalogue)
    hosts, slots = situation.life.shape
    by_op = torch.zeros(hosts, len(LifecycleOp), slots, dtype=torch.bool)  # [N, O, S]
    for op, gate in OP_GATES.items():
        by_op[:, op] = gate.accepts(situation)
    ops = by_op.any(dim=2)
    ops[:, LifecycleOp.WAIT] = True
    blueprints, blends = situation.affordable(2), situation.affordable()
    masks = {"op": ops, "slot": by_op, "blueprint": blueprints, "blend": blends}
    return Legality(space, hosts, masks)


def explain(
    situation: Situation,
    host: int,
    op: LifecycleOp,
    slot: int,
    *,
    blueprint: int | None = None,
    blend: int | None = None,
) -> list[str]:
    """Why this op is refused for one host and slot; empty when it is legal."""
    if op not in list(LifecycleOp):
        raise UnknownNameError.of("op", str(op), [each.name for each in LifecycleOp])
    op = LifecycleOp(op)
    if op is LifecycleOp.WAIT:
        return []
    reasons = OP_GATES[op].refusals(situation, host, slot)
    if reasons or op is not LifecycleOp.GERMINATE or blueprint is None:
        return reasons
    name = situation.catalogue.names[blueprint]
    costs = situation.catalogue.total_costs[slot, blueprint]  # [K]
    cost = int(costs.min() if blend is None else costs[blend])
    if cost < 0:
        return [situation.catalogue.misfit(slot, blueprint)]
    room = int(situation.room()[host])
    if cost > room:
        how = "" if blend is None else f" with blend {Blend(blend).name}"
        return [f"{name!r}{how} costs {cost} parameters, the budget has room for {room}"]
    return []


def closed_gates(situation: Situation) -> list[tuple[int, int, LifecycleOp, str]]:
    """(host, slot, op, why) wherever a slot is in the right stage for an op and is kept from it."""
    found = []
    for op, gate in OP_GATES.items():
        met = gate.met(situation)
        for host, slot in (met[0] & ~met.all(dim=0)).nonzero().tolist():
            found.append((host, slot, op, "; ".join(gate.refusals(situation, host, slot, met))))
    return found
