"""Fixed-size plans in a CUDA graph: a step costs one launch, whatever lives in the population.

Launching the few thousand small operations of a step from Python takes far longer than the GPU
needs to run them. A graph replays them at once, but its sizes are frozen. So every group of seeds
gets a capacity with room to spare; places that are not needed point at the pool's spare row and
deliver nothing. A new graph is captured only when a capacity grows or a pool's storage moves.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.leyline.lifecycle import NOTHING
from esper.tolaria.engine import TrainingStep
from esper.tolaria.plan import Group, Plan, PoolKey, SlotPlan, StepPlan, index_lists, sent_to
from esper.tolaria.pools import Pool

if TYPE_CHECKING:
    from esper.tolaria.population import Population

Place = tuple[str, int, int]  # pass name, slot, blueprint (or a code below)
GATED, ROWS = -1, -2


class Padding:
    """Fills the index lists of plans up to capacities, which grow when they no longer suffice."""

    def __init__(self, pools: Mapping[PoolKey, Pool], grain: int) -> None:
        self.pools, self.grain = pools, grain
        self.capacities: dict[Place, int] = {}

    def _room(self, place: Place, needed: int) -> int:
        """Keeps a capacity that suffices, else rounds up; always leaves one place unused."""
        if needed >= self.capacities.get(place, 0):
            self.capacities[place] = (needed // self.grain + 1) * self.grain
        return self.capacities[place]

    def pad(self, name: str, plan: Plan) -> Plan:
        """The same pass with every index list filled up to its capacity."""
        slots = tuple(self._pad_slot(name, index, slot) for index, slot in enumerate(plan.slots))
        if plan.environment is None:
            return Plan(None, slots, plan.start)
        room = self._room((name, 0, ROWS), len(plan.environment))
        environment = torch.zeros(room, dtype=torch.int64)
        environment[: len(plan.environment)] = plan.environment
        return Plan(environment, slots, room)

    def pad_both(self, plan: StepPlan) -> StepPlan:
        isolated = None if plan.isolated is None else self.pad("isolated", plan.isolated)
        return plan._replace(training=self.pad("training", plan.training), isolated=isolated)

    def _pad_slot(self, name: str, index: int, slot: SlotPlan) -> SlotPlan:
        present = {group.blueprint: group.rows for group in slot.groups}
        for blueprint, rows in present.items():
            self._room((name, index, blueprint), len(rows))
        kinds = sorted(k for n, i, k in self.capacities if n == name and i == index and k >= 0)
        groups, places, total = [], [], 0
        for kind in kinds:
            spare = self.pools["seed", index, kind].capacity
            rows = torch.full((self.capacities[name, index, kind],), spare)
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
            self._room(key, len(slot.gated))
        # The last place is never in use.
        gated = torch.full((self.capacities.get(key, 0),), total - 1)
        gate_rows = torch.zeros_like(gated)
        if len(gated):
            gated[: len(slot.gated)] = place[slot.gated]
            gate_rows += self.pools["gate", index, NOTHING].capacity
            gate_rows[: len(slot.gated)] = slot.gate_rows
        lists = {n: spread(getattr(slot, n)) for n in ("where", "value", "gradient", "open_")}
        gates = {"gated": gated, "gate_rows": gate_rows}
        return slot._replace(groups=tuple(groups), isolated=True, **lists, **gates)


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

    def __init__(self, population: "Population") -> None:
        self.population, self.feed, self.pools = population, population.feed, population.pools
        self.padding = Padding(self.pools, grain=max(4, self.feed.environments // 64))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._frozen: object = None  # the sizes the graph was captured with
        self._plan: StepPlan

    def epoch(self, plan: StepPlan, order: Tensor, before: Callable[[int, Tensor], None]) -> Tensor:
        """Train on the batches of `order` [T, N, B]; returns the summed losses [N].

        `before` is called ahead of every step, with its number and its samples. What it does is
        not captured: which shadows learn changes from step to step.
        """
        plan = self.padding.pad_both(plan)
        versions = tuple((key, pool.version) for key, pool in self.pools.items())
        sizes = (tuple(sorted(self.padding.capacities.items())), versions, plan.isolated is None)
        if sizes != self._frozen:
            self._capture(plan, order[0])
            self._frozen = sizes
        else:
            self._refill(plan)
        assert self._graph is not None
        self._total.zero_()
        for number, index in enumerate(order):
            before(number, index)
            self._index.copy_(index)
            self._graph.replay()
        return self._total.clone()

    def _refill(self, plan: StepPlan) -> None:
        """Let the graph's own plan say what `plan` says, which has the same sizes."""
        kept, fresh = (index_lists(each.training, each.isolated) for each in (self._plan, plan))
        for static, now in zip(kept, fresh, strict=True):
            static.copy_(now, non_blocking=True)
        for key, mask in self._plan.learners.items():
            mask.copy_(plan.learners[key]) if key in plan.learners else mask.zero_()

    def _capture(self, plan: StepPlan, index: Tensor) -> None:
        device = self.feed.device
        self._graph = None  # gives the old graph's memory back first
        keys = [] if plan.isolated is None else plan.isolated.pool_keys()
        masks = {key: torch.zeros_like(self.pools[key].state.active) for key in keys}
        self._plan = sent_to(plan, device)._replace(learners=masks)
        self._refill(plan)
        self._index = index.clone()
        self._total = torch.zeros(self.feed.environments, device=device, dtype=torch.float64)
        step = TrainingStep(self.population, self._plan)
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
