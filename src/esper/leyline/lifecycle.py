"""Lifecycle state as arrays over hosts and slots, and the record of what changed.

The same arrays describe one wrapped model (N = 1) and a population of a thousand fused hosts.
They are small and live on the CPU; the engine copies alphas to its device once per epoch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from esper.leyline.errors import AgreementError
from esper.leyline.ops import cause_name
from esper.leyline.stages import OCCUPIED_STAGES, TRANSITIONS, SeedStage, check_transition

# N hosts, S slots, M changes

NOTHING = -1  # blueprint or blend index of an empty slot
_EMPTY = {"stage": SeedStage.DORMANT, "blueprint": NOTHING, "blend": NOTHING}

SlotIntegers = Annotated[Tensor, 2, torch.int64]  # [N, S]
SlotReals = Annotated[Tensor, 2, torch.float64]  # [N, S]
SlotFlags = Annotated[Tensor, 2, torch.bool]  # [N, S]
HostIntegers = Annotated[Tensor, 1, torch.int64]  # [N]
HostReals = Annotated[Tensor, 1, torch.float64]  # [N]
HostFlags = Annotated[Tensor, 1, torch.bool]  # [N]

_ALLOWED = torch.tensor(
    [[after in TRANSITIONS[before] for after in SeedStage] for before in SeedStage]
)
_OCCUPIED = torch.tensor([stage in OCCUPIED_STAGES for stage in SeedStage])


@dataclass(frozen=True)
class Lifecycle:
    """Everything that gates, masks, features and rewards know of the slots."""

    stage: SlotIntegers
    blueprint: SlotIntegers  # index in the catalogue, NOTHING when empty
    blend: SlotIntegers
    alpha: SlotReals
    age: SlotIntegers  # epochs since planting
    epochs_in_stage: SlotIntegers
    embargo: SlotIntegers  # epochs of rest left
    params: SlotIntegers  # parameters of the seed that exists here
    contribution: SlotReals  # score with the seed minus without it
    contribution_known: SlotFlags
    gradient: SlotReals  # gradient norm of the seed over the last epoch
    gradient_known: SlotFlags
    loss_rise: HostReals  # relative change of the training loss over the last epoch
    loss_rise_known: HostFlags
    epoch: HostIntegers  # epochs lived
    interventions: HostIntegers  # decisions other than WAIT

    @classmethod
    def dormant(cls, hosts: int, slots: int) -> "Lifecycle":
        arrays = {}
        for field in fields(cls):
            axes, dtype = field.type.__metadata__  # type: ignore[union-attr]
            filling = _EMPTY.get(field.name, 0)
            arrays[field.name] = torch.full((hosts, slots)[:axes], filling, dtype=dtype)
        return cls(**arrays)

    @property
    def shape(self) -> tuple[int, int]:
        return self.stage.shape[0], self.stage.shape[1]

    @property
    def occupied(self) -> Tensor:
        """[N, S] bool: does a seed exist here?"""
        return _OCCUPIED[self.stage]

    def at(self, *stages: SeedStage) -> Tensor:
        """[N, S] bool: is the slot in one of these stages?"""
        members = sum(1 << stage for stage in stages)
        return (members >> self.stage & 1).bool()

    def rows(self, index: Tensor) -> "Lifecycle":
        """A copy of the hosts in `index`."""
        return Lifecycle(**{name: own[index].clone() for name, own in self.state_dict().items()})

    def with_rows(self, index: Tensor, other: "Lifecycle") -> "Lifecycle":
        """A copy in which the hosts in `index` are replaced by those of `other`."""
        pairs = zip(self.state_dict().items(), other.state_dict().values(), strict=True)
        return Lifecycle(**{name: own.index_put((index,), new) for (name, own), new in pairs})

    def measured(
        self,
        *,
        contribution: Tensor | None = None,
        gradient: Tensor | None = None,
        loss_rise: Tensor | None = None,
    ) -> "Lifecycle":
        """A copy with fresh measurements; NaN marks what was not measured.

        Only seeds that exist can have a contribution or a gradient.
        """
        fresh = {"contribution": contribution, "gradient": gradient, "loss_rise": loss_rise}
        changed = {}
        for name, value in fresh.items():
            if value is not None:
                known = ~value.isnan() if name == "loss_rise" else ~value.isnan() & self.occupied
                changed[name] = torch.where(known, value, 0.0).double()
                changed[f"{name}_known"] = known
        return replace(self, **changed)

    def state_dict(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "Lifecycle":
        names = {field.name for field in fields(cls)}
        if set(state) != names:
            raise AgreementError(
                "A stored lifecycle does not have this version's arrays",
                given=f"missing {sorted(names - set(state))}, extra {sorted(set(state) - names)}",
                valid=sorted(names),
            )
        return cls(**{name: tensor.clone() for name, tensor in state.items()})


class TransitionRecord(NamedTuple):
    """One stage change, for people."""

    host: int
    slot: int
    before: SeedStage
    after: SeedStage
    cause: str
    reason: str


# What opens the gate into a stage: the array it looks at, if any, and how that is said.
_WHY = {
    SeedStage.GERMINATED: ("params", "its {:.0f} parameters fit the budget"),
    SeedStage.TRAINING: (None, "what is planted trains at once"),
    SeedStage.BLENDING: ("gradient", "the seed's gradient norm is {:.3g}"),
    SeedStage.HOLDING: ("alpha", "alpha has reached {:g}"),
    SeedStage.FOSSILIZED: ("contribution", "the seed contributes {:.4g}"),
    SeedStage.PRUNED: ("contribution", "the seed contributed {:.4g}"),
    SeedStage.EMBARGOED: ("alpha", "alpha has reached {:g}"),
    SeedStage.RESETTING: (None, "the slot has rested"),
    SeedStage.DORMANT: (None, "the slot is free again"),
}
_UNMEASURED = {
    SeedStage.BLENDING: "no gradient was asked for",
    SeedStage.FOSSILIZED: "no contribution was asked for",
    SeedStage.PRUNED: "its contribution was not measured",
}


@dataclass(frozen=True)
class Transitions:
    """Stage changes in the order in which they happened, as arrays of one length M."""

    host: Tensor  # [M] int64
    slot: Tensor  # [M] int64
    before: Tensor  # [M] int64
    after: Tensor  # [M] int64
    cause: Tensor  # [M] int64: a LifecycleOp (>= 0) or a Cause (< 0)
    measure: Tensor  # [M] float64: what the gate looked at; NaN: it was not measured

    @classmethod
    def none(cls) -> "Transitions":
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(nothing, nothing, nothing, nothing, nothing, nothing.double())

    @classmethod
    def joined(cls, parts: Sequence["Transitions"]) -> "Transitions":
        """All of them, one after the other."""
        if not parts:
            return cls.none()
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def __add__(self, later: "Transitions") -> "Transitions":
        return Transitions.joined([self, later])

    def of_hosts(self, chosen: Tensor) -> "Transitions":
        """Those of the hosts in `chosen` [N] bool."""
        kept = chosen[self.host]
        return Transitions(*(getattr(self, f.name)[kept] for f in fields(self)))

    def __repr__(self) -> str:
        return f"<Transitions {len(self)} stage changes>"

    def __len__(self) -> int:
        return int(self.host.shape[0])

    def reasons(self) -> list[str]:
        """[M]: why each gate was open."""
        pairs = zip(self.after.tolist(), self.measure.tolist(), strict=True)
        return [_WHY[s][1].format(seen) if seen == seen else _UNMEASURED[s] for s, seen in pairs]

    def __iter__(self) -> Iterator[TransitionRecord]:
        arrays = (self.host, self.slot, self.before, self.after, self.cause)
        rows = zip(*(array.tolist() for array in arrays), self.reasons(), strict=True)
        for host, slot, before, after, cause, reason in rows:
            yield TransitionRecord(
                host, slot, SeedStage(before), SeedStage(after), cause_name(cause), reason
            )


def move(
    life: Lifecycle, where: Tensor, after: SeedStage, cause: int
) -> tuple[Lifecycle, Transitions]:
    """Move the slots in `where` [N, S] to `after`, or raise if the table forbids any of them."""
    places = hosts, slots = where.nonzero(as_tuple=True)  # [M] each: few of all, as a rule
    before = life.stage[places]
    allowed = _ALLOWED[:, after][before]
    if not bool(allowed.all()):
        host, slot = (int(index[~allowed][0]) for index in places)
        check_transition(SeedStage(int(life.stage[host, slot])), after, f"host {host} slot {slot}")
    seen = torch.zeros(len(hosts), dtype=torch.float64)
    if name := _WHY[after][0]:
        seen = getattr(life, name)[places].double()
        known: Tensor | None = getattr(life, f"{name}_known", None)
        seen = seen if known is None else seen.masked_fill(~known[places], torch.nan)
    afters, causes = torch.full_like(hosts, int(after)), torch.full_like(hosts, int(cause))
    record = Transitions(hosts, slots, before, afters, causes, seen)
    moved = replace(
        life,
        stage=life.stage.masked_fill(where, int(after)),
        epochs_in_stage=life.epochs_in_stage.masked_fill(where, 0),
    )
    return moved, record
