"""Growing by a plan that was made before: the same for all, or by context for the oracle.

Shapes: `N` environments, `S` slots, `A` arms of a schedule.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.leyline import Actions, Blend, BlueprintCatalogue, Legality, LifecycleOp
from esper.leyline.constants import DEFAULT_MIN_TRAINING_EPOCHS
from esper.leyline.errors import AgreementError, DataError, EsperError, require_known
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.proposals import Proposal, first_legal, tended
from esper.tamiyo.controllers.specs import DEFAULT_ARM_BLEND, DEFAULT_ARM_EPOCH, Arm, spec_of

Schedule = tuple[Arm, ...]  # empty: wait
Planned = Arm | Sequence[Arm] | None


def as_schedule(plan: Planned) -> Schedule:
    """One arm, several or none, as a schedule.

    A slot carries one seed in an episode: a second arm there would never be planted.
    """
    arms = () if plan is None else (plan,) if isinstance(plan, Arm) else tuple(plan)
    if len({arm.slot for arm in arms}) != len(arms):
        raise EsperError("A schedule can plant a slot only once", given=", ".join(map(str, arms)))
    return arms


class PlanArrays(NamedTuple):
    """Schedules as arrays; padding has an epoch that never comes."""

    slot: Tensor  # [N, A] int64
    blueprint: Tensor  # [N, A] int64
    blend: Tensor  # [N, A] int64
    epoch: Tensor  # [N, A] int64
    train: Tensor  # [N, S] int64

    def rows(self, index: Tensor) -> "PlanArrays":
        return PlanArrays(*(array[index] for array in self))

    def plants(self, due: Tensor) -> list[Proposal]:
        """Plant the arms that are `due` [N, A], earlier ones first."""
        columns = (array.unbind(1) for array in (self.slot, self.blueprint, self.blend))
        return [
            Proposal(where, LifecycleOp.GERMINATE, *place)
            for where, *place in zip(due.unbind(1), *columns, strict=True)
        ]


NEVER = torch.iinfo(torch.int64).max


@lru_cache(maxsize=256)
def plans_of(schedules: tuple[Schedule, ...], catalogue: BlueprintCatalogue) -> PlanArrays:
    """A row for each schedule."""
    rows, arms = len(schedules), max((len(schedule) for schedule in schedules), default=0)
    numbers = torch.zeros(4, rows, arms, dtype=torch.int64)
    numbers[3] = NEVER
    train = torch.full((rows, len(catalogue.slots)), DEFAULT_MIN_TRAINING_EPOCHS)
    for row, schedule in enumerate(schedules):
        for place, arm in enumerate(sorted(schedule, key=lambda arm: arm.epoch)):
            slot, blueprint = arm.place(catalogue)
            planted = (slot, blueprint, Blend.named(arm.blend), arm.epoch)
            numbers[:, row, place] = torch.tensor(planted)
            train[row, slot] = arm.train
    slots, blueprints, blends, epochs = numbers.unbind(0)
    return PlanArrays(slots, blueprints, blends, epochs, train)


def follow(plan: PlanArrays, signals: Signals, legality: Legality) -> Actions:
    """Plant what is due, earlier arms first; what grows is brought on as soon as legal."""
    due = signals.lifecycle.epoch[:, None] >= plan.epoch  # [N, A]
    return first_legal(legality, [*tended(signals, legality, plan.train), *plan.plants(due)])


@dataclass(frozen=True, kw_only=True)
class FixedSettings:
    """The arms of a schedule as lists; a list of one serves all arms."""

    slot: tuple[str, ...]
    blueprint: tuple[str, ...]
    blend: tuple[str, ...] = (DEFAULT_ARM_BLEND,)
    epoch: tuple[int, ...] = (DEFAULT_ARM_EPOCH,)
    train: tuple[int, ...] = (DEFAULT_MIN_TRAINING_EPOCHS,)

    @classmethod
    def of(cls, arms: Sequence[Arm]) -> "FixedSettings":
        columns: dict[str, Any] = {}
        for field in fields(cls):
            values = tuple(getattr(arm, field.name) for arm in arms)
            columns[field.name] = values[:1] if len(set(values)) == 1 else values
        return cls(**columns)

    def arms(self) -> Schedule:
        lengths = [len(column) for column in vars(self).values()]
        count = max(lengths)
        if not {1, count}.issuperset(lengths):
            raise EsperError(
                "The lists of a schedule differ in length",
                given=", ".join(map(str, lengths)),
                valid=f"1 or {count} values each",
            )
        rows = zip(*(each * (count // len(each)) for each in vars(self).values()), strict=True)
        return tuple(Arm(**dict(zip(vars(self), row, strict=True))) for row in rows)


class _Scheduled(ABC):
    """Rows that each follow one of a few schedules."""

    def __init__(self, schedules: Iterable[Schedule]) -> None:
        self.schedules = tuple(schedules)

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        plans_of(self.schedules, catalogue)
        for arm in (arm for schedule in self.schedules for arm in schedule):
            arm.require_in_time(horizon)

    @abstractmethod
    def _rows(self, signals: Signals) -> Tensor:
        """[N]: the number of each row's schedule."""

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        # Only those that are followed now: a table may hold schedules of other hosts.
        numbers, row = self._rows(signals).unique(return_inverse=True)
        followed = tuple(self.schedules[number] for number in numbers.tolist())
        return self._follow(plans_of(followed, signals.catalogue).rows(row), signals, legality)

    _follow = staticmethod(follow)  # a teacher in `studies` has another way


class FixedSchedule(_Scheduled):
    """Plants each arm at its epoch, or as soon after as it is legal, and makes it permanent."""

    def __init__(self, arms: Planned) -> None:
        self.arms = as_schedule(arms)
        super().__init__([self.arms])
        if not self.arms:
            raise EsperError("A schedule needs an arm", given="none", fix="use controller 'never'")
        self.name = spec_of("fixed", FixedSettings.of(self.arms))

    def _rows(self, signals: Signals) -> Tensor:
        return torch.zeros(len(signals), dtype=torch.int64)


class RowSchedule(_Scheduled):
    """A schedule of its own for every row, to measure many at once; rows beyond them wait."""

    name = "rows"

    def __init__(self, planned: Sequence[Planned]) -> None:
        wanted = [as_schedule(plan) for plan in planned]
        numbers = {schedule: number for number, schedule in enumerate(dict.fromkeys([(), *wanted]))}
        super().__init__(numbers)
        self._index = torch.tensor([numbers[schedule] for schedule in wanted], dtype=torch.int64)

    def _rows(self, signals: Signals) -> Tensor:
        beyond = len(signals) - len(self._index)
        if beyond < 0:
            raise AgreementError(
                "There are more schedules than environments",
                given=f"{len(self._index)} schedules",
                valid=f"at most {len(signals)}",
            )
        return torch.cat([self._index, torch.zeros(beyond, dtype=torch.int64)])


class Oracle(_Scheduled):
    """Knows the context of every row and follows the schedule that its table has for it."""

    name = "oracle"

    def __init__(self, table: Mapping[str, Planned]) -> None:
        super().__init__(as_schedule(plan) for plan in table.values())
        self._numbers = {context: number for number, context in enumerate(table)}
        self._index = torch.zeros(0, dtype=torch.int64)  # [N]
        text = repr([(name, self.schedules[number]) for name, number in self._numbers.items()])
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()  # of the table

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        """Epochs only: each context may have a host of its own."""
        for arm in (arm for schedule in self.schedules for arm in schedule):
            arm.require_in_time(horizon)

    def reset(self, contexts: Sequence[str]) -> None:
        for context in contexts:
            require_known("context of the oracle's table", context, self._numbers)
        self._index = torch.tensor([self._numbers[context] for context in contexts])

    def _rows(self, signals: Signals) -> Tensor:
        if len(self._index) != len(signals):
            raise AgreementError(
                "The oracle does not know the context of every environment",
                given=f"{len(self._index)} contexts for {len(signals)} environments",
                fix="call reset(contexts) before an episode",
            )
        return self._index


@dataclass(frozen=True, kw_only=True)
class OracleSettings:
    table: str  # a JSON file: context -> list of arms, empty for waiting

    def oracle(self) -> Oracle:
        """The one of the file: `{"context": [{"slot": …, "blueprint": …, …}], …}`."""
        path = Path(self.table)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            table = {str(name): tuple(map(Arm.from_dict, arms)) for name, arms in stored.items()}
        except FileNotFoundError:
            raise DataError("There is no such oracle table", given=path) from None
        except (ValueError, TypeError, AttributeError) as wrong:
            raise DataError(
                "An oracle table cannot be read",
                given=f"{path}: {wrong}",
                valid='{"context": [{"slot": "early", "blueprint": "conv", "epoch": 5}]}',
            ) from None
        return Oracle(table)
