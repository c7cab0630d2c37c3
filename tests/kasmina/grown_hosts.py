"""Hosts that have grown, by name, for the tests of export."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from esper.kasmina import GateRules, SlottedModel, Target, blueprint_names, build_host
from esper.leyline import Layout, SeedStage
from tests.kasmina import export_models as models

RULES = GateRules(
    min_gradient=None,
    min_contribution=None,
    max_loss_rise=None,
    min_holding_epochs=0,
    min_training_epochs=0,
    blend_tempo=1,
)


def plant(host: SlottedModel, slot: str, blueprint: str, blend: str = "immediate") -> None:
    """A seed in HOLDING that does something."""
    host.germinate(slot, blueprint, blend)
    if host.seed_slots[slot].stage is SeedStage.TRAINING:
        host.advance(slot)
    while host.seed_slots[slot].stage is not SeedStage.HOLDING:
        host.pass_time()
    index = host.catalogue.slots.index(slot)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(index)
        for parameter in host.slots[index].parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def grow(host: SlottedModel, blueprints: Sequence[str]) -> SlottedModel:
    """Fossilize a seed in each slot, every other one with a gate; the last one stays alive."""
    names = host.catalogue.slots.names
    for index, (slot, blueprint) in enumerate(zip(names, blueprints, strict=True)):
        plant(host, slot, blueprint, "gate" if index % 2 else "immediate")
        if index < len(names) - 1:
            host.fossilize(slot)
    return host


@dataclass(frozen=True)
class Grown:
    """A model of some kind, where it grew, what it grew and an input."""

    model: Callable[[], nn.Module]
    blueprints: Sequence[str]
    sample: Callable[[], Any]
    places: Sequence[str | Target] | None = None

    def build(self) -> tuple[SlottedModel, Any]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sample, model = self.sample(), self.model()
            host = SlottedModel(model, self.places, sample, rules=RULES)
        return grow(host, self.blueprints), sample


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 20, shape)


def _parts(kind: str, part: str) -> Grown:
    return Grown(
        lambda: models.Parts(kind),
        ["mlp", "norm"],
        lambda: torch.randn(4, 6),
        places=[f"trunk@{part}", "head"],
    )


# Every blueprint of a family in one host of that family, and one seed more that stays alive.
FAMILIES = {
    "conv1d": Grown(
        lambda: build_host("conv1d", stages=8, channels=4),
        [*blueprint_names("conv1d"), "norm"],
        lambda: torch.randn(4, 40),
    ),
    "conv2d": Grown(
        lambda: build_host("conv2d", size=12, widths=(4,) * 6),
        [*blueprint_names("conv2d"), "norm"],
        lambda: torch.randn(4, 3, 12, 12),
    ),
    "dense": Grown(
        lambda: build_host("mlp", features=12, width=8),
        [*blueprint_names("dense"), "norm"],
        lambda: torch.randn(4, 12),
        places=[f"segments.{at}" for at in ("0", "1", "1.0", "1.1", "2", "2.0", "3")],
    ),
    "transformer": Grown(
        lambda: build_host("gpt", width=8, heads=2, vocabulary=20, blocks=2, context=8),
        [*blueprint_names("transformer"), "norm"],
        lambda: _tokens(4, 6),
        places=[
            Target(f"segments.{at}", layout=Layout.TOKENS)
            for at in ("0.0", "0.1.attend", "0.1.think", "0", "1", "1.think")
        ],
    ),
}

# Esper's own hosts, with the slots that they announce.
OWN = {
    "own conv1d": Grown(
        lambda: build_host("conv1d"), ["conv", "norm", "norm"], lambda: torch.randn(4, 1, 40)
    ),
    "own conv2d": Grown(
        lambda: build_host("conv2d", size=8, widths=(4, 8, 8)),
        ["conv", "norm", "norm"],
        lambda: torch.randn(4, 3, 8, 8),
    ),
    "own mlp": Grown(
        lambda: build_host("mlp"), ["mlp", "norm", "norm"], lambda: torch.randn(4, 40)
    ),
    "own gpt": Grown(
        lambda: build_host("gpt", width=8, heads=2, blocks=3),
        ["attention", "norm", "norm"],
        lambda: _tokens(4, 6),
    ),
}

USERS = {
    "residual cnn": Grown(
        models.ResidualCnn,
        ["conv", "squeeze", "norm", "norm", "mlp"],
        lambda: torch.randn(4, 3, 10, 9),
        places=["stem", "layer1.0", "layer1", "layer2.conv", "fc"],
    ),
    "u-net": Grown(
        models.UNet,
        ["depthwise", "bottleneck", "conv", "norm"],
        lambda: {"image": torch.randn(4, 1, 12, 10)},
        places=["down1", "down2", "up", "out"],
    ),
    "lstm": Grown(
        models.LstmClassifier,
        ["lora", "attention", "norm"],
        lambda: _tokens(4, 7),
        places=["embed", "rnn@0", "head"],
    ),
    "encoder": Grown(
        models.Encoder,
        ["mlp", "attention", "gate", "norm"],
        lambda: (torch.randn(4, 6, 5), 0.5),
        places=["embed", "encoder.layers.0", "encoder.layers.1.self_attn@0", "head"],
    ),
    "tied weights": Grown(
        models.TiedLm,
        ["lora", "mlp", "norm"],
        lambda: _tokens(4, 7),
        places=["embed", "mix", "head"],
    ),
    "called twice": Grown(
        models.Twice,
        ["mlp", "norm", "gate", "wide"],
        lambda: torch.randn(4, 6),
        places=["first", "stack", "layers.0", "layers.1"],
    ),
    "containers": Grown(
        models.chain, ["mlp", "gate", "norm"], lambda: torch.randn(4, 6), places=["0", "1", "2"]
    ),
    "dense block": Grown(
        models.Dense,
        ["mlp", "norm"],
        lambda: torch.randn(4, 6),
        places=["features.0", "head"],
    ),
    "dict part": _parts("dict", "low"),
    "model output part": _parts("ordered", "high"),
    "named tuple part": _parts("named", "1"),
    "list part": _parts("list", "0"),
    "tuple part": _parts("tuple", "1"),
}

HOSTS = FAMILIES | OWN | USERS
