"""The oracle as a teacher: what it would do in a state that somebody else brought about.

Shapes: `N` rows, `S` slots, `A` arms of a schedule.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.leyline.errors import AgreementError, UnknownNameError
from esper.leyline.legality import Actions, Legality
from esper.leyline.lifecycle import NOTHING
from esper.leyline.ops import Blend, LifecycleOp
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.proposals import (
    Proposal,
    at_best_slot,
    epochs_to_permanence,
    first_legal,
    in_time,
    open_slots,
)
from esper.tamiyo.controllers.schedules import Oracle, PlanArrays, Planned, plans_of


class Teacher(Oracle):
    """Brings on what its table has for the context, whoever planted it, prunes everything else,
    and plants what is missing as long as it can still become permanent.

    It teaches what can be seen: as long as a task has not changed, nobody can know that it will,
    and the teacher does what is right for the task as it is.
    """

    name = "teacher"

    def __init__(
        self, table: Mapping[str, Planned], before: Mapping[str, Planned] | None = None
    ) -> None:
        """`before`: what to do in contexts whose task changes, as long as it has not."""
        before = before or {}
        for context in before:
            if context not in table:
                raise UnknownNameError.of("context of the teacher's table", context, table)
        super().__init__({**table, **{_unchanged(name): plan for name, plan in before.items()}})
        self._before = set(before)
        self._unchanged_index = torch.zeros(0, dtype=torch.int64)  # [N]
        self._change = torch.zeros(0, dtype=torch.int64)  # [N] epoch; -1: never

    def reset(self, contexts: Sequence[str]) -> None:
        super().reset(contexts)
        self._unchanged_index = torch.tensor(
            [self._numbers[_unchanged(name) if name in self._before else name] for name in contexts]
        )
        self._change = torch.full((len(contexts),), -1)

    def expect_changes(self, epochs: Tensor) -> None:
        """[N]: with which epoch each row's task changes; -1: it does not."""
        if epochs.shape != self._change.shape:
            raise AgreementError(
                "The teacher was told of changes in other rows than it knows",
                given=list(epochs.shape),
                valid=list(self._change.shape),
                fix="call reset(contexts) first",
            )
        self._change = epochs.clone()

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        rows = self._rows(len(signals))
        changed = (self._change >= 0) & (signals.lifecycle.epoch > self._change)
        followed_now = torch.where(changed, rows, self._unchanged_index)
        numbers, row = followed_now.unique(return_inverse=True)
        followed = tuple(self.schedules[number] for number in numbers.tolist())
        plan = plans_of(followed, signals.catalogue).rows(row)
        return first_legal(legality, [*_tended(plan, signals, legality), *_planted(plan, signals)])


def _unchanged(context: str) -> str:
    return f"{context} unchanged"


def _tended(plan: PlanArrays, signals: Signals, legality: Legality) -> list[Proposal]:
    """Make permanent and blend in what belongs to the plan; take out what does not."""
    life = signals.lifecycle
    wanted = torch.full(life.shape, NOTHING)  # [N, S] blueprint that the plan has for each slot
    known = plan.epoch < torch.iinfo(torch.int64).max
    for arm in range(plan.slot.shape[1]):
        rows = known[:, arm].nonzero()[:, 0]
        wanted[rows, plan.slot[rows, arm]] = plan.blueprint[rows, arm]
    right = life.occupied & (life.blueprint == wanted)
    ripe = life.epochs_in_stage >= plan.train

    def where(op: LifecycleOp, chosen: Tensor) -> Proposal:
        return at_best_slot(op, open_slots(legality, op) & chosen, life.contribution)

    return [
        where(LifecycleOp.FOSSILIZE, right),
        where(LifecycleOp.ADVANCE, right & ripe),
        where(LifecycleOp.PRUNE, life.occupied & ~right),
    ]


def _planted(plan: PlanArrays, signals: Signals) -> list[Proposal]:
    """What is due and could still become permanent before the score is taken."""
    proposals = []
    for arm in range(plan.slot.shape[1]):
        due = signals.lifecycle.epoch >= plan.epoch[:, arm]
        train = plan.train.gather(1, plan.slot[:, arm : arm + 1])[:, 0]  # [N]
        for blend in Blend:
            longer = 0 if blend is Blend.IMMEDIATE else train - 1  # than the shortest training
            soon = in_time(signals, epochs_to_permanence(blend, 1) + longer)
            here = due & (plan.blend[:, arm] == blend) & soon
            proposals.append(
                Proposal(here, LifecycleOp.GERMINATE, plan.slot[:, arm], plan.blueprint[:, arm],
                         int(blend))
            )  # fmt: skip
    return proposals
