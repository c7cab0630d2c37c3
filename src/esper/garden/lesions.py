"""Lesions: silenced weights, which make one stage of a host the one that needs help.

Shapes: `P` parameters of a host.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.kasmina.hosts import SegmentedHost
from esper.leyline.errors import EsperError, UnknownNameError

NARROW_CHANNELS = 2  # that a narrowed stage still has


@dataclass(frozen=True, kw_only=True)
class Lesion:
    """`narrow`: two channels of the stage's output live; `tap`: its kernel's centre lives."""

    kind: str
    stage: int

    def __post_init__(self) -> None:
        if self.kind not in _SILENCE:
            raise UnknownNameError.of("kind of lesion", self.kind, _SILENCE)
        if type(self.stage) is not int or self.stage < 0:
            raise EsperError(
                "A lesion's stage is a whole number",
                given=repr(self.stage),
                valid="0 for the host's first stage, and so on",
            )

    def __str__(self) -> str:
        return f"{self.kind} at stage {self.stage}"


def lesion_mask(host: SegmentedHost, lesion: Lesion | None) -> Tensor:
    """[P] bool over the host's parameters, in the order of its names: True where one lives.

    With the others at exactly zero, a narrowed host computes what a host with two channels at that
    stage would, and one with a single tap what a kernel of size 1 would.
    """
    live = {
        name: torch.ones(parameter.shape, dtype=torch.bool)
        for name, parameter in host.named_parameters()
    }
    if lesion is not None:
        layer, name = _layer_of(host, lesion)
        _SILENCE[lesion.kind](layer, live[f"{name}.weight"], live.get(f"{name}.bias"))
    return torch.cat([part.flatten() for part in live.values()])


def _layer_of(host: SegmentedHost, lesion: Lesion) -> tuple[nn.Module, str]:
    """The layer of the stage that can be lesioned, and its name in the host."""
    wanted = _LAYERS[lesion.kind]
    found: dict[int, tuple[nn.Module, str]] = {}
    for stage in range(len(host.slot_specs())):  # all but the head
        for name, layer in host.segments[stage].named_modules():
            if isinstance(layer, wanted):
                path = f"segments.{stage}.{name}" if name else f"segments.{stage}"
                found.setdefault(stage, (layer, path))
    if lesion.stage not in found:
        what = "convolution" if nn.Linear not in wanted else "convolution or dense layer"
        raise EsperError(
            f"This host cannot have a lesion {str(lesion)!r}",
            given=f"{type(host).__name__}, whose stage {lesion.stage} has no {what}",
            valid="stage " + " or ".join(map(str, found)) if found else f"a host with a {what}",
        )
    return found[lesion.stage]


def _narrow(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    weight[NARROW_CHANNELS:] = False
    if bias is not None:
        bias[NARROW_CHANNELS:] = False


def _tap(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    assert isinstance(layer, nn.Conv1d)
    centre = layer.kernel_size[0] // 2
    weight[..., :centre] = False
    weight[..., centre + 1 :] = False


_SILENCE: dict[str, Callable[[nn.Module, Tensor, Tensor | None], None]] = {
    "narrow": _narrow,
    "tap": _tap,
}
_LAYERS: dict[str, tuple[type[nn.Module], ...]] = {
    "narrow": (nn.Conv1d, nn.Linear),
    "tap": (nn.Conv1d,),
}
