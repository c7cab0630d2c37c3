"""A small dense host."""

from torch import nn

from esper.kasmina.hosts.segmented import SegmentedHost, SlotShape
from esper.leyline.slots import Layout


class MlpHost(SegmentedHost):
    """Two hidden layers on [B, C]; slots on the input itself and after each hidden layer."""

    def __init__(self, *, features: int = 40, width: int = 16, classes: int = 10) -> None:
        segments = [
            nn.Identity(),
            nn.Sequential(nn.Linear(features, width), nn.ReLU()),
            nn.Sequential(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, classes),
        ]
        shapes = [SlotShape(Layout.DENSE, channels) for channels in (features, width, width)]
        super().__init__(segments, shapes)
