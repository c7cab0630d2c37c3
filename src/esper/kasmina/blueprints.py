"""Blueprints: small modules that can be planted in a slot. Their registry, and those built in.

Shapes: `B` batch, `C` channels, `L` positions, `H` height, `W` width, `T` tokens.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from esper.kasmina.hosts import Block
from esper.kasmina.isolation import randomness_kept
from esper.kasmina.layers import ChannelNorm, GroupNorm, PastLinear, SelfAttention, TokenLinear
from esper.leyline import Blend, BlueprintError, Trait
from esper.leyline.catalogue import (
    LOOKS_BEYOND,
    NOT_APPLICABLE,
    BlueprintCatalogue,
    refuse_removed_blueprints,
)
from esper.leyline.constants import GATE_LEARNING_RATE_SCALE
from esper.leyline.errors import DuplicateNameError, UnknownNameError, in_words, require_known
from esper.leyline.slots import Family, Reach, SlotConfig, SlotSpec

M = TypeVar("M", bound=nn.Module)
Builder = Callable[[SlotSpec], nn.Module]

NEGATIVE_SLOPE = 0.1  # a plain ReLU can be dead at birth behind a host's ReLU, and stays dead
KERNELS = {Family.CONV1D: 5, Family.CONV2D: 3}  # in sequences as wide as the garden's hosts look
FILTERS = 16  # local patterns that convpool looks for
FILTER_WIDTH = 5


@dataclass(frozen=True)
class Blueprint:
    """A named way to build a seed for slots of one family.

    `build(spec)` returns a module that maps the family's canonical activations to the same
    shape, and to exactly zero when it is new: a last linear layer at zero with nothing after
    it, or a `ScalarGate`. That zero point is what lets a seed start at alpha 1.
    """

    name: str
    family: Family
    build: Builder
    fixed_extent: bool  # its parameters depend on the slot's extent, which therefore may not vary
    summary: str
    wrapped: bool = False  # for wrapped models alone: a population's actions are fixed
    traits: int = 0  # `Trait`s: what it is like

    def fits(self, spec: SlotSpec) -> bool:
        known = all(size is not None for size in spec.extent)
        return spec.family == self.family and (known or not self.fixed_extent)


_REGISTRY: dict[tuple[Family, str], Blueprint] = {}


def blueprint(
    name: str,
    family: Family | str,
    *others: Family | str,
    fixed_extent: bool = False,
    wrapped: bool = False,
    plain: bool = False,
    traits: Trait | None = None,
) -> Callable[[Builder], Builder]:
    """Register a seed builder for families of slots; its docstring's first line is its summary.

    A function under `@blueprint("mine", "dense")` gets the `SlotSpec` of a slot and returns a
    module that keeps the shape of what passes there and gives exactly zero when it is new (see
    `zeroed`, `ScalarGate`). `fixed_extent`: its parameters depend on the size of what passes.
    `wrapped`: populations plant it only if it is named.
    `plain`: it adds capacity of a kind that hosts have anyway, so others are tried before it.
    `traits`: what it is like, for a policy that was trained with others.
    """
    for each in (family, *others):
        require_known("blueprint family", each, [one.value for one in Family])
    kinds = [Family(each) for each in (family, *others)]
    if not name.isidentifier():
        raise BlueprintError(
            "A blueprint's name must be an identifier", given=repr(name), fix="use a_name_like_this"
        )

    def register(build: Builder) -> Builder:
        for kind in kinds:
            if (kind, name) in _REGISTRY:
                raise DuplicateNameError(
                    f"Blueprint {name!r} is already registered for {kind.value} slots",
                    given=f"{build.__module__}.{build.__qualname__}",
                    valid="a name not among " + ", ".join(blueprint_names(kind, wrapped=True)),
                    fix="choose another name, or unregister_blueprint() the old one first",
                )
        summary = (inspect.getdoc(build) or name).splitlines()[0]
        trait_bits = 0 if traits is None else Trait.KNOWN | traits
        if plain:
            trait_bits |= Trait.PLAIN
        for kind in kinds:
            _REGISTRY[kind, name] = Blueprint(
                name, kind, build, fixed_extent, summary, wrapped, int(trait_bits)
            )
        return build

    return register


def unregister_blueprint(name: str, family: Family | str) -> None:
    del _REGISTRY[find_blueprint(name, family).family, name]


def blueprint_names(family: Family | str, *, wrapped: bool = False) -> tuple[str, ...]:
    """What populations plant in slots of a family; with `wrapped` then what wrapped models may."""
    plans = sorted(_REGISTRY.values(), key=lambda plan: plan.wrapped)
    return tuple(plan.name for plan in plans if plan.family == family and plan.wrapped <= wrapped)


def find_blueprint(name: str, family: Family | str) -> Blueprint:
    """Return the blueprint that is registered under a name for slots of a family.

    Raises:
        UnknownNameError: No blueprint of that family has this name.
    """
    family = Family(family)
    registered = blueprint_names(family, wrapped=True)
    if name not in registered:
        refuse_removed_blueprints([name])
    require_known(
        f"blueprint for {family.value} slots",
        name,
        registered,
        fix="register your own with @blueprint(name, family)",
    )
    return _REGISTRY[family, name]


def cost(plan: Blueprint | None, spec: SlotSpec) -> int:
    """Parameters a seed would add. Checks the output shape and what it sees on the way."""
    if plan is None or not plan.fits(spec):
        return NOT_APPLICABLE
    shape = list(spec.canonical_shape(batch=2))
    with in_words(
        f"Blueprint {plan.name!r} cannot be built for slot {spec.name!r}",
        (RuntimeError, ValueError, TypeError),
        valid=f"a module that maps {shape} to {shape}",
        fix="sizes must come from the slot's channels and extent, and weights be made by torch",
        error=BlueprintError,
    ):  # A model has many slots that are alike but for their names.
        returned, found = _tried(plan, replace(spec, name=""))
    if returned != shape:
        raise BlueprintError(
            f"Blueprint {plan.name!r} changes the shape of slot {spec.name!r}",
            given=f"{shape} -> {returned}",
            valid=f"{shape} -> {shape}",
            fix="a seed adds to its slot's activations, so it must return their shape",
        )
    return found


@lru_cache(maxsize=4096)
def _tried(plan: Blueprint, spec: SlotSpec) -> tuple[list[int] | str, int]:
    """The shape or type that such a seed returns, and its parameters, or that it sees positions
    which its slot forbids: tried with weights that act; all else allocates nothing."""
    free = spec.reach is Reach.ALL
    with torch.device("meta" if free else "cpu"), randomness_kept(stream=0), torch.no_grad():
        seed = plan.build(spec).eval()
        h, other = torch.randn(2, *spec.canonical_shape(batch=2))
        for weights in () if free else seed.parameters():
            weights.add_(torch.randn_like(weights) / weights.shape[-1:].numel() ** 0.5)
        output = seed(h)
        is_tensor = isinstance(output, torch.Tensor)
        returned = list(output.shape) if is_tensor else type(output).__name__
        params = sum(parameter.numel() for parameter in seed.parameters())
        if free or returned != list(h.shape):
            return returned, params
        one = h[0].select(spec.channel_axis - 1, 0)
        places = torch.arange(one.numel()).view(one.shape).unsqueeze(spec.channel_axis - 1)
        cuts = {1, one.numel() // 2, one.numel() - 1}
        hidden = [places >= cut if spec.reach is Reach.PAST else places == cut for cut in cuts]
        differ = [(seed(torch.where(each, other, h)) != output) & ~each for each in hidden]
    return returned, LOOKS_BEYOND if any(bool(each.any()) for each in differ) else params


def build_catalogue(
    specs: Sequence[SlotSpec],
    host_params: int,
    allowed: Iterable[str] | None = None,
    *,
    wrapped: bool = False,
) -> BlueprintCatalogue:
    """Build the catalogue of the seeds that can be planted in these slots.

    Blueprints of one name in different families share an index.

    Args:
        specs: The slots of the host.
        host_params: The number of parameters of the host without seeds.
        allowed: The blueprint names to offer, in this order; a name may fit none of the slots.
            By default every registered name of the slots' families.
        wrapped: Whether to offer also the blueprints that are for wrapped models alone.

    Raises:
        UnknownNameError: A name is not registered, or no name is of the slots' families.
    """
    families = list(dict.fromkeys(spec.family for spec in specs))
    offered = [name for family in families for name in blueprint_names(family)]
    if wrapped:
        offered += [name for family in families for name in blueprint_names(family, wrapped=True)]
    offered = list(dict.fromkeys(offered))
    names = offered if allowed is None else list(allowed)
    registered = {name for _, name in _REGISTRY}
    unknown = [name for name in names if name not in registered]
    if not any((family, name) in _REGISTRY for family in families for name in names):
        unknown += names
    if unknown:
        refuse_removed_blueprints(unknown)
        raise UnknownNameError.of("blueprint", unknown[0], offered)
    plans = [[_REGISTRY.get((spec.family, name)) for name in names] for spec in specs]
    costs = tuple(
        tuple(cost(plan, spec) for plan in row) for row, spec in zip(plans, specs, strict=True)
    )
    slots = SlotConfig(tuple(spec.name for spec in specs))
    traits = tuple(tuple(plan.traits if plan else 0 for plan in row) for row in plans)
    # Of blends only the learned gate has parameters: one weight a channel and a bias.
    gates = tuple(
        tuple((spec.channels + 1) * (each is Blend.GATE) for each in Blend) for spec in specs
    )
    return BlueprintCatalogue(slots, tuple(names), costs, gates, host_params, traits)


# --- what blueprints are made of --------------------------------------------------------------


class ScalarGate(nn.Module):
    """Multiplies by one learned number that starts at zero.

    It learns at ten times the base rate: at the base rate a gated seed that is planted late
    gains about half of what it could.
    """

    learning_rate_scale: ClassVar[float] = GATE_LEARNING_RATE_SCALE

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def zeroed(layer: M) -> M:
    """`layer` with all its parameters at zero. It must be the last of its seed."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    return layer


def learning_rate_scales(module: nn.Module, prefix: str = "") -> dict[str, float]:
    """Learning-rate multiplier of each parameter, by name.

    A submodule sets one for its own parameters with an attribute `learning_rate_scale`.
    """
    scales: dict[str, float] = {}
    for path, part in module.named_modules(prefix=prefix):
        for name, _ in part.named_parameters(path, recurse=False):
            scales[name] = float(getattr(part, "learning_rate_scale", 1.0))
    return scales


class Replace(nn.Module):
    """Turns activations into `transform(h)`: a gate times the difference, nothing at gate 0."""

    def __init__(self, transform: nn.Module, *, gated: bool = True) -> None:
        super().__init__()
        self.transform = transform
        self.gate = ScalarGate() if gated else nn.Identity()  # of blocks that return h as yet

    def forward(self, h: Tensor) -> Tensor:
        replaced: Tensor = self.gate(self.transform(h) - h)
        return replaced


class Rescale(nn.Module):
    """Scales activations by 1 + tanh(strength(h)), so between 0 and 2 times.

    `strength` ends in a zeroed layer: tanh(0) is exactly 0 and its slope there is 1.
    """

    def __init__(self, strength: nn.Module) -> None:
        super().__init__()
        self.strength = strength

    def forward(self, h: Tensor) -> Tensor:
        scaled: Tensor = h * self.strength(h).tanh()
        return scaled


class Attend(nn.Module):
    """Normalised tokens [B, T, C] attend to each other through one head of half the width."""

    def __init__(self, channels: int, *, causal: bool) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.attention = SelfAttention(channels, inner=reduced(channels, 2), causal=causal)
        zeroed(self.attention.out)

    def forward(self, h: Tensor) -> Tensor:
        attended: Tensor = self.attention(self.norm(h))
        return attended


class Transposed(nn.Module):
    """Applies a body written for channels last, as in [B, T, C], to [B, C, T], or the reverse."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, h: Tensor) -> Tensor:
        turned: Tensor = self.body(h.transpose(1, -1)).transpose(1, -1)
        return turned


def activation() -> nn.Module:
    return nn.LeakyReLU(NEGATIVE_SLOPE)


def reduced(channels: int, factor: int) -> int:
    """A fraction of the channels, at least one."""
    return max(1, channels // factor)


_LAYERS = Trait.CHANNELS | Trait.BENDS
_RESCALES = _LAYERS | Trait.CONTENT
_ATTENDS = _RESCALES | Trait.GLOBAL


# --- for sequences [B, C, L] and images [B, C, H, W] ------------------------------------------


def _convolution(
    spec: SlotSpec, given: int, returned: int, kernel: int = 1, groups: int = 1
) -> nn.Module:
    """One that keeps the extent; along a causal sequence it looks back only."""
    kind = nn.Conv1d if spec.family is Family.CONV1D else nn.Conv2d
    if spec.causal and spec.family is Family.CONV1D and kernel > 1:
        past = nn.ConstantPad1d((kernel - 1, 0), 0.0)
        return nn.Sequential(past, kind(given, returned, kernel, groups=groups))
    return kind(given, returned, kernel, padding=kernel // 2, groups=groups)


def _normalised(spec: SlotSpec) -> nn.Module:
    if spec.causal:
        return Transposed(ChannelNorm(spec.channels))
    return GroupNorm(spec.channels, position_axes=len(spec.extent))


def _two(first: nn.Module, last: nn.Module) -> nn.Module:
    """Both layers, with a last one that is zero when it is new."""
    return nn.Sequential(first, activation(), zeroed(last))


@blueprint("norm", Family.CONV1D, Family.CONV2D, traits=Trait.NORMALISES)
def position_norm(spec: SlotSpec) -> nn.Module:
    """Normalises each sample over channels and positions, where causal over channels alone."""
    return Replace(_normalised(spec))


@blueprint("squeeze", Family.CONV1D, Family.CONV2D, plain=True, traits=_RESCALES | Trait.GLOBAL)
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


@blueprint("pointwise", Family.CONV1D, plain=True, traits=_LAYERS)
def pointwise(spec: SlotSpec) -> nn.Module:
    """Mixes channels at each position on its own."""
    width = spec.channels
    return _two(_convolution(spec, width, width), _convolution(spec, width, width))


@blueprint("bottleneck", Family.CONV2D, plain=True, traits=_LAYERS | Trait.LOCAL)
def bottleneck(spec: SlotSpec) -> nn.Module:
    """A convolution in a quarter of the channels, between two that mix them."""
    inner = reduced(spec.channels, 4)
    return nn.Sequential(
        _convolution(spec, spec.channels, inner),
        activation(),
        _convolution(spec, inner, inner, 1 if spec.causal else KERNELS[spec.family]),
        activation(),
        zeroed(_convolution(spec, inner, spec.channels)),
    )


@blueprint("depthwise", Family.CONV1D, Family.CONV2D, traits=_LAYERS | Trait.LOCAL)
def depthwise(spec: SlotSpec) -> nn.Module:
    """Filters each channel over its positions, then mixes channels."""
    width = spec.channels
    filters = _convolution(spec, width, width, KERNELS[spec.family], groups=width)
    return _two(filters, _convolution(spec, width, width))


@blueprint("conv", Family.CONV1D, Family.CONV2D, plain=True, traits=_LAYERS | Trait.LOCAL)
def conv(spec: SlotSpec) -> nn.Module:
    """A full convolution block: two layers that see neighbours and mix channels."""
    width, kernel = spec.channels, KERNELS[spec.family]
    inner = width if spec.family is Family.CONV1D else reduced(width, 2)
    return _two(_convolution(spec, width, inner, kernel), _convolution(spec, inner, width, kernel))


@blueprint("token_mix", Family.CONV1D, fixed_extent=True, traits=Trait.GLOBAL | Trait.BENDS)
def token_mix(spec: SlotSpec) -> nn.Module:
    """Mixes positions however far apart, the same way in every channel."""
    (length,) = spec.extent
    assert length is not None, "it does not fit where lengths vary"
    if spec.causal:
        return _two(PastLinear(length, length), PastLinear(length, length))
    inner = reduced(length, 2)
    return _two(TokenLinear(length, inner), TokenLinear(inner, length))


@blueprint("attention", Family.CONV1D, traits=_ATTENDS)
def position_attention(spec: SlotSpec) -> nn.Module:
    """Lets every position look at every other, where causal at those before it."""
    return Transposed(Attend(spec.channels, causal=spec.causal))


# --- for vectors of features [B, C] and tokens [B, T, C]; those for tokens are causal ---------


def _linear(spec: SlotSpec, given: int, returned: int) -> nn.Module:
    return (nn.Linear if spec.family is Family.DENSE else TokenLinear)(given, returned)


def _two_layers(spec: SlotSpec, inner: int) -> list[nn.Module]:
    """Tokens are normalised first."""
    return [
        *([] if spec.family is Family.DENSE else [ChannelNorm(spec.channels)]),
        _linear(spec, spec.channels, inner),
        activation(),
        zeroed(_linear(spec, inner, spec.channels)),
    ]


@blueprint("norm", Family.DENSE, Family.TRANSFORMER, traits=Trait.NORMALISES)
def norm(spec: SlotSpec) -> nn.Module:
    """Normalises each vector of features, or token, over its channels."""
    return Replace(ChannelNorm(spec.channels))


@blueprint("lora", Family.TRANSFORMER, plain=True, traits=Trait.CHANNELS)
def lora(spec: SlotSpec) -> nn.Module:
    """A linear map of low rank on each token."""
    return lowrank(spec)


@blueprint("gate", Family.DENSE, Family.TRANSFORMER, plain=True, traits=_RESCALES)
def gate(spec: SlotSpec) -> nn.Module:
    """Rescales each channel by what the others are."""
    return Rescale(nn.Sequential(*_two_layers(spec, reduced(spec.channels, 8))))


@blueprint("lowrank", Family.DENSE, plain=True, traits=Trait.CHANNELS)
def lowrank(spec: SlotSpec) -> nn.Module:
    """A linear map of low rank."""
    inner = reduced(spec.channels, 8)
    return nn.Sequential(
        nn.Linear(spec.channels, inner, bias=False), zeroed(_linear(spec, inner, spec.channels))
    )


@blueprint("attention", Family.TRANSFORMER, traits=_ATTENDS)
def attention(spec: SlotSpec) -> nn.Module:
    """Lets every token look at those before it."""
    return Attend(spec.channels, causal=True)


@blueprint("mlp", Family.DENSE, Family.TRANSFORMER, plain=True, traits=_LAYERS)
def mlp(spec: SlotSpec) -> nn.Module:
    """Two layers: with a narrow middle for features, with one twice as wide for tokens."""
    inner = reduced(spec.channels, 4) if spec.family is Family.DENSE else 2 * spec.channels
    return nn.Sequential(*_two_layers(spec, inner))


@blueprint("wide", Family.DENSE, plain=True, traits=_LAYERS)
def wide(spec: SlotSpec) -> nn.Module:
    """Two layers with a middle as wide as the slot."""
    return nn.Sequential(*_two_layers(spec, spec.channels))


@blueprint("convpool", Family.DENSE, traits=_LAYERS | Trait.LOCAL | Trait.GLOBAL)
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


# --- for wrapped models: more of what the host itself is made of ------------------------------


@blueprint("block", Family.DENSE, wrapped=True, plain=True, traits=_LAYERS)
def dense_block(spec: SlotSpec) -> nn.Module:
    """A residual block: a norm, and two layers with a middle twice as wide as the slot."""
    return nn.Sequential(ChannelNorm(spec.channels), *_two_layers(spec, 2 * spec.channels))


@blueprint("block", Family.TRANSFORMER, wrapped=True, plain=True, traits=_ATTENDS)
def transformer_block(spec: SlotSpec) -> nn.Module:
    """A whole block: causal attention at full width, and two layers with a middle 4 x as wide."""
    block = Block(spec.channels, heads=4 if spec.channels % 4 == 0 else 1)
    zeroed(block.get_submodule("attend.1.out"))
    zeroed(block.think[-1])
    return Replace(block, gated=False)


@blueprint(
    "block", Family.CONV1D, Family.CONV2D, wrapped=True, plain=True, traits=_LAYERS | Trait.LOCAL
)
def conv_block(spec: SlotSpec) -> nn.Module:
    """A residual block at full width: twice a norm, an activation and a convolution."""
    kernel = 1 if spec.reach is Reach.OWN else KERNELS[spec.family]
    first, last = (_convolution(spec, spec.channels, spec.channels, kernel) for _ in range(2))
    return _two(nn.Sequential(_normalised(spec), activation(), first, _normalised(spec)), last)
