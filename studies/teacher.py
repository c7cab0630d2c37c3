"""The oracle as a teacher: it says what it would do in a state that somebody else brought about.

Shapes: `N` environments, `S` slots, `A` arms of a schedule.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.leyline import NOTHING, Actions, Blend, Legality, LifecycleOp
from esper.leyline.errors import AgreementError, UnknownNameError
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.proposals import (
    at_best_slot,
    epochs_to_permanence,
    first_legal,
    in_time,
)
from esper.tamiyo.controllers.schedules import NEVER, Oracle, PlanArrays, Planned


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
        names = {context: f"{context} unchanged" for context in before}
        super().__init__({**table, **{names[context]: plan for context, plan in before.items()}})
        self._before = {context: self._numbers[name] for context, name in names.items()}
        self._unchanged_index = torch.zeros(0, dtype=torch.int64)  # [N]
        self._change = torch.zeros(0, dtype=torch.int64)  # [N] epoch; -1: never

    def reset(self, contexts: Sequence[str]) -> None:
        super().reset(contexts)
        numbers = self._numbers | self._before
        self._unchanged_index = torch.tensor([numbers[context] for context in contexts])
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

    def _rows(self, signals: Signals) -> Tensor:
        rows = super()._rows(signals)
        changed = (self._change >= 0) & (signals.lifecycle.epoch > self._change)
        return torch.where(changed, rows, self._unchanged_index)

    @staticmethod
    def _follow(plan: PlanArrays, signals: Signals, legality: Legality) -> Actions:
        """Make permanent and blend in what belongs to the plan; take out what does not; plant what
        is due and could still become permanent before the score is taken."""
        life = signals.lifecycle
        due = life.epoch[:, None] >= plan.epoch  # [N, A]
        wanted = torch.full(life.shape, NOTHING)  # [N, S] blueprint that the plan has for each slot
        for arm in range(due.shape[1]):
            rows = (plan.epoch[:, arm] < NEVER).nonzero()[:, 0]
            wanted[rows, plan.slot[rows, arm]] = plan.blueprint[rows, arm]
            immediate = plan.blend[:, arm] == Blend.IMMEDIATE
            train = plan.train.gather(1, plan.slot[:, arm : arm + 1])[:, 0]  # [N]
            patient = epochs_to_permanence(Blend.RAMP, 0) + train  # a gate takes as long
            needed = torch.where(immediate, epochs_to_permanence(Blend.IMMEDIATE), patient)
            due[:, arm] &= in_time(signals, needed)
        right = life.occupied & (life.blueprint == wanted)
        ripe = right & (life.epochs_in_stage >= plan.train)
        wrong = life.occupied & ~right
        proposals = [
            at_best_slot(legality, LifecycleOp.FOSSILIZE, right, life.contribution),
            at_best_slot(legality, LifecycleOp.ADVANCE, ripe, life.contribution),
            at_best_slot(legality, LifecycleOp.PRUNE, wrong, life.contribution),
            *plan.plants(due),
        ]
        return first_legal(legality, proposals)
