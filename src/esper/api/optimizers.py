"""Optimisers of a run: torch's by name, or a class, made so that seeds can join them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from esper.api.grow_settings import GrowSettings
from esper.api.growing_model import GrowingModel
from esper.leyline.errors import EsperError, UnknownNameError

MakeOptimizer = Callable[..., Optimizer]

_OPTIMIZERS = {
    name: value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
}


def name_of_optimizer(kind: MakeOptimizer) -> str | None:
    """Return the name of a class of torch's; None: checkpoints cannot store this one."""
    for name, optimizer_class in _OPTIMIZERS.items():
        if optimizer_class is kind:
            return name
    return None


def make_optimizer(
    kind: str | MakeOptimizer, host: GrowingModel, settings: GrowSettings
) -> Optimizer:
    """Make an optimiser of the host's parameters with the rate and weight decay of the settings."""
    if isinstance(kind, Optimizer):
        raise EsperError(
            "The optimiser is made already, and knows no seeds",
            fix=f"pass its class: optimizer=torch.optim.{type(kind).__name__}, lr=...",
        )
    options: dict[str, Any] = {"lr": settings.lr}
    if settings.weight_decay is not None:
        options["weight_decay"] = settings.weight_decay
    if isinstance(kind, str):
        return host.optimizer(_class_of(kind), **options)
    return host.optimizer(kind, **options)


def _class_of(name: str) -> type[Optimizer]:
    classes = {key.lower(): value for key, value in _OPTIMIZERS.items()}
    if name.lower() not in classes:
        raise UnknownNameError.of("optimiser", name, _OPTIMIZERS)
    return classes[name.lower()]
