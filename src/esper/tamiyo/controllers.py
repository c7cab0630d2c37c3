"""Who decides: anything that turns observations and legality into actions.

Shapes: `N` rows, `F` features.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.legality import Actions, Legality
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.sequences import Hidden


@runtime_checkable
class Controller(Protocol):
    """Decides for all rows at once; `starts` [N] bool marks rows whose episode begins now."""

    def act(self, observations: Tensor, legality: Legality, starts: Tensor) -> Actions: ...


class LearnedController:
    """A trained network that decides and does not learn; it remembers through an episode."""

    def __init__(
        self,
        network: FactoredRecurrentActorCritic,
        *,
        greedy: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        self.network, self.greedy, self.generator = network, greedy, generator
        self._hidden: Hidden | None = None

    def act(self, observations: Tensor, legality: Legality, starts: Tensor) -> Actions:
        choice, _, self._hidden = self.network.get_action(
            observations,
            legality,
            self._hidden,
            starts,
            greedy=self.greedy,
            generator=self.generator,
        )
        return Actions(self.network.space, choice.actions.cpu())
