"""The common form of Esper's own hosts: a chain of segments with a slot after each but the last."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from esper.leyline.errors import EsperError
from esper.leyline.slots import Layout, SlotConfig, SlotSpec


@dataclass(frozen=True)
class SlotShape:
    """The activations that leave one segment, without the batch."""

    layout: Layout
    channels: int
    extent: tuple[int | None, ...] = ()


class SegmentedHost(nn.Module):
    """Applies `segments` in order; slot k is on the output of `segments[k]`, the last is the head.

    The segments are what a fused population stacks; the slots between them are what it gathers.
    """

    def __init__(self, segments: Sequence[nn.Module], shapes: Sequence[SlotShape]) -> None:
        super().__init__()
        if len(segments) != len(shapes) + 1:
            raise EsperError(
                "A host has one slot after each segment but the last",
                given=f"{len(segments)} segments, {len(shapes)} slots",
            )
        self.segments = nn.ModuleList(segments)
        names = SlotConfig.of_size(len(shapes)).names
        self._specs = tuple(
            SlotSpec(name=name, layout=at.layout, channels=at.channels, extent=at.extent)
            for name, at in zip(names, shapes, strict=True)
        )

    def slot_specs(self) -> tuple[SlotSpec, ...]:
        return self._specs

    def slot_paths(self) -> dict[str, str]:
        """The submodule whose output carries each slot."""
        return {spec.name: f"segments.{index}" for index, spec in enumerate(self._specs)}

    def forward(self, x: Tensor) -> Tensor:
        for segment in self.segments:
            x = segment(x)
        return x
