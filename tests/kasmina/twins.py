"""Twins for exact comparison: a plain model of the zoo, and the same one with slots."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from esper.kasmina import GateRules, Isolation, SlottedModel, Target
from esper.kasmina.slotted import past_results
from esper.leyline import Family, SlotSpec
from tests.kasmina.zoo import Entry, tensors_in

RULES = GateRules(min_gradient=None, min_contribution=None, max_loss_rise=None)
# One seed that ends in a zeroed layer and one that works by a gate or scale of its own.
BLUEPRINTS = {
    Family.DENSE: ("mlp", "norm"),
    Family.CONV1D: ("conv", "norm"),
    Family.CONV2D: ("conv", "norm"),
    Family.TRANSFORMER: ("attention", "norm"),
}


def blueprint_for(spec: SlotSpec, which: int = 0) -> str:
    return BLUEPRINTS[spec.family][which % 2]


def wrapped(
    entry: Entry,
    places: Sequence[str | Target] | None = None,
    isolation: Isolation = Isolation.DUAL_PASS,
    start: int = 1,
) -> SlottedModel:
    return SlottedModel(
        entry.model(start), places or entry.places, entry.sample, rules=RULES, isolation=isolation
    )


def optimizer_for(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    if isinstance(model, SlottedModel):
        model.track(optimizer)
    return optimizer


def throw(number: int) -> None:
    """Start every global random stream from `number`."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def random_states() -> list[Tensor]:
    """All global random states, as tensors."""
    words = np.random.get_state()[1]
    python = random.getstate()[1]
    return [torch.get_rng_state(), torch.tensor(words.astype(np.int64)), torch.tensor(python)]


def outputs(entry: Entry, model: nn.Module) -> list[Tensor]:
    """What the model returns in training and then in evaluation, without a trace left in it."""
    model = copy.deepcopy(model, past_results(model))
    found: list[Tensor] = []
    for training in (True, False):
        throw(5)
        found += tensors_in(entry.run(model.train(training)))
    return [tensor.detach() for tensor in found]


def step(entry: Entry, model: nn.Module, optimizer: Optimizer, *, dice: int) -> list[Tensor]:
    """One step of training; returns the outputs and the random states it left behind."""
    throw(dice)
    optimizer.zero_grad()
    output = entry.run(model)
    entry.loss(output).backward()
    if isinstance(model, SlottedModel) and model.has_isolated_seeds:
        with model.seed_pass():
            entry.loss(entry.run(model)).backward()
    optimizer.step()
    return [*(tensor.detach() for tensor in tensors_in(output)), *random_states()]


def body_of(model: nn.Module) -> nn.Module:
    return model.model if isinstance(model, SlottedModel) else model


def condition(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Everything that the model itself, without its seeds, is and remembers."""
    body = body_of(model)
    found: dict[str, Any] = {f"weight {name}": p for name, p in body.named_parameters()}
    found |= {f"gradient {name}": p.grad for name, p in body.named_parameters()}
    found |= {f"buffer {name}": buffer for name, buffer in body.named_buffers()}
    for path, part in body.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Generator):
                found[f"stream {path}.{name}"] = value.get_state()
            elif isinstance(value, Tensor | int | float | str | None):
                found[f"attribute {path}.{name}"] = value
    if optimizer is not None:
        for name, parameter in body.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimiser {name}.{key}"] = value
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in found.items()}


def same_bits(left: object, right: object) -> bool:
    """Equal to the bit: 0.0 is not -0.0, and a NaN equals itself."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and left == right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(*flat)


def require_same(left: Any, right: Any, what: str = "outputs") -> None:
    """Assert that two lists or dicts hold the same bits, and say where they do not."""
    lefts = left if isinstance(left, dict) else dict(enumerate(left))
    rights = right if isinstance(right, dict) else dict(enumerate(right))
    assert lefts.keys() == rights.keys(), f"{what}: {lefts.keys() ^ rights.keys()}"
    differing = [name for name in lefts if not same_bits(lefts[name], rights[name])]
    assert not differing, f"{what} differ: {differing}"


def unequal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return any(not same_bits(a, b) for a, b in zip(left, right, strict=True))


def seed_of(host: SlottedModel, index: int) -> nn.Module:
    seed = host.slots[index].seed
    assert isinstance(seed, nn.Module)
    return seed


def stir(seed: nn.Module) -> None:
    """Move a seed's weights away from where it does nothing."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float32)
