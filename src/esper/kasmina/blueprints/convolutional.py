"""Seeds for sequences [B, C, L] and images [B, C, H, W]."""

from torch import nn

from esper.kasmina.blueprints.blueprint_registry import blueprint
from esper.kasmina.blueprints.bodies import (
    Attend,
    Replace,
    Rescale,
    Transposed,
    activation,
    reduced,
    zeroed,
)
from esper.kasmina.layers import ChannelNorm, GroupNorm, TokenLinear
from esper.leyline.errors import BlueprintError
from esper.leyline.slots import Family, SlotSpec

KERNELS = {Family.CONV1D: 5, Family.CONV2D: 3}  # in sequences as wide as the garden's hosts look


def _convolution(
    spec: SlotSpec, given: int, returned: int, kernel: int = 1, groups: int = 1
) -> nn.Module:
    """One that keeps the extent."""
    kind = nn.Conv1d if spec.family is Family.CONV1D else nn.Conv2d
    return kind(given, returned, kernel, padding=kernel // 2, groups=groups)


@blueprint("norm", Family.CONV1D)
@blueprint("norm", Family.CONV2D)
def norm(spec: SlotSpec) -> nn.Module:
    """Normalises each sample over channels and positions."""
    return Replace(GroupNorm(spec.channels, position_axes=len(spec.extent)))


@blueprint("squeeze", Family.CONV1D)
@blueprint("squeeze", Family.CONV2D)
def squeeze(spec: SlotSpec) -> nn.Module:
    """Rescales each channel by what all positions hold (squeeze-and-excite)."""
    inner = reduced(spec.channels, 4)
    return Rescale(
        nn.Sequential(
            nn.AdaptiveAvgPool1d(1) if spec.family is Family.CONV1D else nn.AdaptiveAvgPool2d(1),
            nn.Flatten(1),
            nn.Linear(spec.channels, inner),
            activation(),
            zeroed(nn.Linear(inner, spec.channels)),
            nn.Unflatten(1, (spec.channels, *(1 for _ in spec.extent))),
        )
    )


@blueprint("pointwise", Family.CONV1D)
def pointwise(spec: SlotSpec) -> nn.Module:
    """Mixes channels at each position on its own."""
    return nn.Sequential(
        _convolution(spec, spec.channels, spec.channels),
        activation(),
        zeroed(_convolution(spec, spec.channels, spec.channels)),
    )


@blueprint("bottleneck", Family.CONV2D)
def bottleneck(spec: SlotSpec) -> nn.Module:
    """A convolution in a quarter of the channels, between two that mix them."""
    inner = reduced(spec.channels, 4)
    return nn.Sequential(
        _convolution(spec, spec.channels, inner),
        activation(),
        _convolution(spec, inner, inner, KERNELS[spec.family]),
        activation(),
        zeroed(_convolution(spec, inner, spec.channels)),
    )


@blueprint("depthwise", Family.CONV1D)
@blueprint("depthwise", Family.CONV2D)
def depthwise(spec: SlotSpec) -> nn.Module:
    """Filters each channel over its positions, then mixes channels."""
    width = spec.channels
    return nn.Sequential(
        _convolution(spec, width, width, KERNELS[spec.family], groups=width),
        activation(),
        zeroed(_convolution(spec, width, width)),
    )


@blueprint("conv", Family.CONV1D)
@blueprint("conv", Family.CONV2D)
def conv(spec: SlotSpec) -> nn.Module:
    """A full convolution block: two layers that see neighbours and mix channels."""
    kernel = KERNELS[spec.family]
    inner = spec.channels if spec.family is Family.CONV1D else reduced(spec.channels, 2)
    return nn.Sequential(
        _convolution(spec, spec.channels, inner, kernel),
        activation(),
        zeroed(_convolution(spec, inner, spec.channels, kernel)),
    )


@blueprint("token_mix", Family.CONV1D, fixed_extent=True)
def token_mix(spec: SlotSpec) -> nn.Module:
    """Mixes positions however far apart, the same way in every channel."""
    (length,) = spec.extent
    if length is None:
        raise BlueprintError(
            f"token_mix needs the length of slot {spec.name!r}",
            given="a length that varies",
            valid="a fixed length",
            fix="use conv or attention where lengths vary",
        )
    inner = reduced(length, 2)
    return nn.Sequential(
        TokenLinear(length, inner), activation(), zeroed(TokenLinear(inner, length))
    )


@blueprint("attention", Family.CONV1D)
def attention(spec: SlotSpec) -> nn.Module:
    """Lets every position look at every other."""
    return Transposed(Attend(spec.channels, ChannelNorm(spec.channels), causal=False))
