"""Fixed-size plans in a CUDA graph: a step costs one launch, whatever lives in the population.

Launching the few thousand small operations of a step from Python takes far longer than the GPU
needs to run them. A graph replays them at once, but its sizes are frozen. So every group of seeds
gets a capacity with room to spare; places that are not needed point at the pool's spare row and
deliver nothing. A new graph is captured only when a capacity grows or a pool's storage moves.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from esper.leyline.lifecycle import NOTHING
from esper.tolaria.engine import TrainingStep
from esper.tolaria.feed import Feed
from esper.tolaria.plan import Group, Plan, PoolKey, SlotPlan, StepPlan
from esper.tolaria.pools import Pool

Capacities = dict[tuple[str, int, int], int]  # pass name, slot, blueprint (or a code below) -> size
GATED, ROWS = -1, -2


def _room(needed: int, held: int, grain: int) -> int:
    """Keeps a capacity that suffices, else rounds up; always leaves one place unused."""
    return held if needed < held else (needed // grain + 1) * grain


def pad_plan(
    plan: Plan, pools: Mapping[PoolKey, Pool], capacities: Capacities, name: str, grain: int
) -> Plan:
    """The same pass with every index list filled up to its capacity, which may grow."""
    slots = tuple(
        _pad_slot(index, slot, pools, capacities, name, grain)
        for index, slot in enumerate(plan.slots)
    )
    if plan.environment is None:
        return Plan(None, slots, plan.start)
    key = (name, 0, ROWS)
    capacities[key] = _room(len(plan.environment), capacities.get(key, 0), grain)
    environment = torch.zeros(capacities[key], dtype=torch.int64)
    environment[: len(plan.environment)] = plan.environment
    return Plan(environment, slots, len(environment))


def _pad_slot(
    index: int,
    slot: SlotPlan,
    pools: Mapping[PoolKey, Pool],
    capacities: Capacities,
    name: str,
    grain: int,
) -> SlotPlan:
    present = {group.blueprint: group.rows for group in slot.groups}
    for blueprint, rows in present.items():
        key = (name, index, blueprint)
        capacities[key] = _room(len(rows), capacities.get(key, 0), grain)
    kinds = sorted(k for n, i, k in capacities if n == name and i == index and k >= 0)
    groups, places, total = [], [], 0
    for kind in kinds:
        rows = torch.full((capacities[name, index, kind],), pools["seed", index, kind].spare)
        used = present.get(kind, rows[:0])
        rows[: len(used)] = used
        groups.append(Group(kind, rows))
        places.append(torch.arange(total, total + len(used)))
        total += len(rows)
    place = torch.cat([torch.zeros(0, dtype=torch.int64), *places])

    def spread(values: Tensor) -> Tensor:
        wide = torch.zeros(total, dtype=values.dtype)
        wide[place] = values
        return wide

    key = (name, index, GATED)
    if len(slot.gated):
        capacities[key] = _room(len(slot.gated), capacities.get(key, 0), grain)
    gated = torch.full((capacities.get(key, 0),), total - 1)  # the last place is never in use
    gate_rows = torch.zeros_like(gated)
    if len(gated):
        gated[: len(slot.gated)] = place[slot.gated]
        gate_rows += pools["gate", index, NOTHING].spare
        gate_rows[: len(slot.gated)] = slot.gate_rows
    return SlotPlan(
        groups=tuple(groups),
        where=spread(slot.where),
        value=spread(slot.value),
        gradient=spread(slot.gradient),
        isolated=True,
        open_=spread(slot.open_),
        gated=gated,
        gate_rows=gate_rows,
        forks=slot.forks,
    )


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile: freeing another graph while one is captured spoils it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class GraphRunner:
    """Keeps the graph of one population's step, and replays it for whole epochs."""

    def __init__(
        self,
        feed: Feed,
        pools: Mapping[PoolKey, Pool],
        make_step: Callable[[StepPlan], TrainingStep],
    ) -> None:
        self.feed, self.pools, self.make_step = feed, pools, make_step
        self.grain = max(4, feed.environments // 64)
        self.capacities: Capacities = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._frozen: object = None  # the sizes the graph was captured with
        self._plan: StepPlan

    def epoch(self, plan: StepPlan, order: Tensor) -> Tensor:
        """Train on the batches of `order` [T, N, B]; returns the summed losses [N]."""
        padded = {
            name: pad_plan(each, self.pools, self.capacities, name, self.grain)
            for name, each in plan.passes().items()
        }
        plan = StepPlan(learners=plan.learners, **padded)
        versions = tuple((key, pool.version) for key, pool in self.pools.items())
        sizes = (tuple(sorted(self.capacities.items())), versions, plan.isolated is None)
        if sizes != self._frozen:
            self._capture(plan, order[0])
            self._frozen = sizes
        else:
            self._refill(plan)
        assert self._graph is not None
        self._total.zero_()
        for index in order:
            self._index.copy_(index)
            self._graph.replay()
        return self._total.clone()

    def _refill(self, plan: StepPlan) -> None:
        """Let the graph's own plan say what `plan` says, which has the same sizes."""
        kept = self._plan.passes()
        for name, each in plan.passes().items():
            for static, fresh in zip(kept[name].tensors(), each.tensors(), strict=True):
                static.copy_(fresh, non_blocking=True)
        for key, mask in self._plan.learners.items():
            mask.copy_(plan.learners[key]) if key in plan.learners else mask.zero_()

    def _capture(self, plan: StepPlan, index: Tensor) -> None:
        device = self.feed.device
        self._graph = None  # gives the old graph's memory back first
        keys = [] if plan.isolated is None else plan.isolated.pool_keys()
        masks = {key: torch.zeros_like(self.pools[key].state.active) for key in keys}
        self._plan = replace(plan.to(device), learners=masks)
        self._refill(plan)
        self._index = index.clone()
        self._total = torch.zeros(self.feed.environments, device=device, dtype=torch.float64)
        step = self.make_step(self._plan)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up; no parameter is changed
            for _ in range(2):
                step.gradients(*self.feed.samples_at(self._index))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph):
            self._total += step.run(*self.feed.fetch(self._index))
        self._graph = graph
