"""Blueprints: small modules that can be planted in a slot, by family of host."""

# Importing a family's module registers its blueprints.
from esper.kasmina.blueprints import convolutional, linear  # noqa: F401
from esper.kasmina.blueprints.blueprint_registry import (
    Blueprint,
    blueprint,
    blueprint_names,
    build_catalogue,
    cost,
    find_blueprint,
    unregister_blueprint,
)
from esper.kasmina.blueprints.bodies import ScalarGate, learning_rate_scales, zeroed

__all__ = [
    "Blueprint",
    "ScalarGate",
    "blueprint",
    "blueprint_names",
    "build_catalogue",
    "cost",
    "find_blueprint",
    "learning_rate_scales",
    "unregister_blueprint",
    "zeroed",
]
