"""Seeds for tokens [B, T, C]. All are causal: a token learns nothing of those after it."""

from torch import nn

from esper.kasmina.blueprints.blueprint_registry import blueprint
from esper.kasmina.blueprints.bodies import Attend, Replace, Rescale, activation, reduced, zeroed
from esper.kasmina.layers import ChannelNorm, TokenLinear
from esper.leyline.slots import Family, SlotSpec


@blueprint("norm", Family.TRANSFORMER)
def norm(spec: SlotSpec) -> nn.Module:
    """Normalises each token over its channels."""
    return Replace(ChannelNorm(spec.channels))


@blueprint("lora", Family.TRANSFORMER)
def lora(spec: SlotSpec) -> nn.Module:
    """A linear map of low rank on each token."""
    inner = reduced(spec.channels, 8)
    return nn.Sequential(
        nn.Linear(spec.channels, inner, bias=False), zeroed(TokenLinear(inner, spec.channels))
    )


@blueprint("gate", Family.TRANSFORMER)
def gate(spec: SlotSpec) -> nn.Module:
    """Rescales each token's channels by what the others are."""
    inner = reduced(spec.channels, 8)
    return Rescale(
        nn.Sequential(
            ChannelNorm(spec.channels),
            TokenLinear(spec.channels, inner),
            activation(),
            zeroed(TokenLinear(inner, spec.channels)),
        )
    )


@blueprint("attention", Family.TRANSFORMER)
def attention(spec: SlotSpec) -> nn.Module:
    """Lets every token look at those before it."""
    return Attend(spec.channels, ChannelNorm(spec.channels), causal=True)


@blueprint("mlp", Family.TRANSFORMER)
def mlp(spec: SlotSpec) -> nn.Module:
    """Two layers on each token with a middle twice as wide."""
    return nn.Sequential(
        ChannelNorm(spec.channels),
        TokenLinear(spec.channels, 2 * spec.channels),
        activation(),
        zeroed(TokenLinear(2 * spec.channels, spec.channels)),
    )
