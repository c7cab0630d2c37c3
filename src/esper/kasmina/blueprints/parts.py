"""Pieces that blueprints are made of: the two kinds of zero point."""

from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from esper.leyline.constants import GATE_LEARNING_RATE_SCALE

M = TypeVar("M", bound=nn.Module)


class ScalarGate(nn.Module):
    """Multiplies by one learned number that starts at zero.

    It learns at ten times the base rate: at the base rate a gated seed that is planted late
    gains about half of what it could.
    """

    learning_rate_scale: ClassVar[float] = GATE_LEARNING_RATE_SCALE

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def zeroed(layer: M) -> M:
    """`layer` with all its parameters at zero. It must be the last of its seed."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    return layer


def learning_rate_scales(module: nn.Module) -> dict[str, float]:
    """Learning-rate multiplier of each parameter, by name.

    A submodule sets one for its own parameters with an attribute `learning_rate_scale`.
    """
    scales: dict[str, float] = {}
    for prefix, part in module.named_modules():
        scale = float(getattr(part, "learning_rate_scale", 1.0))
        for name, _ in part.named_parameters(recurse=False):
            scales[f"{prefix}.{name}" if prefix else name] = scale
    return scales
