"""A small convolutional host for sequences."""

from torch import nn

from esper.kasmina.hosts.segmented import SegmentedHost, SlotShape
from esper.leyline.slots import Layout

STRIDE = 2


class Conv1dHost(SegmentedHost):
    """Strided convolutions without normalisation on [B, L] or [B, 1, L]; a slot after each."""

    def __init__(
        self,
        *,
        length: int = 40,
        channels: int = 8,
        kernel: int = 5,
        stages: int = 3,
        classes: int = 10,
    ) -> None:
        padding = kernel // 2
        segments: list[nn.Module] = []
        shapes: list[SlotShape] = []
        given, size = 1, length
        for stage in range(stages):
            # Accepts both ranks without looking at the input, so that the host can be traced.
            entry = [nn.Flatten(1), nn.Unflatten(1, (1, length))] if stage == 0 else []
            convolution = nn.Conv1d(given, channels, kernel, stride=STRIDE, padding=padding)
            segments.append(nn.Sequential(*entry, convolution, nn.ReLU()))
            given, size = channels, (size + 2 * padding - kernel) // STRIDE + 1
            shapes.append(SlotShape(Layout.SEQUENCE, channels, (size,)))
        segments.append(nn.Sequential(nn.Flatten(1), nn.Linear(channels * size, classes)))
        super().__init__(segments, shapes)
