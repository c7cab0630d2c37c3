"""Slots: their names and order, and what the activations at a slot look like."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from esper.leyline.constants import DEFAULT_SLOT_COUNT
from esper.leyline.errors import AgreementError, EsperError, SlotError, place_of

if TYPE_CHECKING:
    from torch import Tensor

CANONICAL_SLOTS = ("early", "mid", "late")


class Family(StrEnum):
    """A kind of activation for which blueprints are written, in its canonical layout."""

    CONV1D = "conv1d"  # [B, C, L]
    CONV2D = "conv2d"  # [B, C, H, W]
    DENSE = "dense"  # [B, C]
    TRANSFORMER = "transformer"  # [B, T, C]


class Reach(StrEnum):
    """Which positions a seed may look at from each, so that its host keeps what it promises."""

    ALL = "all"
    PAST = "past"  # its own and those before it: the host is causal
    OWN = "own"  # no other


class Layout(StrEnum):
    """How a host lays its activations out; each maps to a family by a permutation of axes."""

    SEQUENCE = "sequence"  # [B, C, L]
    IMAGE = "image"  # [B, C, H, W]
    DENSE = "dense"  # [B, C]
    TOKENS = "tokens"  # [B, T, C]
    TIME_FIRST = "time_first"  # [T, B, C]
    IMAGE_LAST = "image_last"  # [B, H, W, C]

    @property
    def batch_axis(self) -> int:
        return _AXES[self][1].index("B")

    @property
    def channel_axis(self) -> int:
        return _AXES[self][1].index("C")

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the other axes, of activations of this shape."""
        apart = (self.batch_axis, self.channel_axis)
        return tuple(size for axis, size in enumerate(shape) if axis not in apart)


_CANONICAL = {Family.CONV1D: "BCL", Family.CONV2D: "BCHW", Family.DENSE: "BC"}
_CANONICAL[Family.TRANSFORMER] = "BTC"
_AXES = {
    Layout.SEQUENCE: (Family.CONV1D, "BCL"),
    Layout.IMAGE: (Family.CONV2D, "BCHW"),
    Layout.DENSE: (Family.DENSE, "BC"),
    Layout.TOKENS: (Family.TRANSFORMER, "BTC"),
    Layout.TIME_FIRST: (Family.TRANSFORMER, "TBC"),
    Layout.IMAGE_LAST: (Family.CONV2D, "BHWC"),
}


@dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """What a host announces of one slot: its name and the activations that pass through it."""

    name: str
    layout: Layout
    channels: int
    extent: tuple[int | None, ...] = ()  # the other axes but the batch; None where it varies
    reach: Reach = Reach.ALL

    def __post_init__(self) -> None:
        axes = _AXES[self.layout][1]
        if self.channels < 1 or len(self.extent) != len(axes) - 2:
            raise SlotError(
                f"Slot {self.name!r} has an impossible shape",
                given=f"layout {self.layout.value}, channels {self.channels}, extent {self.extent}",
                valid=f"[{', '.join(axes)}]: channels >= 1, {len(axes) - 2} extents",
            )

    @property
    def family(self) -> Family:
        return _AXES[self.layout][0]

    @property
    def causal(self) -> bool:
        """Are later positions out of sight?"""
        return self.reach is not Reach.ALL

    @property
    def channel_axis(self) -> int:
        """Where the channels are in the family's canonical layout."""
        return _CANONICAL[self.family].index("C")

    @property
    def to_canonical(self) -> tuple[int, ...]:
        """The permutation of the layout's axes that gives those of the family."""
        return tuple(map(_AXES[self.layout][1].index, _CANONICAL[self.family]))

    @property
    def from_canonical(self) -> tuple[int, ...]:
        return tuple(map(_CANONICAL[self.family].index, _AXES[self.layout][1]))

    def canonical_shape(self, batch: int, free_extent: int = 8) -> tuple[int, ...]:
        """A shape of this slot's activations in the family's layout."""
        shape = [batch, *(free_extent if size is None else size for size in self.extent)]
        shape.insert(self.channel_axis, self.channels)
        return tuple(shape)


@dataclass(frozen=True)
class SlotConfig:
    """The named, ordered slots that host, masks, network, buffer and agent agree on."""

    names: tuple[str, ...] = CANONICAL_SLOTS

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names:
            raise SlotError("Wrong number of slots", given=0, valid="1 or more")
        if len(set(self.names)) != len(self.names):
            raise SlotError("Slot names must differ", given=", ".join(self.names))

    @classmethod
    def of_size(cls, count: int = DEFAULT_SLOT_COUNT) -> "SlotConfig":
        """The canonical three slots, or `count` numbered ones."""
        if count == DEFAULT_SLOT_COUNT:
            return cls()
        return cls(tuple(f"slot{index}" for index in range(count)))

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        return place_of("slot", name, self.names)


def ordered_slots(names: Iterable[str], config: SlotConfig | None = None) -> tuple[str, ...]:
    """`names` in the configuration's order; unknown and repeated names are refused."""
    config = config or SlotConfig()
    wanted = list(names)
    if len(set(wanted)) != len(wanted):
        raise SlotError("Slot names must differ", given=", ".join(wanted))
    return tuple(sorted(wanted, key=config.index))


def require_form(
    what: str,
    tensor: "Tensor",
    shape: Sequence[int],
    dtype: object = None,
    *,
    error: type[EsperError] = AgreementError,
) -> None:
    """Refuse a tensor of another shape or, if one is named, of another type."""
    if tuple(tensor.shape) != tuple(shape) or dtype not in (None, tensor.dtype):
        forms = (tensor.dtype, list(tensor.shape)), (dtype, list(shape))
        given, valid = (f"{kind} {size}" if dtype else str(size) for kind, size in forms)
        raise error(what, given=given, valid=valid)


def require_agreement(what: str, left: tuple[str, object], right: tuple[str, object]) -> None:
    """Refuse when two parts disagree on `what`; each side is (who, value)."""
    if left[1] != right[1]:
        raise AgreementError(
            f"{left[0]} and {right[0]} disagree on {what}",
            given=f"{left[0]} has {left[1]}, {right[0]} has {right[1]}",
            fix="build both from the same slot configuration and catalogue",
        )
