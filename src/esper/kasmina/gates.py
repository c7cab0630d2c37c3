"""Gates, one for each transition, as conditions over the lifecycle arrays; and what they permit.

Legality and gates are one thing: an action is legal exactly when its gate accepts. Every
condition can say, for any host and slot, why it is not met.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import constants
from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.errors import AgreementError, GateRefusedError, UnknownNameError
from esper.leyline.heads import HEADS, ActionSpace
from esper.leyline.legality import Actions, Legality
from esper.leyline.lifecycle import Lifecycle
from esper.leyline.ops import Blend, LifecycleOp
from esper.leyline.settings import Count, Whole, require_settings
from esper.leyline.slots import require_agreement
from esper.leyline.stages import LIVING_STAGES, SeedStage

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
        if self.budget.shape != (hosts,) or self.budget.dtype != torch.int64:
            raise AgreementError(
                "The budget must be one int64 for each host",
                given=f"{self.budget.dtype} {list(self.budget.shape)}",
                valid=f"torch.int64 [{hosts}]",
            )

    def room(self) -> Tensor:
        """[N] int64: parameters that may still be added."""
        return self.budget - self.life.params.sum(dim=1)

    def affordable(self) -> Tensor:
        """[N, S, P, K] bool: which seeds fit the slot and the budget?"""
        costs = self.catalogue.total_costs()  # [S, P, K]
        return (costs >= 0) & (costs <= self.room()[:, None, None, None])


@dataclass(frozen=True)
class Condition:
    met: Callable[[Situation], Tensor]  # [N, S] bool
    otherwise: Callable[[Situation, int, int], str]  # why not, for one host and slot


@dataclass(frozen=True)
class Gate:
    """The way into a stage: its conditions in order, the first about the stage it starts from."""

    after: SeedStage
    op: LifecycleOp | None  # None: passes by itself, with time
    conditions: tuple[Condition, ...]

    @classmethod
    def into(cls, after: SeedStage, op: LifecycleOp | None, *conditions: Condition) -> "Gate":
        return cls(after, op, conditions)

    def accepts(self, situation: Situation) -> Tensor:
        """[N, S] bool."""
        accepted = torch.ones(situation.life.shape, dtype=torch.bool)
        for condition in self.conditions:
            accepted &= condition.met(situation)
        return accepted

    def refusals(self, situation: Situation, host: int, slot: int) -> list[str]:
        """Why the gate is closed here; empty when it is open.

        When the slot is in the wrong stage, the other conditions mean nothing and are left out.
        """
        reasons: list[str] = []
        for position, condition in enumerate(self.conditions):
            if not bool(condition.met(situation)[host, slot]):
                reasons.append(condition.otherwise(situation, host, slot))
                if position == 0:
                    break
        return reasons


def _stage_name(situation: Situation, host: int, slot: int) -> str:
    return SeedStage(int(situation.life.stage[host, slot])).name


def _in_stage(*stages: SeedStage) -> Condition:
    names = " or ".join(stage.name for stage in stages)

    def otherwise(situation: Situation, host: int, slot: int) -> str:
        return f"the slot is {_stage_name(situation, host, slot)}, not {names}"

    return Condition(lambda situation: situation.life.at(*stages), otherwise)


def _old_enough(rule: Callable[[GateRules], int]) -> Condition:
    def met(situation: Situation) -> Tensor:
        return situation.life.epochs_in_stage >= rule(situation.rules)

    def otherwise(situation: Situation, host: int, slot: int) -> str:
        spent = int(situation.life.epochs_in_stage[host, slot])
        stage = _stage_name(situation, host, slot)
        return f"{spent} epochs in {stage}, at least {rule(situation.rules)} needed"

    return Condition(met, otherwise)


def _host_ready(situation: Situation) -> Tensor:
    ready = situation.life.epoch >= situation.rules.min_host_epochs
    return ready[:, None].expand(situation.life.shape)


def _why_host_not_ready(situation: Situation, host: int, slot: int) -> str:
    lived, least = int(situation.life.epoch[host]), situation.rules.min_host_epochs
    return f"the host has trained for {lived} epochs, at least {least} needed"


def _something_fits(situation: Situation) -> Tensor:
    return situation.affordable().flatten(2).any(dim=2)


def _why_nothing_fits(situation: Situation, host: int, slot: int) -> str:
    costs = situation.catalogue.total_costs()[slot]
    if not bool((costs >= 0).any()):
        return "no blueprint fits this slot"
    cheapest = int(costs[costs >= 0].min())
    room = int(situation.room()[host])
    return f"the cheapest seed costs {cheapest} parameters, the budget has room for {room}"


def _measured(name: str, rule: str, finding: str) -> Condition:
    """The seed's gradient or contribution is known, and at least what the rule asks for."""

    def met(situation: Situation) -> Tensor:
        life, least = situation.life, getattr(situation.rules, rule)
        if least is None:
            return torch.ones(life.shape, dtype=torch.bool)
        enough: Tensor = getattr(life, f"{name}_known") & (getattr(life, name) >= least)
        return enough

    def otherwise(situation: Situation, host: int, slot: int) -> str:
        if not bool(getattr(situation.life, f"{name}_known")[host, slot]):
            return f"the seed's {name} has not been measured yet"
        seen = float(getattr(situation.life, name)[host, slot])
        return f"{finding.format(seen)}, at least {getattr(situation.rules, rule)} needed"

    return Condition(met, otherwise)


def _stable(situation: Situation) -> Tensor:
    life, most = situation.life, situation.rules.max_loss_rise
    if most is None:
        return torch.ones(life.shape, dtype=torch.bool)
    calm = ~life.loss_rise_known | (life.loss_rise <= most)
    return calm[:, None].expand(life.shape)


def _why_unstable(situation: Situation, host: int, slot: int) -> str:
    seen = float(situation.life.loss_rise[host])
    most = situation.rules.max_loss_rise
    return f"the training loss rose by {seen:.0%} in the last epoch, at most {most:.0%} allowed"


def _why_alpha(situation: Situation, host: int, slot: int) -> str:
    return f"alpha is {float(situation.life.alpha[host, slot]):.3g} and still moving"


def _why_embargoed(situation: Situation, host: int, slot: int) -> str:
    return f"the slot rests for {int(situation.life.embargo[host, slot])} more epochs"


GATES = (
    Gate.into(
        SeedStage.GERMINATED,
        LifecycleOp.GERMINATE,
        _in_stage(SeedStage.DORMANT),
        Condition(_host_ready, _why_host_not_ready),
        Condition(_something_fits, _why_nothing_fits),
    ),
    Gate.into(SeedStage.TRAINING, None, _in_stage(SeedStage.GERMINATED)),
    Gate.into(
        SeedStage.BLENDING,
        LifecycleOp.ADVANCE,
        _in_stage(SeedStage.TRAINING),
        _old_enough(lambda rules: rules.min_training_epochs),
        _measured("gradient", "min_gradient", "the seed's gradient norm is {:.3g}"),
    ),
    Gate.into(
        SeedStage.HOLDING,
        None,
        _in_stage(SeedStage.BLENDING),
        Condition(lambda situation: situation.life.alpha >= 1.0, _why_alpha),
    ),
    Gate.into(
        SeedStage.FOSSILIZED,
        LifecycleOp.FOSSILIZE,
        _in_stage(SeedStage.HOLDING),
        _old_enough(lambda rules: rules.min_holding_epochs),
        _measured("contribution", "min_contribution", "the seed contributes {:.4g}"),
        Condition(_stable, _why_unstable),
    ),
    Gate.into(SeedStage.PRUNED, LifecycleOp.PRUNE, _in_stage(*sorted(LIVING_STAGES))),
    Gate.into(
        SeedStage.EMBARGOED,
        None,
        _in_stage(SeedStage.PRUNED),
        Condition(lambda situation: situation.life.alpha == 0.0, _why_alpha),
    ),
    Gate.into(
        SeedStage.RESETTING,
        None,
        _in_stage(SeedStage.EMBARGOED),
        Condition(lambda situation: situation.life.embargo <= 0, _why_embargoed),
    ),
    Gate.into(
        SeedStage.DORMANT, None, _in_stage(SeedStage.RESETTING), _old_enough(lambda rules: 1)
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
    blends = situation.affordable()  # [N, S, P, K]
    masks = {"op": ops, "slot": by_op, "blueprint": blends.any(dim=3), "blend": blends}
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
    costs = situation.catalogue.total_costs()[slot, blueprint]  # [K]
    cost = int(costs.min() if blend is None else costs[blend])
    if cost < 0:
        return [f"blueprint {name!r} does not fit slot {situation.catalogue.slots.names[slot]!r}"]
    room = int(situation.room()[host])
    if cost > room:
        how = "" if blend is None else f" with blend {Blend(blend).name}"
        return [f"{name!r}{how} costs {cost} parameters, the budget has room for {room}"]
    return []


def require_legal(situation: Situation, actions: Actions, legal: Legality) -> None:
    """Raise with the reason of the first host whose action is refused."""
    refused = ~legal.permits(actions)
    if not bool(refused.any()):
        return
    host = int(refused.nonzero()[0, 0])
    op, slot = LifecycleOp(int(actions["op"][host])), int(actions["slot"][host])
    reasons: Sequence[str] = explain(
        situation,
        host,
        op,
        slot,
        blueprint=int(actions["blueprint"][host]),
        blend=int(actions["blend"][host]),
    )
    open_ops = [o.name for o in LifecycleOp if bool(legal.masks["op"][host, o])]
    raise GateRefusedError(
        f"{op.name} of slot {situation.catalogue.slots.names[slot]!r} in host {host} is refused",
        given="; ".join(reasons) or "the action is masked",
        valid=f"in this host now: {', '.join(open_ops)}",
    )
