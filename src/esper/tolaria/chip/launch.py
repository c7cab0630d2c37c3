"""Launches: an epoch of every row, or the scores of many passes, as one call of the chip's program.

What a row consists of and which passes it makes is worked out on the device, from the lifecycle's
arrays as they are. Structure changes what those hold and never the program.

Shapes: `N` environments, `S` slots, `P` blueprints, `Q` passes with some seeds off, `U` shadows,
`T` batches, `B` batch, `K` statistics.
"""

import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina import Isolation, SegmentedHost
from esper.kasmina.flow_statistics import TINY
from esper.leyline import NOTHING, BlueprintCatalogue, EsperError, SeedStage
from esper.leyline.signals import FLOW_STATISTICS
from esper.tolaria.chip.build import REALS, Launch, launcher, shared_bytes
from esper.tolaria.chip.source import SCRATCH, ChipProgram, require_fitting, write_program
from esper.tolaria.feed import Feed
from esper.tolaria.optimisers import AdamW, Sgd
from esper.tolaria.plan import HOST, PoolKey
from esper.tolaria.pools import VACANT
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.random_streams import pinned

if TYPE_CHECKING:
    from esper.tolaria.population import Population

FEW_HOSTS = 64  # for fewer, a program is compiled for longer than it saves
log = logging.getLogger("esper")
# Whole numbers of a module, of a pass, and of each slot of a pass; see `row.cuh`.
_MODULE, _PASS, _SLOT, _ROW = 14, 5, 6, 4
_FLOW_SUMS = 7


@dataclass(frozen=True)
class _Work:
    """What a launch is to do with every row, and on which data."""

    split: str
    batches: int
    batch: int
    samples: int  # of all batches
    order: Tensor | None = None  # [T, N, B]; None: as they are kept
    learns: bool = False
    shares: Tensor | None = None  # [N] batches in which shadows take part; None: there are none
    owners: Tensor | None = None  # [Q] environments of passes with some seeds off, rising
    off: Tensor | None = None  # [Q, S] bool


class Chip:
    """The second way to compute a population: one block of threads a row."""

    def __init__(
        self,
        host: SegmentedHost,
        catalogue: BlueprintCatalogue,
        widths: Mapping[PoolKey, int],
        feed: Feed,
        config: PopulationConfig,
    ) -> None:
        self.feed, self.config, own = feed, config, config.optimiser
        changed = config.compute_dtype or config.compiler or feed.augmentation
        if config.dtype not in REALS or changed or not isinstance(own, AdamW | Sgd):
            raise EsperError(
                "The chip backend trains with AdamW or Sgd, in the precision of its weights and "
                "without compiler or augmentation",
                given=f"{own}, {config.dtype}, compute_dtype {config.compute_dtype}",
                fix='choose backend="fused"',
            )
        settings = (
            [0.0, own.momentum, *[0.0] * 4]
            if isinstance(own, Sgd)
            else [1.0, *own.betas, own.epsilon, *map(math.log, own.betas)]
        )
        self.most = shared_bytes(feed.device)
        self.settings = torch.tensor(settings, dtype=torch.float64, device=feed.device)
        self.slots, kinds = len(catalogue.slots), len(catalogue.names)
        self.places = [(slot, kind) for slot in range(self.slots) for kind in range(kinds)]
        assert 1 + 2 * self.slots + len(self.places) <= SCRATCH // 2, "two corrections of a module"
        # [S, P + 1], of nothing last; and of gates [S].
        self.widths = torch.zeros(self.slots, kinds + 1, dtype=torch.int64)
        for place in self.places:
            self.widths[place] = widths.get(("seed", *place), 0)
        gates = [widths["gate", slot, NOTHING] for slot in range(self.slots)]
        self.gate_widths, self.host_width = torch.tensor(gates), widths[HOST]
        extents = [
            [size or 0 for size in spec.extent] for spec in host.slot_specs()
        ]  # 0: any number
        self.lengths = torch.tensor(list(map(math.prod, extents)))  # [S]
        self.program = self._largest(host, catalogue)
        self._written: tuple[Sequence[object], Tensor] = ((), torch.zeros(0))  # see `_pools`

    def _largest(self, host: SegmentedHost, catalogue: BlueprintCatalogue) -> ChipProgram:
        """The program that takes as much of a batch at once as fits, whatever is planted."""
        inputs = self.feed.stored("train")[0].inputs
        planted = self.widths.amax(dim=1) + self.gate_widths
        arena = self.host_width + int(planted.maximum(self.widths.sum(dim=1)).sum())
        size, batch = inputs[0].numel(), self.feed.batch
        sketch = write_program(host, catalogue, size, chunk=1)
        room = self.most // self.config.dtype.itemsize - sketch.numbers(arena)
        most = max(1, min(batch, 1 + room // sketch.per_sample))
        program = write_program(host, catalogue, size, chunk=-(-batch // -(-batch // most)))
        require_fitting(program, arena, self.config.dtype.itemsize, self.most)
        return program

    def launcher(self) -> Launch:
        """The program as it runs, compiled unless it has been before."""
        return launcher(self.program.text, self.config.dtype, self.feed.device)

    def epoch(
        self,
        population: "Population",
        order: Tensor,
        shadows: tuple[Tensor, Tensor] | None = None,
        beside: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Train every row on the batches `order` [T, N, B], and `shadows`: those in [N, S, P], on
        so many batches [N]; `beside` is done meanwhile.

        Returns means over batches of losses [N] and of squared gradients, of hosts [N] and of seeds
        with their gates [N, S]; of shadows, by places, sums of squared gradients and of gains, [U].
        """
        batches, hosts, batch = order.shape
        shares = None if shadows is None else shadows[1]
        sizes = ("train", batches, batch, batches * batch)
        work = _Work(*sizes, order=order, learns=True, shares=shares)
        results, norms = self._launch(population, work)
        beside()
        # One transfer of all that is read.
        losses, gains = results[:hosts, 0] / batch, results[2 * hosts :, 2] / batch
        found = torch.cat([losses, gains, norms.flatten()]).cpu()
        losses, gains, flat = found.split([hosts, len(gains), norms.numel()])
        parts = [1, self.slots, self.slots, norms.shape[1] - 1 - 2 * self.slots]
        host, gates, seeds, others = flat.view_as(norms).split(parts, 1)
        taught = others[:, :0] if shadows is None else others[shadows[0].flatten(1)]
        gains = gains if shadows is None else gains[shadows[0].flatten()]
        means = (losses, host[:, 0], seeds + gates)
        return *(each / batches for each in means), taught, gains

    def score(self, population: "Population", owners: Tensor, off: Tensor, split: str) -> Tensor:
        """Mean loss and share of right samples, [N + Q, 2]: of every row, and of passes of `owners`
        [Q], which rise, with the seeds in `off` [Q, S] switched off."""
        work = self._measuring(split)
        if len(owners):
            work = replace(work, owners=owners, off=off)
        return self._launch(population, work)[0][:, :2].cpu() / work.samples

    def gains(self, population: "Population", where: Tensor) -> tuple[Tensor, Tensor]:
        """Of the shadows in `where` [N, S, P] on validation data: the mean over samples and its
        standard error, [U] each, in the order of places."""
        work = self._measuring("validation")
        work = replace(work, shares=where.flatten(1).any(dim=1).long() * work.batches)
        found = self._launch(population, work)[0][2 * len(where) :, 2:].cpu() / work.samples
        mean, square = found[where.flatten()].unbind(1)
        variance = (square - mean.square()).clamp(min=0.0) / max(work.samples - 1, 1)
        return mean, variance.sqrt()

    def flow(self, population: "Population", samples: int) -> Tensor:
        """[N, S, K]: `flow_statistics` of what reaches each slot, on so many validation samples."""
        work = self._measuring("validation", samples)
        sums = self._launch(population, work, flow=True)[0].cpu().view(-1, self.slots, _FLOW_SUMS)
        means = sums / work.samples
        logs, squares, power, fourth, steps, variance, silent = means.unbind(2)
        rough = 0.5 * (steps + TINY) / (variance + TINY)
        named = {
            "spread": 0.5 * (squares - logs.square()).clamp(min=0.0).sqrt(),
            "silence": silent,
            "peaks": ((fourth + TINY) / power.square()).log10(),
            "roughness": torch.where(self.lengths > 1, rough, torch.nan),
        }
        return torch.stack([named[name] for name in FLOW_STATISTICS], 2)

    def _measuring(self, split: str, most: int | None = None) -> _Work:
        chunk, samples = self.program.chunk, int(self.feed.samples(split)[0])
        samples = samples if most is None else min(most, samples)
        return _Work(split, -(-samples // chunk), chunk, samples)

    def _launch(
        self, population: "Population", work: _Work, flow: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sums of each pass, [N, 4] and what else there is; and squared gradients of host, gates,
        seeds and shadows, [N, 1 + 2 S + S P]. Nothing waits for the device."""
        (hosts, slots), many = population.lifecycle.shape, len(self.places)
        asked = 0 if work.owners is None else len(work.owners)
        shadows = 0 if work.shares is None else many
        modules, turns = 1 + 2 * slots + shadows, 1 + work.learns + shadows
        passes = turns * hosts + asked
        kept = hosts + asked if not (work.learns or shadows) else (2 + shadows) * hosts
        columns = slots * _FLOW_SUMS if flow else 4
        empty = partial(torch.empty, dtype=torch.int64, device=self.feed.device)
        zeros = partial(torch.zeros, dtype=torch.float64, device=self.feed.device)
        results, norms = zeros(kept, columns), zeros(hosts, modules)
        efforts, queue = empty(hosts), empty(hosts)
        written = [empty(hosts * modules * _MODULE), empty(hosts * _ROW)]
        written += [empty(passes * (_PASS + _SLOT * slots)), empty(passes * 2 * slots), efforts]
        data, first = self.feed.stored(work.split)
        settings = self.settings if work.learns else None
        given = [data.inputs, data.labels, work.order, first, results, norms, settings]
        arena = self._arena(population, work)
        straight = work.learns and self.config.isolation is Isolation.STRAIGHT_THROUGH
        sizes = [hosts, work.batches, work.batch, work.samples, arena, modules, turns]
        sizes += [int(straight), int(SeedStage.TRAINING), int(flow)]
        table = self._arguments([*written, queue, *given], self._described(population, work), sizes)
        room = self.program.numbers(arena) * self.config.dtype.itemsize
        run = self.launcher()
        run("describe_rows", table, hosts, 0)
        # The rows that take longest begin first.
        torch.sort(efforts, descending=True, out=(torch.empty_like(efforts), queue))
        run("compute_rows", table, hosts, room)
        return results, norms

    def _arena(self, population: "Population", work: _Work) -> int:
        """Parameters of the largest row, at most."""
        every = torch.arange(self.slots)
        planted = self.widths[every, population.lifecycle.blueprint]  # [N, S]
        planted = planted + self.gate_widths * (population.gate_rows != VACANT)
        if work.shares is not None:
            planted += (self.widths[:, :-1] * population.shadows.living).sum(dim=2)
        return self.host_width + int(planted.sum(dim=1).max())

    def _described(self, population: "Population", work: _Work) -> list[Tensor | None]:
        """What tables are written from: slots [N, S, 5], pools, shadows [N, S, P] and their shares
        [N], and the seeds that are off in each pass asked for, as bits [Q], row by row [N + 1]."""
        life, own = population.lifecycle, population.shadows.rows
        rows = [life.stage, life.blueprint, population.pool_rows, population.gate_rows]
        found = [torch.stack([*rows, life.alpha.view(torch.int64)], 2), self._pools(population)]
        shadows = (None, None) if work.shares is None else (own, work.shares)
        if work.owners is None or work.off is None:
            return [*found, *shadows, None, None]
        bits = (work.off.long() << torch.arange(self.slots)).sum(dim=1)
        starts = torch.searchsorted(work.owners, torch.arange(life.shape[0] + 1))
        return [*found, *shadows, bits, starts]

    def _pools(self, population: "Population") -> Tensor:
        """Where everything begins that pools keep by row, and the bytes of a row, [pools, 20].

        Written again where storage has moved: a pool that does so has another state.
        """
        live, pools = population.live, population.all_pools()
        states = [live, *(pool.state for pool in pools.values())]
        before, written = self._written
        if len(before) == len(states) and all(map(operator.is_, before, states)):
            return written
        gates: list[PoolKey] = [("gate", slot, NOTHING) for slot in range(self.slots)]
        others: list[PoolKey] = [(kind, *p) for kind in ("seed", "shadow") for p in self.places]
        table = []
        for key in (HOST, *gates, *others):
            kept: list[Tensor | None] = [None] * 10
            if (pool := pools.get(key)) is not None:
                state = pool.state
                kept = [state.theta, *[*state.moments, state.moments[0]][:2], pool.squares]
                kept += [state.steps, state.rate, state.decay, state.active, state.scale]
                kept.append(live if key == HOST else None)
            table.append([0 if each is None else each.data_ptr() for each in kept])
            table[-1] += [0 if t is None or len(t) == 1 else t[0].nbytes for t in kept]
        self._written = states, torch.tensor(table)
        return self._written[1]

    def _arguments(
        self, tensors: list[Tensor | None], parts: list[Tensor | None], sizes: list[int]
    ) -> Tensor:
        """The table of arguments, as `row.cuh` names them, with `parts` behind it: one transfer."""
        lengths = [0 if part is None else part.numel() for part in parts]
        begins = list(accumulate(lengths, initial=len(tensors) + len(parts) + len(sizes)))
        table = torch.empty(begins[-1], dtype=torch.int64, device=self.feed.device)
        addresses = [0 if each is None else each.data_ptr() for each in tensors]
        addresses += [
            0 if part is None else table.data_ptr() + table.itemsize * begin
            for part, begin in zip(parts, begins[:-1], strict=True)
        ]
        whole = [part.flatten() for part in parts if part is not None]
        numbers = torch.cat([torch.tensor([*addresses, *sizes]), *whole])
        return table.copy_(pinned(numbers, table.device), non_blocking=True)


def choose_chip(chip: Callable[[], Chip], feed: Feed, config: PopulationConfig) -> Chip | None:
    """The chip backend if it was asked for, or if nothing was and it applies."""
    if config.backend == "chip":
        return chip()
    if config.backend != "auto" or feed.environments < FEW_HOSTS:
        return None
    try:
        made = chip()
        made.launcher()
    except (EsperError, ImportError, OSError, RuntimeError) as error:  # the last three: of torch
        log.info("The population is computed by the fused backend. %s", error)
        return None
    return made
