"""A convolutional host for images."""

from collections.abc import Sequence
from math import gcd

from torch import nn

from esper.kasmina.hosts.segmented import SegmentedHost, SlotShape
from esper.kasmina.layers import GroupNorm
from esper.leyline.slots import Layout

GROUPS = 8  # of channels that are normalised together, where the width allows


class Conv2dHost(SegmentedHost):
    """Stages of convolution, normalisation and pooling on [B, C, H, W]; a slot after each."""

    def __init__(
        self,
        *,
        channels_in: int = 3,
        size: int = 32,
        widths: Sequence[int] = (32, 64, 128),
        classes: int = 10,
    ) -> None:
        segments: list[nn.Module] = []
        shapes: list[SlotShape] = []
        given = channels_in
        for width in widths:
            segments.append(
                nn.Sequential(
                    nn.Conv2d(given, width, 3, padding=1, bias=False),
                    GroupNorm(width, position_axes=2, groups=gcd(width, GROUPS)),
                    nn.ReLU(),
                    nn.MaxPool2d(2, ceil_mode=True),
                )
            )
            given, size = width, (size + 1) // 2
            shapes.append(SlotShape(Layout.IMAGE, width, (size, size)))
        segments.append(
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(given, classes))
        )
        super().__init__(segments, shapes)
