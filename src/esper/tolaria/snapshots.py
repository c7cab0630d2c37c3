"""Whole environments as values: keep them, put them back, copy them, start them anew.

Shapes: `N` environments, `S` slots, `K` environments in question.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.leyline.errors import AgreementError
from esper.leyline.lifecycle import NOTHING, Lifecycle
from esper.leyline.streams import derive_seed
from esper.tolaria.plan import HOST, PoolKey
from esper.tolaria.pools import VACANT
from esper.tolaria.population import Population
from esper.tolaria.shuffle import fold

# What a population keeps for each environment, beside its lifecycle and its rows in pools.
_KEPT = ("planted", "pool_rows", "gate_rows", "seeds", "budget", "rate", "decay", "frozen")


@dataclass(frozen=True)
class Snapshot:
    """Everything that makes up the environments of a population at one moment.

    Random streams need no place of their own: they follow from seeds and counters.
    """

    lifecycle: Lifecycle
    kept: Mapping[str, Tensor]  # [N] or [N, S] each
    live: Tensor | None  # [N, P] weights of hosts that exist
    tensors: Mapping[PoolKey, Mapping[str, Tensor]]  # what each pool keeps by row


def take_snapshot(population: Population) -> Snapshot:
    """A copy of all environments that later training does not touch."""
    return Snapshot(
        lifecycle=population.lifecycle,  # never changed in place
        kept={name: getattr(population, name).clone() for name in _KEPT},
        live=None if population.live is None else population.live.clone(),
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
    are taken over, and rates and budget; the target keeps its own random streams, so copies go
    their own ways.
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
    for name in ("planted", "budget", "rate", "decay", "frozen"):
        getattr(population, name)[targets] = snapshot.kept[name][sources]
    _copy(population, HOST, targets, snapshot, sources)
    if snapshot.live is not None:
        silence_rows(population, targets, snapshot.live[sources.to(population.device)])
    for slot in range(life.shape[1]):
        kinds = life.blueprint[:, slot]
        for kind in kinds[kinds != NOTHING].unique().tolist():
            chosen = kinds == kind
            old = snapshot.kept["pool_rows"][sources[chosen], slot]
            key: PoolKey = ("seed", slot, kind)
            rows = population.pools[key].give(targets[chosen])
            _copy(population, key, rows, snapshot, old)
            population.pool_rows[targets[chosen], slot] = rows
        gates = snapshot.kept["gate_rows"][sources, slot]
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
    if len(identities) != len(environments) or len(environments.unique()) != len(environments):
        raise AgreementError(
            "Every environment that starts anew needs one identity",
            given=f"environments {environments.tolist()}, identities {list(identities)}",
        )
    clear_seeds(population, environments)
    fresh = Lifecycle.dormant(len(environments), len(population.specs))
    population.lifecycle = population.lifecycle.with_rows(environments, fresh)
    population.planted[environments] = 0
    population.seeds[environments] = torch.tensor(
        [derive_seed(population.seed, "environment", identity) for identity in identities]
    )
    population.frozen[environments] = False
    streams = fold(population.seeds[environments], "host")
    population.newborn(HOST, environments, streams, rows=environments)  # host n is row n
    if population.live is not None:
        whole = torch.ones(len(environments), population.live.shape[1], dtype=torch.bool)
        silence_rows(population, environments, whole)
    population.structure_changed()


def freeze_rows(population: Population, environments: Tensor) -> None:
    """Let these environments idle: no step, no decision until they are reset."""
    population.frozen[environments] = True
    population.pools[HOST].state.active[environments] = False
    for pool in population.pools.values():
        held = torch.isin(pool.owner, environments).nonzero()[:, 0]
        pool.state.active[held] = False


def silence_rows(population: Population, environments: Tensor, live: Tensor) -> None:
    """Fix the weights of these hosts [K] at zero where `live` [K, P] is false, until told again."""
    pool = population.pools[HOST]
    expected = [len(environments), pool.template.width]
    if live.dtype != torch.bool or list(live.shape) != expected:
        raise AgreementError(
            "Silencing needs a boolean for each weight of each host",
            given=f"{live.dtype} {list(live.shape)}",
            valid=f"torch.bool {expected}",
        )
    if population.live is None:
        population.live = torch.ones_like(pool.state.theta[:-1], dtype=torch.bool)
        pool.version += 1  # a captured step does not know of it
        population.structure_changed()
    there, live = environments.to(population.device), live.to(population.device)
    population.live[there] = live
    for tensor in (pool.state.theta, *pool.state.moments):
        tensor[there] = torch.where(live, tensor[there], 0.0)


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
    state["blueprint_names"] = population.catalogue.encoded_names()
    for name in _KEPT:
        state[name] = getattr(population, name).clone()
    if population.live is not None:
        state["live"] = population.live.clone()
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
    catalogue, names = population.catalogue, state["blueprint_names"]
    life = replace(life, blueprint=catalogue.translated(life.blueprint, names))
    saved: dict[PoolKey, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if name.startswith("pools."):
            _, kind, slot, blueprint, field = name.split(".")
            index = catalogue.translated(torch.tensor([int(blueprint)]), names)
            saved.setdefault((kind, int(slot), int(index)), {})[field] = tensor
    for key, tensors in saved.items():  # all are checked before any is taken over
        population.pool(key).require_fitting(tensors)
    population.lifecycle = life
    for name in _KEPT:
        setattr(population, name, state[name].clone())
    for key in [key for key in population.pools if key not in saved]:
        del population.pools[key]
    for key, tensors in saved.items():
        population.pool(key).load(tensors)
    population.live = state["live"].to(population.device).clone() if "live" in state else None
    population.structure_changed()
