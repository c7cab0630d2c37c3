"""Blueprints: small modules that can be planted in a slot, by family of host."""

# Importing a family's module registers its blueprints.
from esper.kasmina.blueprints import conv1d, conv2d, dense, transformer
from esper.kasmina.blueprints.parts import ScalarGate, learning_rate_scales, zeroed
from esper.kasmina.blueprints.registry import (
    Blueprint,
    blueprint,
    blueprint_names,
    build_catalogue,
    cost,
    find_blueprint,
    unregister_blueprint,
)

__all__ = [
    "Blueprint",
    "ScalarGate",
    "blueprint",
    "blueprint_names",
    "build_catalogue",
    "conv1d",
    "conv2d",
    "cost",
    "dense",
    "find_blueprint",
    "learning_rate_scales",
    "transformer",
    "unregister_blueprint",
    "zeroed",
]
