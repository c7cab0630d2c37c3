"""Whole environments as values: keep them, put them back, copy them, start them anew.

Shapes: `N` environments, `S` slots, `K` environments in question.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.errors import AgreementError
from esper.leyline.lifecycle import NOTHING, Lifecycle
from esper.leyline.streams import derive_seed
from esper.tolaria.plan import HOST, PoolKey
from esper.tolaria.pools import VACANT
from esper.tolaria.population import Population
from esper.tolaria.shuffle import fold

_KEPT = ("planted", "pool_rows", "gate_rows", "seeds", "budget", "rate", "decay")


@dataclass(frozen=True)
class Snapshot:
    """Everything that makes up the environments of a population at one moment.

    Random streams need no place of their own: they follow from seeds and counters.
    """

    lifecycle: Lifecycle
    planted: Tensor  # [N]
    pool_rows: Tensor  # [N, S]
    gate_rows: Tensor  # [N, S]
    tensors: Mapping[PoolKey, Mapping[str, Tensor]]  # what each pool keeps by row


def take_snapshot(population: Population) -> Snapshot:
    """A copy of all environments that later training does not touch."""
    return Snapshot(
        lifecycle=population.lifecycle,  # never changed in place
        planted=population.planted.clone(),
        pool_rows=population.pool_rows.clone(),
        gate_rows=population.gate_rows.clone(),
        tensors={
            key: {name: tensor.clone() for name, tensor in pool.tensors().items()}
            for key, pool in population.pools.items()
        },
    )


def put_rows(
    population: Population, targets: Tensor, snapshot: Snapshot, sources: Tensor | None = None
) -> None:
    """Make the environments `targets` [K] what `sources` [K] were in the snapshot.

    By default each goes back to what it was itself. Weights, seeds, optimiser state and lifecycle
    are taken over; the target keeps its own random streams, so copies go their own ways.
    """
    sources = targets if sources is None else sources
    if targets.shape != sources.shape or len(targets.unique()) != len(targets):
        raise AgreementError(
            "Every target needs one source, and only one",
            given=f"targets {targets.tolist()}, sources {sources.tolist()}",
        )
    clear_seeds(population, targets)
    life = snapshot.lifecycle.rows(sources)
    population.lifecycle = population.lifecycle.with_rows(targets, life)
    population.planted[targets] = snapshot.planted[sources]
    _copy(population, HOST, targets, snapshot, sources)
    for slot in range(life.shape[1]):
        kinds = life.blueprint[:, slot]
        for kind in kinds[kinds != NOTHING].unique().tolist():
            chosen = kinds == kind
            old = snapshot.pool_rows[sources[chosen], slot]
            key: PoolKey = ("seed", slot, kind)
            rows = population.pools[key].give(targets[chosen])
            _copy(population, key, rows, snapshot, old)
            population.pool_rows[targets[chosen], slot] = rows
        gates = snapshot.gate_rows[sources, slot]
        gated = gates != VACANT
        if bool(gated.any()):
            key = ("gate", slot, NOTHING)
            rows = population.pools[key].give(targets[gated])
            _copy(population, key, rows, snapshot, gates[gated])
            population.gate_rows[targets[gated], slot] = rows
    population.structure_changed()


def _copy(
    population: Population, key: PoolKey, rows: Tensor, snapshot: Snapshot, old: Tensor
) -> None:
    for name, tensor in population.pools[key].tensors().items():
        tensor[rows] = snapshot.tensors[key][name][old]


def clear_seeds(population: Population, environments: Tensor) -> None:
    """Give back every row that these environments' seeds hold, whatever their stage."""
    life = population.lifecycle
    for slot in range(life.shape[1]):
        holding = environments[life.blueprint[environments, slot] != NOTHING]
        if len(holding):
            population.remove_seeds(slot, holding, life)


def reset_rows(population: Population, environments: Tensor, identities: Sequence[int]) -> None:
    """Start these environments anew, as other environments with streams of their own."""
    clear_seeds(population, environments)
    fresh = Lifecycle.dormant(len(environments), len(population.specs))
    population.lifecycle = population.lifecycle.with_rows(environments, fresh)
    population.planted[environments] = 0
    population.seeds[environments] = torch.tensor(
        [derive_seed(population.seed, "environment", identity) for identity in identities]
    )
    population.pools[HOST].take_back(environments)
    population.newborn(HOST, environments, fold(population.seeds[environments], "host"))
    population.structure_changed()


def freeze_rows(population: Population, environments: Tensor) -> None:
    """Let these environments idle: they take no more steps until they are reset."""
    population.pools[HOST].state.active[environments] = False
    for pool in population.pools.values():
        held = torch.isin(pool.owner, environments).nonzero()[:, 0]
        pool.state.active[held] = False


def set_rates(
    population: Population,
    environments: Tensor,
    *,
    rate: Tensor | float | None = None,
    decay: Tensor | float | None = None,
) -> None:
    """Give these environments a learning rate or weight decay of their own, seeds included."""
    if rate is not None:
        population.rate[environments] = torch.as_tensor(rate, dtype=torch.float64)
    if decay is not None:
        population.decay[environments] = torch.as_tensor(decay, dtype=torch.float64)
    for pool in population.pools.values():
        rows = pool.rows_in_use
        owners = pool.owner[rows]
        state = pool.state
        state.rate[rows] = population.rate[owners].to(state.rate)[:, None]
        state.decay[rows] = population.decay[owners].to(state.decay)[:, None]


def population_state(population: Population) -> dict[str, Tensor]:
    """Every tensor of a population by name, for checkpoints."""
    state = {f"lifecycle.{k}": v for k, v in population.lifecycle.state_dict().items()}
    for name in _KEPT:
        state[name] = getattr(population, name).clone()
    for (kind, slot, blueprint), pool in population.pools.items():
        prefix = f"pools.{kind}.{slot}.{blueprint}"
        state[f"{prefix}.owner"] = pool.owner.clone()
        for name, tensor in pool.tensors().items():
            state[f"{prefix}.{name}"] = tensor.clone()
    return state


def load_population(population: Population, state: Mapping[str, Tensor]) -> None:
    """Put a population of the same shape into a saved state; it goes on bit for bit."""
    life = Lifecycle.from_state_dict(
        {k.removeprefix("lifecycle."): v for k, v in state.items() if k.startswith("lifecycle.")}
    )
    if life.shape != population.lifecycle.shape:
        raise AgreementError(
            "The saved population has another shape",
            given=f"{life.shape[0]} environments with {life.shape[1]} slots",
            valid=f"{population.lifecycle.shape[0]} with {population.lifecycle.shape[1]}",
        )
    population.lifecycle = life
    for name in _KEPT:
        setattr(population, name, state[name].clone())
    pools: dict[PoolKey, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if name.startswith("pools."):
            _, kind, slot, blueprint, field = name.split(".")
            pools.setdefault((kind, int(slot), int(blueprint)), {})[field] = tensor
    for key in [key for key in population.pools if key not in pools]:
        del population.pools[key]
    for key, tensors in pools.items():
        population.pool(key).load(tensors)
    population.structure_changed()
