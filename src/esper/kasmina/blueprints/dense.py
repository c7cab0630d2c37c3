"""Seeds for vectors of features [B, C]."""

from torch import nn

from esper.kasmina.blueprints.blueprint_registry import blueprint
from esper.kasmina.blueprints.bodies import Replace, Rescale, activation, reduced, zeroed
from esper.kasmina.layers import ChannelNorm
from esper.leyline.slots import Family, SlotSpec

FILTERS = 16  # local patterns that convpool looks for
FILTER_WIDTH = 5


@blueprint("norm", Family.DENSE)
def norm(spec: SlotSpec) -> nn.Module:
    """Normalises each sample over its features."""
    return Replace(ChannelNorm(spec.channels))


@blueprint("gate", Family.DENSE)
def gate(spec: SlotSpec) -> nn.Module:
    """Rescales each feature by what the others are."""
    inner = reduced(spec.channels, 8)
    return Rescale(
        nn.Sequential(
            nn.Linear(spec.channels, inner),
            activation(),
            zeroed(nn.Linear(inner, spec.channels)),
        )
    )


@blueprint("lowrank", Family.DENSE)
def lowrank(spec: SlotSpec) -> nn.Module:
    """A linear map of low rank."""
    inner = reduced(spec.channels, 8)
    return nn.Sequential(
        nn.Linear(spec.channels, inner, bias=False), zeroed(nn.Linear(inner, spec.channels))
    )


@blueprint("mlp", Family.DENSE)
def mlp(spec: SlotSpec) -> nn.Module:
    """Two layers with a narrow middle."""
    return _two_layers(spec.channels, reduced(spec.channels, 4))


@blueprint("wide", Family.DENSE)
def wide(spec: SlotSpec) -> nn.Module:
    """Two layers with a middle as wide as the slot."""
    return _two_layers(spec.channels, spec.channels)


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


def _two_layers(channels: int, inner: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(channels, inner), activation(), zeroed(nn.Linear(inner, channels))
    )
