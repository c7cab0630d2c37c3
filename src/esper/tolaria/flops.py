"""Training FLOPs: what hosts and seeds cost to train, counted from their shapes.

Products of matrices and convolutions count two for each multiply-add, as
`torch.utils.flop_counter` counts them; activations, sums and normalisations count nothing. A
training step counts three times its forward pass: the backward pass has the products for weights
and for activations. That is slightly too much where no gradient for the input is needed, and in
the second pass of isolated seeds, where the host's weights get none. Zeros that pad a convolution
count like data, and so do silenced weights.

A shadow counts a forward pass of its whole host, a backward pass from its slot on, and three passes
of its own. That is an upper bound: what comes before a slot is computed once for all shadows of a
host, and planted seeds count as if all of them stood behind it.

Shapes: `N` environments, `S` slots, `P` blueprints.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.kasmina import Isolation, SegmentedHost
from esper.kasmina.blueprints import find_blueprint
from esper.kasmina.shadow_seeds import counted
from esper.leyline import Blend, BlueprintCatalogue, Lifecycle, SeedStage
from esper.leyline.constants import TRAINING_PASSES as STEP


@dataclass(frozen=True)
class FlopTable:
    """One sample's forward pass through a host, and through each seed that fits it."""

    host: int
    seeds: Tensor  # [S, P] int64; 0 where the blueprint does not fit
    gates: Tensor  # [S] int64 of the learned blend gate
    after: Tensor  # [S] int64 of what comes after each slot in the host

    def training(
        self,
        life: Lifecycle,
        samples: int,
        isolation: Isolation = Isolation.DUAL_PASS,
        shadowed: Tensor | None = None,
    ) -> Tensor:
        """[N] float64: what an epoch of so many samples costs each environment as it is now.

        Seeds that show take part in the host's pass. In the dual pass environments with seeds in
        TRAINING run a second time, with those on as well. `shadowed` [N, S, P]: the share of the
        samples that each shadow learns from.
        """
        alone = life.at(SeedStage.TRAINING)  # [N, S]
        shown = life.alpha > 0
        seeds = self._seeds(life)
        passes = self.host + torch.where(shown | alone, seeds, 0).sum(1)
        if isolation is not Isolation.STRAIGHT_THROUGH:
            first = self.host + torch.where(shown, seeds, 0).sum(1)
            passes = first + torch.where(alone.any(1), passes, 0)
        total = passes.double() * (STEP * samples)
        if shadowed is not None:
            total += (self.shadows(life) * shadowed).sum((1, 2)) * (STEP * samples * self.host)
        return total

    def shadows(self, life: Lifecycle) -> Tensor:
        """[N, S, P] float64: what each shadow costs, as its host is now; 1: a host alone."""
        shown = torch.where(life.alpha > 0, self._seeds(life), 0).sum(1, keepdim=True)  # [N, 1]
        passes = 2 * shown + self.host + self.after  # [N, S]
        return (passes[:, :, None] + STEP * self.seeds).double() / (STEP * self.host)

    def _seeds(self, life: Lifecycle) -> Tensor:
        """[N, S] int64: one sample's forward pass through what each slot holds."""
        slots = torch.arange(len(self.gates))
        bodies = self.seeds[slots, life.blueprint.clamp(min=0)]
        return bodies + torch.where(life.blend == Blend.GATE, self.gates, 0)


def count_flops(host: SegmentedHost, sample: Tensor, catalogue: BlueprintCatalogue) -> FlopTable:
    """Count a host, given one sample as a batch, and every seed that its catalogue offers."""
    specs = host.slot_specs()
    seeds = torch.zeros(len(specs), len(catalogue.names), dtype=torch.int64)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # newborn bodies draw their weights
        for slot, spec in enumerate(specs):
            for index, name in enumerate(catalogue.names):
                if catalogue.costs[slot][index] >= 0:
                    body = find_blueprint(name, spec.family).build(spec)
                    seeds[slot, index] = _forward(body, torch.zeros(spec.canonical_shape(batch=1)))
        whole = _forward(host, sample)
        ahead = [
            _forward(nn.Sequential(*host.segments[: i + 1]), sample) for i in range(len(specs))
        ]
    # A gate is a product with a vector at every position, which the counter does not know.
    gates = [2 * math.prod(spec.canonical_shape(batch=1)) for spec in specs]
    return FlopTable(whole, seeds, torch.tensor(gates), whole - torch.tensor(ahead))


def _forward(module: nn.Module, sample: Tensor) -> int:
    return counted(lambda: module(sample))
