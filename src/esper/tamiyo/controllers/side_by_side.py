"""Several controllers in one population, each with rows of its own.

Shapes: `N` rows, `K` rows of one controller.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline.legality import Actions, Legality
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.protocol import Controller, Privileged


class SideBySide:
    """Each of the controllers decides for its rows; rows beyond them wait."""

    name = "side by side"

    def __init__(self, parts: Sequence[tuple[Controller, int]]) -> None:
        """`parts`: controllers, and how many rows each has, one after the other."""
        self.parts = [controller for controller, _ in parts]
        ends = torch.tensor([count for _, count in parts]).cumsum(0).tolist()
        self._rows = [
            torch.arange(start, end) for start, end in zip([0, *ends], ends, strict=False)
        ]

    def reset(self, contexts: Sequence[str]) -> None:
        for controller, rows in zip(self.parts, self._rows, strict=True):
            if isinstance(controller, Privileged):
                controller.reset([contexts[row] for row in rows.tolist()])

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        values = Actions.of(legality.space, len(signals)).values
        for controller, rows in zip(self.parts, self._rows, strict=True):
            chosen = controller.act(signals.rows(rows), legality.rows(rows), starts[rows])
            values[rows] = chosen.values
        return Actions(legality.space, values)
