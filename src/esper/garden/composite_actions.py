"""Every composite decision as one number, for learners that know one discrete action.

WAIT is 0; then come GERMINATE with every slot, blueprint and blend, and the other ops with every
slot: each op with the heads that matter for it, as the head table says.

Shapes: `N` rows, `A` composite actions, `H` heads.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from esper.leyline.errors import ActionError
from esper.leyline.heads import CANONICAL_ACTION, ActionSpace
from esper.leyline.legality import Actions, Legality
from esper.leyline.ops import LifecycleOp


@dataclass(frozen=True)
class CompositeActions:
    """The composite actions of a space, in a fixed order."""

    space: ActionSpace

    @cached_property
    def table(self) -> Tensor:
        """[A, H]: the choice of every head, canonical where it does not matter."""
        rows: list[tuple[int, ...]] = []
        for op, matters in enumerate(self.space.relevance):
            choices = [
                range(size) if relevant else (CANONICAL_ACTION,)
                for size, relevant in zip(self.space.sizes[1:], matters[1:], strict=True)
            ]
            rows += [(op, *rest) for rest in product(*choices)]
        return torch.tensor(rows)

    @cached_property
    def _numbers(self) -> dict[tuple[int, ...], int]:
        return {tuple(row): number for number, row in enumerate(self.table.tolist())}

    def __len__(self) -> int:
        return len(self.table)

    def decode(self, numbers: Tensor) -> Actions:
        """Decisions [N, H] from their numbers [N]."""
        wrong = (numbers < 0) | (numbers >= len(self))
        if bool(wrong.any()):
            raise ActionError(
                f"Row {int(wrong.nonzero()[0, 0])} got a number that is no action",
                given=int(numbers[wrong][0]),
                valid=f"0 to {len(self) - 1}",
            )
        return Actions(self.space, self.table[numbers])

    def encode(self, actions: Actions) -> Tensor:
        """Their numbers [N]."""
        rows = actions.canonical().values.tolist()
        return torch.tensor([self._numbers[tuple(row)] for row in rows], dtype=torch.int64)

    def masks(self, legality: Legality) -> Tensor:
        """[N, A] bool: which are legal now, exactly."""
        legal = torch.ones(legality.hosts, len(self), dtype=torch.bool)
        matters = torch.tensor(self.space.relevance)[self.table[:, 0]]  # [A, H]
        for position, name in enumerate(self.space.names):
            if name in legality.masks:
                earlier = [self.space.index(each) for each in self.space.given[position]]
                rows = torch.arange(legality.hosts)[:, None]
                places = (rows, *(self.table[:, each] for each in (*earlier, position)))
                open_ = legality.masks[name][places]  # [N, A]
                legal &= open_ | ~matters[:, position]
        return legal

    def describe(self, number: int) -> str:
        """An action in words, as in `GERMINATE slot=0 blueprint=3 blend=0`."""
        op, *rest = self.table[number].tolist()
        named = zip(self.space.names[1:], rest, self.space.relevance[op][1:], strict=True)
        parts = [f"{name}={value}" for name, value, relevant in named if relevant]
        return " ".join([LifecycleOp(op).name, *parts])
