"""Plans: which seeds act on which rows of a fused pass, as index lists built once per epoch.

A pass runs over rows: every environment once, the environments with isolated seeds, or
environments with some of their seeds switched off. PassRows that differ from a base row only from
some slot on start there, as a copy (`forks`), so what they share is computed once.

Shapes: `N` environments, `S` slots, `V` rows of a pass, `K` seeds that act at one slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.leyline import NOTHING, Lifecycle, SeedStage

PoolKey = tuple[str, int, int]  # "host", "seed", "gate" or "shadow"; slot; blueprint
HOST: PoolKey = ("host", NOTHING, NOTHING)
_NONE = torch.zeros(0, dtype=torch.int64)


class Group(NamedTuple):
    """Seeds of one blueprint at one slot."""

    blueprint: int
    rows: Tensor  # [k] rows of the blueprint's pool
    kind: str = "seed"  # or "shadow": they come after the seeds of a slot


class SlotPlan(NamedTuple):
    """What happens at one slot. Groups follow each other in the order of `where`."""

    groups: tuple[Group, ...]
    where: Tensor  # [K] the row of the pass on which each seed acts
    value: Tensor  # [K] factor of the seed's output: alpha, or 0 where it must not show
    gradient: Tensor  # [K] factor of the gradient it receives: alpha, or 1 in isolation
    isolated: bool  # are there seeds that must not send gradient into the host?
    open_: Tensor  # [K] bool: may gradient flow on into the host?
    gated: Tensor  # [G] which of the K have a learned gate
    gate_rows: Tensor  # [G] rows of the slot's gate pool
    forks: Tensor  # rows of the pass that are copied and appended before the seeds act


class Plan(NamedTuple):
    """A whole pass: the environment of each row, and every slot."""

    environment: Tensor | None  # [V] in order of appearance; None: row n is environment n
    slots: tuple[SlotPlan, ...]
    start: int  # rows before any fork

    def pool_keys(self) -> list[PoolKey]:
        """The pools of seeds and gates that take part."""
        found: list[PoolKey] = []
        for index, slot in enumerate(self.slots):
            found += [(group.kind, index, group.blueprint) for group in slot.groups]
            if len(slot.gated):
                found.append(("gate", index, NOTHING))
        return found


class StepPlan(NamedTuple):
    """A training step: the pass of all hosts, and the one of isolated seeds if there are any."""

    training: Plan
    learners: Mapping[PoolKey, Tensor]  # rows of isolated seeds in each pool, as masks [R, 1]
    isolated: Plan | None = None


P = TypeVar("P", Plan, StepPlan)


def sent_to(plan: P, device: torch.device) -> P:
    """A plan with all its index lists on that device."""
    there: P = tree_map_only(Tensor, lambda tensor: tensor.to(device), plan)
    return there


def index_lists(*plans: Plan | None) -> list[Tensor]:
    """Everything that may change while all sizes stay."""
    return [leaf for leaf in tree_leaves(plans) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class PassRows:
    """The rows of a pass before they are planned: which environment, which seeds at what alpha."""

    environment: Tensor  # [V]
    alpha: Tensor  # [V, S] factor of each seed's output; 0 where it is off
    isolated: Tensor  # [V, S] bool: straight-through, so that the output does not show
    first: Tensor  # [V] the slot at which the row branches off its environment's base row; -1: base
    whole: bool = False  # are the rows every environment once, in order?
    place: Tensor = _NONE  # [Q] the row of each counterfactual that was asked for
    shadow: Tensor | None = None  # [V] blueprints of shadows, on rows that branch off for them

    @classmethod
    def base(cls, life: Lifecycle, *, straight_through: bool = False) -> Self:
        """Every environment, its seeds at their alphas; `straight_through`: and TRAINING ones."""
        isolated = life.at(SeedStage.TRAINING) & straight_through
        first = torch.full((len(isolated),), -1)
        return cls(torch.arange(len(isolated)), life.alpha, isolated, first, whole=True)

    @classmethod
    def alone(cls, life: Lifecycle) -> Self:
        """The environments in which seeds are TRAINING, with those seeds fully on."""
        training = life.at(SeedStage.TRAINING)
        chosen = training.any(dim=1).nonzero()[:, 0]
        alpha = torch.where(training, 1.0, life.alpha)[chosen]
        nothing = torch.zeros_like(alpha, dtype=torch.bool)
        return cls(chosen, alpha, nothing, torch.full((len(chosen),), -1))

    @classmethod
    def counterfactual(cls, life: Lifecycle, environment: Tensor, off: Tensor) -> Self:
        """Every environment's base row, then rows [Q] with the seeds of `off` [Q, S] switched off.

        A row in which nothing that is on is switched off equals its base row; leave it out.
        """
        hosts = life.shape[0]
        alpha = life.alpha[environment]
        first = (off & (alpha > 0)).long().argmax(dim=1)
        order = first.argsort(stable=True)
        alpha = torch.cat([life.alpha, torch.where(off, 0.0, alpha)[order]])
        return cls(
            torch.cat([torch.arange(hosts), environment[order]]),
            alpha,
            torch.zeros_like(alpha, dtype=torch.bool),
            torch.cat([torch.full((hosts,), -1), first[order]]),
            whole=len(environment) == 0,
            place=hosts + order.argsort(),
        )

    @classmethod
    def shadows(cls, life: Lifecycle, where: Tensor) -> Self:
        """The hosts with shadows in `where` [N, S, P], and then a row for each shadow.

        They are sorted by slot, blueprint, environment.
        """
        slots, kinds, owners = where.permute(1, 2, 0).nonzero().unbind(1)
        hosts = owners.unique()
        nothing = torch.full_like(hosts, NOTHING)
        environment, first = torch.cat([hosts, owners]), torch.cat([nothing, slots])
        alpha, shadow = life.alpha[environment], torch.cat([nothing, kinds])
        alike = torch.zeros_like(alpha, dtype=torch.bool)
        return cls(environment, alpha, alike, first, shadow=shadow)


def build_plan(life: Lifecycle, rows: PassRows, pool_rows: Tensor, gate_rows: Tensor) -> Plan:
    """Index lists for a pass. `pool_rows` and `gate_rows` [N, S] say where each seed lives.

    A shadow acts fully on, in the row that branches off at its slot; its weights are at its place
    among those of its kind.
    """
    start = int((rows.first < 0).sum())
    base = torch.zeros(life.shape[0], dtype=torch.int64)  # [N] base rows, which come first
    base[rows.environment[:start]] = torch.arange(start)
    planned = []
    for slot in range(life.shape[1]):
        acting = (rows.alpha[:, slot] > 0) | rows.isolated[:, slot]
        acting &= rows.first <= slot
        where = acting.nonzero()[:, 0]
        environment = rows.environment[where]
        kinds = life.blueprint[environment, slot]
        order = kinds.argsort(stable=True)
        where, environment, kinds = where[order], environment[order], kinds[order]
        groups = [
            Group(int(kind), pool_rows[environment[kinds == kind], slot]) for kind in kinds.unique()
        ]
        isolated = rows.isolated[where, slot]
        value = torch.where(isolated, 0.0, rows.alpha[where, slot])
        gates = gate_rows[environment, slot]
        gated = (gates >= 0).nonzero()[:, 0]
        forking = (rows.first == slot).nonzero()[:, 0]
        if rows.shadow is not None:
            counted = zip(*rows.shadow[forking].unique_consecutive(return_counts=True), strict=True)
            groups += [Group(int(kind), torch.arange(int(n)), "shadow") for kind, n in counted]
            on = torch.ones(len(forking), dtype=value.dtype)
            where, value = torch.cat([where, forking]), torch.cat([value, on])
            isolated = torch.cat([isolated, ~on.bool()])
        planned.append(
            SlotPlan(
                groups=tuple(groups),
                where=where,
                value=value,
                gradient=torch.where(isolated, 1.0, value),
                isolated=bool(isolated.any()),
                open_=~isolated,
                gated=gated,
                gate_rows=gates[gated],
                forks=base[rows.environment[forking]],
            )
        )
    return Plan(None if rows.whole else rows.environment, tuple(planned), start)
