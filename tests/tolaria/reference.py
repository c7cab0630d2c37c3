"""The reference trainer: one host, plain PyTorch, one obvious step after the other."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.kasmina.slotted import SlottedModel

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class EpochReport:
    """What one epoch of training measured."""

    loss: float  # mean over batches
    gradient: dict[str, float]  # root mean square of each seed's gradient norm, by slot


def shuffled_batches(
    inputs: Tensor, labels: Tensor, size: int, order: torch.Generator
) -> Iterator[Batch]:
    """Whole batches in a random order; a last, smaller one is left out."""
    permutation = torch.randperm(len(inputs), generator=order)
    for start in range(0, len(inputs) - size + 1, size):
        chosen = permutation[start : start + size]
        yield inputs[chosen], labels[chosen]


def train_epoch(
    host: SlottedModel, optimizer: Optimizer, loss: Loss, batches: Iterable[Batch]
) -> EpochReport:
    """Train host and seeds on every batch; isolated seeds learn in a pass of their own."""
    host.train()
    losses: list[float] = []
    squares: dict[str, list[float]] = {}
    for inputs, labels in batches:
        optimizer.zero_grad()
        value = loss(host(inputs), labels)
        value.backward()
        if host.has_isolated_seeds:
            with host.seed_pass():
                loss(host(inputs), labels).backward()
        for name, norm in gradient_norms(host).items():
            squares.setdefault(name, []).append(norm**2)
        optimizer.step()
        losses.append(value.item())
    norms = {name: math.sqrt(sum(values) / len(values)) for name, values in squares.items()}
    return EpochReport(sum(losses) / len(losses), norms)


def gradient_norms(host: SlottedModel) -> dict[str, float]:
    """The norm of each seed's present gradient, by slot, for seeds that have one."""
    norms: dict[str, float] = {}
    for spec, slot in zip(host.specs, host.slots, strict=True):
        grads = [p.grad.norm() for p in slot.parameters() if p.grad is not None]
        if grads:
            norms[spec.name] = float(torch.stack(grads).norm())
    return norms


@torch.no_grad()
def accuracy(host: torch.nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Percent of labels that the host's largest logit gets right."""
    was_training = host.training
    host.eval()
    right: Tensor = (host(inputs).argmax(dim=-1) == labels).double().mean()
    host.train(was_training)
    return 100.0 * float(right)


def contributions(host: SlottedModel, score: Callable[[], float]) -> dict[str, float]:
    """For each seed that is on: the score with it minus the score without it."""
    full = score()
    result: dict[str, float] = {}
    for name, slot in host.seed_slots.items():
        if slot.seed is not None and slot.seed.alpha > 0:
            with host.without(name):
                result[name] = full - score()
    return result
