"""Action spaces and random legality for tests."""

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
    """Esper's four heads for that many slots and blueprints."""
    return space_of(HEADS, slots, blueprints)


def space_of(table: HeadTable, slots: int = DEFAULT_SLOT_COUNT, blueprints: int = 4) -> ActionSpace:
    """The heads of a table for that many slots and blueprints."""
    names = tuple(f"blueprint{index}" for index in range(blueprints))
    costs = ((1,) * blueprints,) * slots
    blends = ((0,) * len(Blend),) * slots
    return table.resolve(BlueprintCatalogue(SlotConfig.of_size(slots), names, costs, blends, 10))


def random_legality(space: ActionSpace, rows: int, draw: torch.Generator) -> Legality:
    """Masks that leave the canonical action and a random half of the others."""
    masks = {}
    for name, size, given in zip(space.names, space.sizes, space.given, strict=True):
        shape = (rows, *(space.size(earlier) for earlier in given), size)
        masks[name] = torch.rand(shape, generator=draw) < 0.5
        masks[name][..., CANONICAL_ACTION] = True
    return Legality(space, rows, masks)
