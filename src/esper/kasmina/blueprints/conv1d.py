"""Seeds for sequences [B, C, L]."""

from torch import nn

from esper.kasmina.blueprints.bodies import (
    Attend,
    Replace,
    Rescale,
    Transposed,
    activation,
    reduced,
)
from esper.kasmina.blueprints.parts import zeroed
from esper.kasmina.blueprints.registry import blueprint
from esper.kasmina.layers import ChannelNorm, GroupNorm, TokenLinear
from esper.leyline.errors import BlueprintError
from esper.leyline.slots import Family, SlotSpec

KERNEL = 5  # as wide as the garden's hosts look


@blueprint("norm", Family.CONV1D)
def norm(spec: SlotSpec) -> nn.Module:
    """Normalises each sample over channels and positions."""
    return Replace(GroupNorm(spec.channels, position_axes=1))


@blueprint("squeeze", Family.CONV1D)
def squeeze(spec: SlotSpec) -> nn.Module:
    """Rescales each channel by what the whole sequence holds (squeeze-and-excite)."""
    inner = reduced(spec.channels, 4)
    return Rescale(
        nn.Sequential(
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(1),
            nn.Linear(spec.channels, inner),
            activation(),
            zeroed(nn.Linear(inner, spec.channels)),
            nn.Unflatten(1, (spec.channels, 1)),
        )
    )


@blueprint("pointwise", Family.CONV1D)
def pointwise(spec: SlotSpec) -> nn.Module:
    """Mixes channels at each position on its own."""
    return nn.Sequential(
        nn.Conv1d(spec.channels, spec.channels, 1),
        activation(),
        zeroed(nn.Conv1d(spec.channels, spec.channels, 1)),
    )


@blueprint("depthwise", Family.CONV1D)
def depthwise(spec: SlotSpec) -> nn.Module:
    """Filters each channel along the sequence, then mixes channels."""
    return nn.Sequential(
        nn.Conv1d(spec.channels, spec.channels, KERNEL, padding=KERNEL // 2, groups=spec.channels),
        activation(),
        zeroed(nn.Conv1d(spec.channels, spec.channels, 1)),
    )


@blueprint("conv", Family.CONV1D)
def conv(spec: SlotSpec) -> nn.Module:
    """A full convolution block: two layers that see neighbours and mix channels."""
    return nn.Sequential(
        nn.Conv1d(spec.channels, spec.channels, KERNEL, padding=KERNEL // 2),
        activation(),
        zeroed(nn.Conv1d(spec.channels, spec.channels, KERNEL, padding=KERNEL // 2)),
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
