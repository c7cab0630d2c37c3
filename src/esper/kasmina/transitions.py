"""How lifecycle arrays change: by decisions, by time, and by the governor. Pure functions.

An epoch is: train, measure, `pass_time`, then one decision a host through `decide`.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from esper.kasmina.gates import GATES_INTO, Situation, explain, legality
from esper.leyline import LIVING_STAGES, Actions, Blend, Cause, Legality, LifecycleOp, SeedStage
from esper.leyline.errors import AgreementError, GateRefusedError
from esper.leyline.lifecycle import NOTHING, Lifecycle, Transitions, move

# N hosts, S slots

# What a removed seed leaves in its slot's arrays, beside the embargo.
_REMAINS = {"blueprint": NOTHING, "blend": NOTHING, "alpha": 0, "age": 0, "params": 0}
_REMAINS |= dict.fromkeys(("contribution", "contribution_known", "gradient", "gradient_known"), 0)


def blend_alpha(epochs_in_stage: Tensor, tempo: int) -> Tensor:
    """Smooth step from 0 to 1; the first epoch of blending already moves."""
    progress = ((epochs_in_stage + 1).double() / tempo).clamp(max=1.0)
    return progress * progress * (3.0 - 2.0 * progress)


def _fade(alpha: Tensor, tempo: int) -> Tensor:
    """One epoch's step down, landing on exactly zero."""
    lower = alpha - 1.0 / tempo
    return torch.where(lower < 1e-9, 0.0, lower)


class _Change:
    """A lifecycle on its way from one state to the next, with the record of its transitions."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self._moved: list[Transitions] = []

    @property
    def life(self) -> Lifecycle:
        return self.situation.life

    @property
    def record(self) -> Transitions:
        return Transitions.joined(self._moved)

    def set(self, **arrays: Tensor) -> None:
        self.situation = replace(self.situation, life=replace(self.life, **arrays))

    def move(self, where: Tensor, after: SeedStage, cause: int) -> None:
        if bool(where.any()):
            life, record = move(self.life, where, after, cause)
            self.situation = replace(self.situation, life=life)
            self._moved.append(record)

    def pass_gate(self, after: SeedStage, cause: int, where: Tensor | bool = True) -> Tensor:
        """Move every slot (of `where`) for which the gate is open; returns which did."""
        open_ = GATES_INTO[after].accepts(self.situation) & where
        self.move(open_, after, cause)
        return open_

    def bury(self, cause: int, where: Tensor | bool = True) -> None:
        """Remove condemned seeds whose alpha is zero; their slots start to rest."""
        gone = self.pass_gate(SeedStage.EMBARGOED, cause, where)
        left = _REMAINS | {"embargo": self.situation.rules.embargo}
        self.set(**{key: getattr(self.life, key).masked_fill(gone, n) for key, n in left.items()})


def decide(
    situation: Situation, actions: Actions, legal: Legality | None = None
) -> tuple[Lifecycle, Transitions]:
    """Carry out one decision a host, all or none: an illegal one raises with its reason.

    `legal`: what is legal in this situation, if it is known already.
    """
    hosts, slots = situation.life.shape
    if len(actions) != hosts:
        raise AgreementError(
            "Every host needs one action", given=f"{len(actions)} actions", valid=f"{hosts} hosts"
        )
    legal = legal or legality(situation, actions.space)
    refused = (~legal.permits(actions)).nonzero()[:, 0]
    if len(refused):
        host = int(refused[0])
        op, slot = LifecycleOp(int(actions["op"][host])), int(actions["slot"][host])
        seed = {head: int(actions[head][host]) for head in ("blueprint", "blend")}
        reasons = explain(situation, host, op, slot, **seed)
        open_ops = [each.name for each in LifecycleOp if bool(legal.masks["op"][host, each])]
        name = situation.catalogue.slots.names[slot]
        raise GateRefusedError(
            f"{op.name} of slot {name!r} in host {host} is refused",
            given="; ".join(reasons) or "the action is masked",
            valid=f"in this host now: {', '.join(open_ops)}",
        )
    change = _Change(situation)
    ops = actions["op"]
    chosen = one_hot(actions["slot"], slots).bool()  # [N, S]
    where = {op: chosen & (ops == op)[:, None] for op in LifecycleOp}
    _germinate(change, where[LifecycleOp.GERMINATE], actions)
    _advance(change, where[LifecycleOp.ADVANCE], LifecycleOp.ADVANCE)
    change.move(where[LifecycleOp.FOSSILIZE], SeedStage.FOSSILIZED, LifecycleOp.FOSSILIZE)
    pruned = where[LifecycleOp.PRUNE]
    change.move(pruned, SeedStage.PRUNED, LifecycleOp.PRUNE)
    faded = _fade(change.life.alpha, situation.rules.prune_tempo)
    change.set(alpha=torch.where(pruned, faded, change.life.alpha))
    change.bury(LifecycleOp.PRUNE, pruned)
    change.set(interventions=change.life.interventions + (ops != LifecycleOp.WAIT).long())
    return change.life, change.record


def _germinate(change: _Change, where: Tensor, actions: Actions) -> None:
    life = change.life
    blueprints, blends = actions["blueprint"][:, None], actions["blend"][:, None]  # [N, 1]
    slot_index = torch.arange(life.shape[1])[None, :]
    costs = change.situation.catalogue.total_costs[slot_index, blueprints, blends]  # [N, S]
    change.set(
        blueprint=torch.where(where, blueprints, life.blueprint),
        blend=torch.where(where, blends, life.blend),
        params=torch.where(where, costs, life.params),
        age=torch.where(where, 0, life.age),
    )
    change.move(where, SeedStage.GERMINATED, LifecycleOp.GERMINATE)
    change.pass_gate(SeedStage.TRAINING, LifecycleOp.GERMINATE, where)
    _advance(change, where & (blends == Blend.IMMEDIATE), LifecycleOp.GERMINATE)


def _advance(change: _Change, where: Tensor, cause: LifecycleOp) -> None:
    change.move(where, SeedStage.BLENDING, cause)
    life = change.life
    first = blend_alpha(life.epochs_in_stage, change.situation.rules.blend_tempo)
    first = torch.where(life.blend == Blend.IMMEDIATE, 1.0, first)
    change.set(alpha=torch.where(where, first, life.alpha))
    change.pass_gate(SeedStage.HOLDING, cause, where)


def pass_time(situation: Situation) -> tuple[Lifecycle, Transitions]:
    """One epoch has passed: counters, alphas, and every transition that needs no decision."""
    life, rules = situation.life, situation.rules
    waited = life.epochs_in_stage + 1
    blended = blend_alpha(waited, rules.blend_tempo)
    alpha = torch.where(life.at(SeedStage.BLENDING), blended, life.alpha)
    alpha = torch.where(life.at(SeedStage.PRUNED), _fade(alpha, rules.prune_tempo), alpha)
    life = replace(
        life,
        epoch=life.epoch + 1,
        age=torch.where(life.occupied, life.age + 1, life.age),
        epochs_in_stage=waited,
        alpha=alpha,
        embargo=torch.where(life.at(SeedStage.EMBARGOED), life.embargo - 1, life.embargo),
    )
    change = _Change(replace(situation, life=life))
    # From the end of life backwards, so that no slot takes two steps in one epoch.
    change.pass_gate(SeedStage.DORMANT, Cause.TIME)
    change.pass_gate(SeedStage.RESETTING, Cause.TIME)
    change.bury(Cause.TIME)
    change.pass_gate(SeedStage.HOLDING, Cause.TIME)
    change.pass_gate(SeedStage.TRAINING, Cause.TIME)
    return change.life, change.record


def remove_now(situation: Situation, where: Tensor) -> tuple[Lifecycle, Transitions]:
    """The governor's way out: living and condemned seeds in `where` [N, S] go at once."""
    life = situation.life
    present = life.at(*sorted(LIVING_STAGES), SeedStage.PRUNED)
    if bool((where & ~present).any()):
        host, slot = (int(index) for index in (where & ~present).nonzero()[0])
        raise GateRefusedError(
            f"There is no seed to remove in host {host} slot {slot}",
            given=f"the slot is {SeedStage(int(life.stage[host, slot])).name}",
            valid="GERMINATED to HOLDING, or PRUNED",
        )
    change = _Change(situation)
    change.move(where & ~life.at(SeedStage.PRUNED), SeedStage.PRUNED, Cause.GOVERNOR)
    change.set(alpha=torch.where(where, 0.0, change.life.alpha))
    change.bury(Cause.GOVERNOR, where)
    return change.life, change.record
