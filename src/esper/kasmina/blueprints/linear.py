"""Seeds for vectors of features [B, C] and tokens [B, T, C].

Those for tokens are causal: a token learns nothing of those after it.
"""

from torch import nn

from esper.kasmina.blueprints.blueprint_registry import blueprint
from esper.kasmina.blueprints.bodies import Attend, Replace, Rescale, activation, reduced, zeroed
from esper.kasmina.layers import ChannelNorm, TokenLinear
from esper.leyline.slots import Family, SlotSpec

FILTERS = 16  # local patterns that convpool looks for
FILTER_WIDTH = 5


def _linear(spec: SlotSpec, given: int, returned: int) -> nn.Module:
    kind = nn.Linear if spec.family is Family.DENSE else TokenLinear
    return kind(given, returned)


def _two_layers(spec: SlotSpec, inner: int) -> list[nn.Module]:
    """Tokens are normalised first."""
    return [
        *([] if spec.family is Family.DENSE else [ChannelNorm(spec.channels)]),
        _linear(spec, spec.channels, inner),
        activation(),
        zeroed(_linear(spec, inner, spec.channels)),
    ]


@blueprint("norm", Family.DENSE)
@blueprint("norm", Family.TRANSFORMER)
def norm(spec: SlotSpec) -> nn.Module:
    """Normalises each vector of features, or token, over its channels."""
    return Replace(ChannelNorm(spec.channels))


@blueprint("lora", Family.TRANSFORMER)
def lora(spec: SlotSpec) -> nn.Module:
    """A linear map of low rank on each token."""
    return lowrank(spec)


@blueprint("gate", Family.DENSE)
@blueprint("gate", Family.TRANSFORMER)
def gate(spec: SlotSpec) -> nn.Module:
    """Rescales each channel by what the others are."""
    return Rescale(nn.Sequential(*_two_layers(spec, reduced(spec.channels, 8))))


@blueprint("lowrank", Family.DENSE)
def lowrank(spec: SlotSpec) -> nn.Module:
    """A linear map of low rank."""
    inner = reduced(spec.channels, 8)
    return nn.Sequential(
        nn.Linear(spec.channels, inner, bias=False), zeroed(_linear(spec, inner, spec.channels))
    )


@blueprint("attention", Family.TRANSFORMER)
def attention(spec: SlotSpec) -> nn.Module:
    """Lets every token look at those before it."""
    return Attend(spec.channels, ChannelNorm(spec.channels), causal=True)


@blueprint("mlp", Family.DENSE)
@blueprint("mlp", Family.TRANSFORMER)
def mlp(spec: SlotSpec) -> nn.Module:
    """Two layers: with a narrow middle for features, with one twice as wide for tokens."""
    dense = spec.family is Family.DENSE
    inner = reduced(spec.channels, 4) if dense else 2 * spec.channels
    return nn.Sequential(*_two_layers(spec, inner))


@blueprint("wide", Family.DENSE)
def wide(spec: SlotSpec) -> nn.Module:
    """Two layers with a middle as wide as the slot."""
    return nn.Sequential(*_two_layers(spec, spec.channels))


@blueprint("convpool", Family.DENSE)
def convpool(spec: SlotSpec) -> nn.Module:
    """Finds local patterns wherever they are among the features, taken as a line."""
    width = min(FILTER_WIDTH, spec.channels)
    return nn.Sequential(
        nn.Unflatten(1, (1, spec.channels)),
        nn.Conv1d(1, FILTERS, width, padding=width // 2),
        activation(),
        nn.AdaptiveMaxPool1d(1),
        nn.Flatten(1),
        zeroed(nn.Linear(FILTERS, spec.channels)),
    )
