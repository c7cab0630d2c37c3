"""Several processes that train copies of one model: all decide what the first one measured."""

from collections.abc import Mapping

import torch
from torch import Tensor, distributed, nn

from esper.kasmina.isolation import Isolation
from esper.leyline.errors import EsperError


def agreed(model: nn.Module, numbers: Mapping[str, float]) -> dict[str, float]:
    """These numbers as rank 0 has them; on its own, a process keeps its own."""
    values = torch.tensor(list(numbers.values()), dtype=torch.float64)
    return dict(zip(numbers, shared(model, values).tolist(), strict=True))


def shared(model: nn.Module, values: Tensor) -> Tensor:
    """This tensor as rank 0 has it, on the CPU; on its own, a process keeps its own."""
    if not _are_several():
        return values
    device = next(model.parameters()).device  # NCCL wants it where the model is
    sent = values.to(device, copy=True)
    distributed.broadcast(sent, src=0)
    return sent.cpu()


def require_averaged(isolation: Isolation) -> None:
    """Refuse seeds that learn in a pass of their own where several processes average gradients."""
    if isolation is Isolation.DUAL_PASS and _are_several():
        raise EsperError(
            "Gradients of a pass for seeds alone are not averaged over processes",
            given=f"isolation 'dual_pass' in {distributed.get_world_size()} processes",
            fix="wrap with isolation='straight_through' (esper.grow trains in one process)",
        )


def _are_several() -> bool:
    here = distributed.is_available() and distributed.is_initialized()
    return here and distributed.get_world_size() > 1
