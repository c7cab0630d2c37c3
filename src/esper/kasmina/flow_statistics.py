"""What flows past a slot, in four numbers: how samples differ in size, how many units are silent,
how peaked the values are, and how rough they are from place to place.

They say what a host lacks while its scores still look alike: samples of different loudness want a
norm, sparse peaks far apart want something that looks at all places at once.

Shapes: `V` networks, `B` samples, `K` statistics.
"""

import torch
from torch import Tensor

from esper.leyline.signals import FLOW_STATISTICS

TINY = 1e-12


def flow_statistics(h: Tensor, channel_axis: int) -> Tensor:
    """[V, K] of activations [V, B, ...]; `channel_axis` counts from the samples' axis.

    Without an axis of places there is no roughness: NaN.
    """
    h = h.float()
    inner = tuple(range(2, h.dim()))
    square = h.square()
    power = square.mean(inner) + TINY  # [V, B]
    spread = 0.5 * power.log().std(1, correction=0)
    silent = (square < 1e-6 * power.mean(1).view(-1, *(1,) * (h.dim() - 1))).float()
    whole = tuple(range(1, h.dim()))
    peaks = (square.square().mean(whole) + TINY) / (square.mean(whole) + TINY).square()
    named = {
        "spread": spread,
        "silence": silent.mean(whole),
        "peaks": peaks.log10(),
        "roughness": torch.full_like(spread, torch.nan),
    }
    places = [axis for axis in inner if axis != channel_axis + 1 and h.shape[axis] > 1]
    if places:  # half the mean squared step between neighbours / the variance over places
        steps = h.diff(dim=places[-1]).square().mean(whole)
        variance = h.var(dim=places[-1], correction=0).mean(whole[:-1])
        named["roughness"] = 0.5 * (steps + TINY) / (variance + TINY)
    return torch.stack([named[name] for name in FLOW_STATISTICS], 1)
