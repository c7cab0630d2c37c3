"""Grown architectures from the beginning: what a network does that never had to grow.

The seeds of a finished network are put into newborn hosts, permanent and fully on, before the
first step. They start in one of two ways, since either may be the better for a network that trains
from scratch:

- `usual`: every layer as torch starts it, the last one of a seed included, and scalar gates at 1;
- `zero`: as a seed is planted, so that it adds nothing at first.

Shapes: `K` environments in question, `S` slots, `P` parameters of one seed.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import ScalarGate
from esper.leyline.errors import AgreementError
from esper.leyline.lifecycle import NOTHING
from esper.leyline.ops import Blend
from esper.leyline.stages import SeedStage
from esper.tolaria.plan import PoolKey
from esper.tolaria.population import Population
from esper.tolaria.shuffle import fold
from esper.tolaria.templates import Template


class Start(StrEnum):
    """How the seeds of a network that never grew begin."""

    USUAL = "usual"
    ZERO = "zero"


class Part(NamedTuple):
    """One seed of an architecture, by indices of the catalogue."""

    slot: int
    blueprint: int
    blend: Blend


def plant_grown(
    population: Population, environments: Tensor, parts: Sequence[Part], start: Start
) -> None:
    """Let these newborn environments [K] have the parts, permanent and fully on, from now on."""
    life = population.lifecycle.rows(environments)
    if bool((life.epoch > 0).any()) or bool(life.occupied.any()):
        raise AgreementError(
            "A network from scratch has its parts before it trains",
            given="environments that have trained or hold seeds",
            fix="reset_rows() them first",
        )
    costs = population.catalogue.total_costs()
    for part in parts:
        slot, kind, blend = part
        streams = fold(population.seeds[environments], "scratch", slot)
        _add(population, ("seed", slot, kind), population.pool_rows, environments, streams, start)
        if blend is Blend.GATE:  # starts as 1 either way
            key: PoolKey = ("gate", slot, NOTHING)
            _add(population, key, population.gate_rows, environments, streams, Start.ZERO)
        life.stage[:, slot] = SeedStage.FOSSILIZED
        life.blueprint[:, slot] = kind
        life.blend[:, slot] = blend
        life.alpha[:, slot] = 1.0
        life.params[:, slot] = costs[slot, kind, blend]
    population.lifecycle = population.lifecycle.with_rows(environments, life)
    population.structure_changed()


def _add(
    population: Population,
    key: PoolKey,
    places: Tensor,
    environments: Tensor,
    streams: Tensor,
    start: Start,
) -> None:
    """Give the environments rows of one pool, and note in `places` [N, S] which."""
    rows = population.newborn(key, environments, streams)
    if start is Start.USUAL:
        pool = population.pools[key]
        values = _usual_rows(pool.template, streams)
        pool.state.theta[rows.to(population.device)] = values.to(pool.state.theta)
    places[environments, key[1]] = rows


def _usual_rows(template: Template, streams: Tensor) -> Tensor:
    """[K, P]: rows of modules in which every layer starts as torch starts it."""
    rows = []
    with torch.random.fork_rng(devices=[]):
        for stream in streams.tolist():
            torch.manual_seed(stream)
            module = template.build()
            module.apply(_start_anew)
            rows.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return torch.stack(rows)


def _start_anew(part: nn.Module) -> None:
    if isinstance(part, (nn.Linear, nn.modules.conv._ConvNd)):
        part.reset_parameters()
    elif isinstance(part, ScalarGate):
        nn.init.ones_(part.weight)
