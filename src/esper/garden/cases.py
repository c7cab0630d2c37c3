"""Cases: single environments, and which of them a row plays next.

That follows from names and numbers alone, never from order or N.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from esper.garden.contexts import Context
from esper.leyline.errors import AgreementError
from esper.leyline.streams import derive_seed

TRAINING_SEEDS = 32  # cases of each context that training draws from, so that controls are few
SELECTION_SEED = 900_000  # where cases begin by which a run chooses its best controller
EVALUATION_SEED = 1_000_000  # evaluation starts here: no case is both trained and evaluated on


@dataclass(frozen=True)
class Case:
    """One environment: a context, and the seed of its weights, its order of data and its drift."""

    context: Context
    seed: int

    def __str__(self) -> str:
        return f"{self.context.name} #{self.seed}"

    @property
    def identity(self) -> int:
        """What all its random streams follow from; equal seeds of two contexts share nothing."""
        return derive_seed(self.context.key, self.seed)


class Deal(Protocol):
    """What gives rows their cases."""

    @property
    def contexts(self) -> Sequence[Context]:
        """All that may come."""

    def __call__(self, row: int, episode: int) -> Case: ...


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A finite pool of cases, dealt so that neighbouring rows have different contexts."""

    contexts: tuple[Context, ...]
    seeds: int = TRAINING_SEEDS  # cases of each context
    seed: int = 0  # of the dealing
    first_row: int = 0  # where the rows are not the first of all that it is dealt to

    def __post_init__(self) -> None:
        if not self.contexts or self.seeds < 1:
            raise AgreementError(
                "There is nothing to draw from",
                given=f"{len(self.contexts)} contexts, {self.seeds} seeds of each",
                valid="at least 1 each",
            )

    def __call__(self, row: int, episode: int) -> Case:
        """The case of the `episode`-th episode of a row."""
        row += self.first_row
        order = _order(self.seed, episode, len(self.contexts))
        context = self.contexts[order[row % len(self.contexts)]]
        return Case(context, derive_seed(self.seed, "draw", row, episode) % self.seeds)

    def pool(self) -> list[Case]:
        """Every case that may come."""
        return [Case(context, seed) for context in self.contexts for seed in range(self.seeds)]


@lru_cache(maxsize=64)
def _order(seed: int, episode: int, contexts: int) -> list[int]:
    """Of the contexts, in the `episode`-th episode of all rows."""
    chance = torch.Generator().manual_seed(derive_seed(seed, "deal", episode))
    return torch.randperm(contexts, generator=chance).tolist()
