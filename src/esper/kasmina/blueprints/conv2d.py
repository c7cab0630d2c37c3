"""Seeds for images [B, C, H, W]."""

from torch import nn

from esper.kasmina.blueprints.bodies import Replace, Rescale, activation, reduced
from esper.kasmina.blueprints.parts import zeroed
from esper.kasmina.blueprints.registry import blueprint
from esper.kasmina.layers import GroupNorm
from esper.leyline.slots import Family, SlotSpec

KERNEL = 3


@blueprint("norm", Family.CONV2D)
def norm(spec: SlotSpec) -> nn.Module:
    """Normalises each sample over channels and positions."""
    return Replace(GroupNorm(spec.channels, position_axes=2))


@blueprint("squeeze", Family.CONV2D)
def squeeze(spec: SlotSpec) -> nn.Module:
    """Rescales each channel by what the whole image holds (squeeze-and-excite)."""
    inner = reduced(spec.channels, 4)
    return Rescale(
        nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(1),
            nn.Linear(spec.channels, inner),
            activation(),
            zeroed(nn.Linear(inner, spec.channels)),
            nn.Unflatten(1, (spec.channels, 1, 1)),
        )
    )


@blueprint("bottleneck", Family.CONV2D)
def bottleneck(spec: SlotSpec) -> nn.Module:
    """A convolution in a quarter of the channels, between two that mix them."""
    inner = reduced(spec.channels, 4)
    return nn.Sequential(
        nn.Conv2d(spec.channels, inner, 1),
        activation(),
        nn.Conv2d(inner, inner, KERNEL, padding=KERNEL // 2),
        activation(),
        zeroed(nn.Conv2d(inner, spec.channels, 1)),
    )


@blueprint("depthwise", Family.CONV2D)
def depthwise(spec: SlotSpec) -> nn.Module:
    """Filters each channel over the image, then mixes channels."""
    return nn.Sequential(
        nn.Conv2d(spec.channels, spec.channels, KERNEL, padding=KERNEL // 2, groups=spec.channels),
        activation(),
        zeroed(nn.Conv2d(spec.channels, spec.channels, 1)),
    )


@blueprint("conv", Family.CONV2D)
def conv(spec: SlotSpec) -> nn.Module:
    """A full convolution block: two layers that see neighbours and mix channels."""
    inner = reduced(spec.channels, 2)
    return nn.Sequential(
        nn.Conv2d(spec.channels, inner, KERNEL, padding=KERNEL // 2),
        activation(),
        zeroed(nn.Conv2d(inner, spec.channels, KERNEL, padding=KERNEL // 2)),
    )
