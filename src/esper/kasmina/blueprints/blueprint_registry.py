"""The registry of blueprints: what can be planted where, and what it costs before it is."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from esper.leyline.catalogue import NOT_APPLICABLE, BlueprintCatalogue, blend_costs
from esper.leyline.errors import BlueprintError, DuplicateNameError, UnknownNameError
from esper.leyline.slots import Family, SlotConfig, SlotSpec

Builder = Callable[[SlotSpec], nn.Module]


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

    def fits(self, spec: SlotSpec) -> bool:
        known = all(size is not None for size in spec.extent)
        return spec.family == self.family and (known or not self.fixed_extent)


_REGISTRY: dict[tuple[Family, str], Blueprint] = {}


def blueprint(
    name: str, family: Family | str, *, fixed_extent: bool = False
) -> Callable[[Builder], Builder]:
    """Register a seed builder for a family of slots; its docstring's first line is its summary."""
    try:
        kind = Family(family)
    except ValueError:
        raise UnknownNameError.of(
            "blueprint family", str(family), [each.value for each in Family]
        ) from None
    if not name.isidentifier():
        raise BlueprintError(
            "A blueprint's name must be an identifier", given=repr(name), fix="use a_name_like_this"
        )

    def register(build: Builder) -> Builder:
        if (kind, name) in _REGISTRY:
            raise DuplicateNameError(
                f"Blueprint {name!r} is already registered for {kind.value} slots",
                given=f"{build.__module__}.{build.__qualname__}",
                valid="a name not among " + ", ".join(blueprint_names(kind)),
                fix="choose another name, or unregister_blueprint() the old one first",
            )
        summary = (inspect.getdoc(build) or name).splitlines()[0]
        _REGISTRY[kind, name] = Blueprint(name, kind, build, fixed_extent, summary)
        return build

    return register


def unregister_blueprint(name: str, family: Family | str) -> None:
    del _REGISTRY[find_blueprint(name, family).family, name]


def blueprint_names(family: Family | str) -> tuple[str, ...]:
    return tuple(name for kind, name in _REGISTRY if kind == family)


def find_blueprint(name: str, family: Family | str) -> Blueprint:
    kind = Family(family)
    if (kind, name) not in _REGISTRY:
        raise UnknownNameError.of(
            f"blueprint for {kind.value} slots",
            name,
            blueprint_names(kind),
            fix="register your own with @blueprint(name, family)",
        )
    return _REGISTRY[kind, name]


@lru_cache(maxsize=4096)
def cost(plan: Blueprint, spec: SlotSpec) -> int:
    """Parameters a seed would add. Checks the output shape on the way; allocates nothing."""
    if not plan.fits(spec):
        return NOT_APPLICABLE
    shape = spec.canonical_shape(batch=2)
    try:
        with torch.device("meta"):
            seed = plan.build(spec)
            output = seed(torch.empty(shape))
    except (RuntimeError, ValueError, TypeError) as error:
        raise BlueprintError(
            f"Blueprint {plan.name!r} cannot be built for slot {spec.name!r}",
            given=str(error).splitlines()[0],
            valid=f"a module that maps {list(shape)} to {list(shape)}",
            fix="sizes must come from the slot's channels and extent, and weights be made by torch",
        ) from error
    if not isinstance(output, torch.Tensor) or output.shape != shape:
        got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise BlueprintError(
            f"Blueprint {plan.name!r} changes the shape of slot {spec.name!r}",
            given=f"{list(shape)} -> {got}",
            valid=f"{list(shape)} -> {list(shape)}",
            fix="a seed adds to its slot's activations, so it must return their shape",
        )
    return sum(parameter.numel() for parameter in seed.parameters())


def build_catalogue(
    specs: Sequence[SlotSpec], host_params: int, allowed: Iterable[str] | None = None
) -> BlueprintCatalogue:
    """Names and costs of everything that can be planted in these slots.

    Blueprints of one name in different families share an index. `allowed` narrows the list and
    fixes its order; it may name some that fit none of these slots.
    """
    families = list(dict.fromkeys(spec.family for spec in specs))
    known = list(dict.fromkeys(name for kind in families for name in blueprint_names(kind)))
    names = known if allowed is None else list(allowed)
    anywhere = {name for _, name in _REGISTRY}
    unknown = [name for name in names if name not in anywhere]
    if not set(names) & set(known):
        unknown += names
    if unknown:
        raise UnknownNameError.of("blueprint", unknown[0], known)

    def price(spec: SlotSpec, name: str) -> int:
        plan = _REGISTRY.get((spec.family, name))
        return NOT_APPLICABLE if plan is None else cost(plan, spec)

    costs = tuple(tuple(price(spec, name) for name in names) for spec in specs)
    slots = SlotConfig(tuple(spec.name for spec in specs))
    return BlueprintCatalogue(slots, tuple(names), costs, blend_costs(specs), host_params)
