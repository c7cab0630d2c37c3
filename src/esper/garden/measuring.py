"""Everything that an epoch measures on validation data, in one fused pass.

Shapes: `N` environments, `S` slots, `Q` counterfactuals.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.stages import SeedStage
from esper.tolaria.population import Population
from esper.tolaria.population_config import SplitScores


@dataclass(frozen=True)
class Measured:
    """Of every environment."""

    whole: SplitScores  # [N] of the network as it is
    committed: Tensor  # [N] accuracy with only fossilized seeds on
    contribution: Tensor  # [N, S] accuracy with the seed minus without it; NaN: not measured


def uncommitted(population: Population) -> Tensor:
    """[N, S] bool: seeds that show in the output and are not fossilized."""
    life = population.lifecycle
    return (life.alpha > 0) & ~life.at(SeedStage.FOSSILIZED)


def measure(population: Population, *, attribute: bool = True) -> Measured:
    """Score every environment as it is, as committed and, to attribute, without each seed.

    Each distinct subset of seeds is computed once, from where it first differs.
    """
    hosts, slots = population.lifecycle.shape
    everyone = torch.arange(hosts)
    none = torch.zeros(hosts, slots, dtype=torch.bool)
    asked = [(everyone, none), (everyone, uncommitted(population))]
    seeds = (population.lifecycle.alpha > 0) & attribute & ~population.frozen[:, None]
    owners, places = seeds.nonzero(as_tuple=True)
    if len(owners):
        asked.append((owners, torch.nn.functional.one_hot(places, slots).bool()))
    scores = population.counterfactual(
        torch.cat([rows for rows, _ in asked]), torch.cat([off for _, off in asked])
    )
    whole, committed, without = scores.accuracy.split([hosts, hosts, len(owners)])
    contribution = torch.full((hosts, slots), torch.nan, dtype=torch.float64)
    contribution[owners, places] = whole[owners] - without
    return Measured(SplitScores(scores.loss[:hosts], whole), committed, contribution)
