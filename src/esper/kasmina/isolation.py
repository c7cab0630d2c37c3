"""Gradient isolation: a pass in which chosen parameters learn and nothing else notices."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import torch
from torch import nn


class Isolation(StrEnum):
    """How a TRAINING seed learns while the host does not notice."""

    DUAL_PASS = "dual_pass"  # a second pass with the seed on and everything else frozen
    STRAIGHT_THROUGH = "straight_through"  # in the host's own pass, from the gradient that h gets


def random_devices(module: nn.Module) -> list[torch.device]:
    """The CUDA devices whose random streams the module may use."""
    return sorted({p.device for p in module.parameters() if p.device.type == "cuda"}, key=str)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Whatever happens to the module's buffers inside is undone (batch statistics, say)."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


@contextmanager
def only_learning(
    module: nn.Module, learning: Sequence[nn.Parameter], *, stream: int
) -> Iterator[None]:
    """Inside, of all the module's parameters only `learning` receive gradient.

    Random numbers come from `stream`; the process's own random state is put back at the end.
    """
    chosen = {id(parameter) for parameter in learning}
    frozen = [p for p in module.parameters() if p.requires_grad and id(p) not in chosen]
    with torch.random.fork_rng(devices=random_devices(module)):
        torch.manual_seed(stream)
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
