"""What a host remembers between ticks: the last epochs' measurements, and who decides."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.leyline.signals import SERIES, SignalWindow
from esper.tamiyo.controllers.protocol import Controller

FEWEST_CLASSES = 2  # where none are known: losses are then in units of the first one


@dataclass
class GrowthMemory:
    """Of one host."""

    window: SignalWindow
    classes: int | None = None
    unit: float | None = None  # the loss that counts as guessing, where classes do not tell it
    controller: Controller | None = None  # the one that decided last
    made: dict[str, Controller] = field(default_factory=dict)  # by the word that asked for it
    pending: tuple[str, Mapping[str, Tensor]] | None = None  # a saved controller's name and memory
    compared: bool = False  # were val_score and evaluate found to be the same score?
    ended: bool = False

    @property
    def known_classes(self) -> int:
        return self.classes or FEWEST_CLASSES

    def relative(self, loss: float) -> float:
        """A loss so that one of guessing is log(classes), as controllers expect it."""
        if self.classes is not None:
            return loss
        if self.unit is None and math.isfinite(loss) and loss > 0.0:
            self.unit = loss
        return loss / (self.unit or 1.0) * math.log(FEWEST_CLASSES)

    def tensors(self) -> dict[str, Tensor]:
        state = self.window.state_dict()
        return {f"window.{name}": state[name] for name in SERIES}

    @property
    def host_gradient(self) -> float:
        return float(self.window.state_dict()["host_gradient"])

    def notes(self) -> dict[str, Any]:
        return {
            "classes": self.classes,
            "unit": self.unit,
            "host_gradient": None if math.isnan(self.host_gradient) else self.host_gradient,
            "compared": self.compared,
            "ended": self.ended,
        }

    def restore(self, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
        gradient = notes["host_gradient"]
        known = torch.tensor([math.nan if gradient is None else gradient], dtype=torch.float64)
        series = {name: tensors[f"window.{name}"] for name in SERIES}
        self.window.load_state_dict({**series, "host_gradient": known})
        self.classes, self.unit = notes["classes"], notes["unit"]
        self.compared, self.ended = bool(notes["compared"]), bool(notes["ended"])


def flag(value: bool) -> Tensor:
    """[1] bool"""
    return torch.tensor([value])
