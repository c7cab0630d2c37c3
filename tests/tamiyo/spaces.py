"""Action spaces and random legal actions for tests."""

import torch

from esper.leyline import (
    CANONICAL_ACTION,
    DEFAULT_SLOT_COUNT,
    HEADS,
    ActionSpace,
    Blend,
    BlueprintCatalogue,
    HeadTable,
    Legality,
    SlotConfig,
)


def esper_space(slots: int = DEFAULT_SLOT_COUNT, blueprints: int = 4) -> ActionSpace:
    """Return Esper's four heads for a number of slots and blueprints."""
    return space_of(HEADS, slots, blueprints)


def space_of(table: HeadTable, slots: int = DEFAULT_SLOT_COUNT, blueprints: int = 4) -> ActionSpace:
    """Return the heads of a table for a number of slots and blueprints."""
    names = tuple(f"blueprint{index}" for index in range(blueprints))
    costs = ((1,) * blueprints,) * slots
    blend_costs = ((0,) * len(Blend),) * slots
    catalogue = BlueprintCatalogue(SlotConfig.of_size(slots), names, costs, blend_costs, 10)
    return table.resolve(catalogue)


def random_legality(space: ActionSpace, rows: int, generator: torch.Generator) -> Legality:
    """Return masks in which the canonical action and a random half of the others are legal."""
    masks = {}
    for name, size, earlier_heads in zip(space.names, space.sizes, space.given, strict=True):
        shape = (rows, *(space.size(earlier) for earlier in earlier_heads), size)
        masks[name] = torch.rand(shape, generator=generator) < 0.5
        masks[name][..., CANONICAL_ACTION] = True
    return Legality(space, rows, masks)
