"""What blueprints are made of: the two kinds of zero point, and forms that several families share.

Shapes: `B` batch, `C` channels, `T` tokens.
"""

from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from esper.kasmina.layers import SelfAttention
from esper.leyline.constants import GATE_LEARNING_RATE_SCALE

M = TypeVar("M", bound=nn.Module)

NEGATIVE_SLOPE = 0.1  # a plain ReLU can be dead at birth behind a host's ReLU, and stays dead


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


class Replace(nn.Module):
    """Turns activations into `transform(h)`: a gate times the difference, nothing at gate 0."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform
        self.gate = ScalarGate()

    def forward(self, h: Tensor) -> Tensor:
        replaced: Tensor = self.gate(self.transform(h) - h)
        return replaced


class Rescale(nn.Module):
    """Scales activations by 1 + tanh(strength(h)), so between 0 and 2 times.

    `strength` ends in a zeroed layer: tanh(0) is exactly 0 and its slope there is 1.
    """

    def __init__(self, strength: nn.Module) -> None:
        super().__init__()
        self.strength = strength

    def forward(self, h: Tensor) -> Tensor:
        scaled: Tensor = h * self.strength(h).tanh()
        return scaled


class Attend(nn.Module):
    """Normalised tokens [B, T, C] attend to each other through one head of half the width."""

    def __init__(self, channels: int, norm: nn.Module, *, causal: bool) -> None:
        super().__init__()
        self.norm = norm
        self.attention = SelfAttention(channels, inner=reduced(channels, 2), causal=causal)
        zeroed(self.attention.out)

    def forward(self, h: Tensor) -> Tensor:
        attended: Tensor = self.attention(self.norm(h))
        return attended


class Transposed(nn.Module):
    """Applies a body written for [B, T, C] to [B, C, T], or the reverse."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, h: Tensor) -> Tensor:
        turned: Tensor = self.body(h.transpose(1, 2)).transpose(1, 2)
        return turned


def activation() -> nn.Module:
    return nn.LeakyReLU(NEGATIVE_SLOPE)


def reduced(channels: int, factor: int) -> int:
    """A fraction of the channels, at least one."""
    return max(1, channels // factor)
