"""Launches: an epoch of every row, or the scores of many passes, as one call of the chip's program.

What a row consists of and which passes it makes are descriptors, built here from the lifecycle's
arrays, without a loop over environments. Structure changes descriptors and never the program.

Shapes: `N` environments, `S` slots, `P` blueprints, `V` passes, `U` shadows, `M` modules of all
rows, `T` batches, `B` batch.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from esper.kasmina import Isolation, SegmentedHost
from esper.leyline import NOTHING, BlueprintCatalogue, EsperError, Lifecycle, SeedStage
from esper.tolaria.chip.build import REALS, Launch, launcher, shared_bytes
from esper.tolaria.chip.source import SCRATCH, ChipProgram, require_fitting, write_program
from esper.tolaria.feed import Feed
from esper.tolaria.optimisers import AdamW, Sgd
from esper.tolaria.plan import HOST, PassRows, PoolKey
from esper.tolaria.pools import VACANT, Pool
from esper.tolaria.population_config import PopulationConfig

Pools = Mapping[PoolKey, Pool]
ABSENT = -1
HOST_EFFORT = 10_000  # multiplications that a sample takes without seeds, about
FEW_HOSTS = 64  # for fewer, a program is compiled for longer than it saves
log = logging.getLogger("esper")
_MOST_MODULES = SCRATCH // 2  # of a row: their corrections share the scratch of a block


@dataclass(frozen=True)
class Homes:
    """Where the seeds and shadows of a population live."""

    life: Lifecycle
    pool_rows: Tensor  # [N, S]
    gate_rows: Tensor  # [N, S]
    shadow_rows: Tensor  # [N, S, P]


@dataclass(frozen=True)
class _Modules:
    """Everything with parameters that takes part, row by row, and its place in the row's arena."""

    table: Tensor  # [M, 13] batches that it learns from, place, width, addresses of its row
    taking: Tensor  # [N, 1 + 2 S + S P] bool: of host, seeds, gates and shadows, who takes part
    starts: Tensor  # [N + 1] where each row's modules begin
    seeds: Tensor  # [N, S] places of seeds; ABSENT where none takes part
    gates: Tensor  # [N, S] places of gates
    shadows: Tensor  # [N, S, P] places of shadows
    arena: int  # numbers of the largest row


@dataclass(frozen=True)
class _Passes:
    """Passes before they are put in order."""

    environment: Tensor  # [V]
    first: Tensor  # [V] slot from which it differs from the base pass; -1: it is one
    stop: Tensor  # [V] first slot with something to learn; -1: the host learns; S: nothing does
    value: Tensor  # [V, S] factor of each seed's output
    gradient: Tensor  # [V, S] factor of the gradient that it receives
    learns: Tensor  # [V, S] bool
    shadow: Tensor  # [V] blueprint of the shadow that it has at its first slot; ABSENT: none
    share: Tensor  # [V] batches of the epoch in which it is made

    @classmethod
    def training(cls, life: Lifecycle, isolation: Isolation, batches: int) -> Self:
        """The pass of every host and, with the dual pass, the one of its TRAINING seeds."""
        straight = isolation is Isolation.STRAIGHT_THROUGH
        base = PassRows.base(life, straight_through=straight)
        shown = torch.where(base.isolated, 0.0, base.alpha)
        taught = torch.where(base.isolated, 1.0, shown)
        whole = cls.of(base.environment, -1, -1, shown, taught, taught > 0, ABSENT, batches)
        if straight:
            return whole
        alone = PassRows.alone(life)
        learns = life.at(SeedStage.TRAINING)[alone.environment]
        first, alpha = learns.long().argmax(dim=1), alone.alpha
        return whole.and_(
            cls.of(alone.environment, first, first, alpha, alpha, learns, ABSENT, batches)
        )

    @classmethod
    def of(cls, environment: Tensor, *columns: Tensor | int) -> Self:
        """With one number for all passes where no tensor is given."""
        wide = (
            each if isinstance(each, Tensor) else torch.full_like(environment, each)
            for each in columns
        )
        return cls(environment, *wide)

    def and_(self, other: Self) -> Self:
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return type(self)(*(torch.cat(pair) for pair in pairs))

    @classmethod
    def shadows(cls, life: Lifecycle, where: Tensor, share: Tensor) -> Self:
        """Each shadow in `where` [N, S, P], fully on, in their hosts' `share` [N] of batches."""
        owners, slots, kinds = where.nonzero().unbind(1)
        alpha = life.alpha[owners]
        own = torch.arange(alpha.shape[1]) == slots[:, None]
        alpha = torch.where(own, 1.0, alpha)
        return cls(owners, slots, slots, alpha, alpha, own, kinds, share[owners])

    @classmethod
    def scoring(cls, rows: PassRows, batches: int) -> Self:
        alpha, slots = rows.alpha, rows.alpha.shape[1]
        nothing = torch.zeros_like(alpha, dtype=torch.bool)
        return cls.of(rows.environment, rows.first, slots, alpha, alpha, nothing, ABSENT, batches)


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
        slots, kinds = len(catalogue.slots), len(catalogue.names)
        self.widths = torch.tensor(
            [[widths.get(("seed", s, k), 0) for k in range(kinds)] for s in range(slots)]
        )  # [S, P]
        self.gate_widths = torch.tensor([widths["gate", s, NOTHING] for s in range(slots)])
        self.host_width = widths[HOST]
        self.program = self._largest(host, catalogue)
        self.which = torch.full((slots, kinds), ABSENT)  # programs of seeds
        for place, number in self.program.which.items():
            self.which[place] = number
        # Multiplications of a seed, about, with what its few operations cost anyhow.
        lengths = torch.tensor([math.prod(spec.extent) for spec in host.slot_specs()])
        self.effort = 2500 + self.widths * lengths[:, None]  # [S, P]

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
        pools: Pools,
        homes: Homes,
        live: Tensor | None,
        order: Tensor,
        shadows: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Train every row on the batches `order` [T, N, B], and `shadows`: those in [N, S, P], on
        so many batches [N].

        Returns means over batches of losses [N] and of squared gradients, of hosts [N] and of seeds
        with their gates [N, S]; of shadows, by places, sums of squared gradients and of gains, [U].
        """
        batches, hosts, batch = order.shape
        passes = _Passes.training(homes.life, self.config.isolation, batches)
        count, slots = len(passes.first), homes.life.shape[1]
        if shadows is not None:
            passes = passes.and_(_Passes.shadows(homes.life, *shadows))
        data, first = self.feed.stored("train")
        given = (data.inputs, data.labels, order, first)
        sizes = (hosts, batches, batch, batches * batch)
        found, norms = self._launch(pools, homes, passes, live, given, self.settings, sizes)
        host, seeds, gates, others = norms.split(
            [1, slots, slots, norms.shape[1] - 1 - 2 * slots], 1
        )
        taught = others[:, :0] if shadows is None else others[shadows[0].flatten(1)]
        means = (found[:hosts, 0] / batch, host[:, 0], seeds + gates)
        return *(each / batches for each in means), taught, found[count:, 2] / batch

    def score(self, pools: Pools, homes: Homes, rows: PassRows, split: str) -> Tensor:
        """Mean loss and share of right samples of every pass, [V, 2]."""
        passes = _Passes.scoring(rows, self._batches(split))
        return self._measure(pools, homes, passes, split)[:, :2]

    def gains(self, pools: Pools, homes: Homes, where: Tensor) -> tuple[Tensor, Tensor]:
        """Of the shadows in `where` [N, S, P] on validation data: the mean over samples and its
        standard error, [U] each, in the order of places."""
        batches = torch.full((len(where),), self._batches("validation"))
        passes = _Passes.scoring(PassRows.base(homes.life), int(batches[0]))
        passes = passes.and_(_Passes.shadows(homes.life, where, batches))
        mean, square = self._measure(pools, homes, passes, "validation")[len(where) :, 2:].unbind(1)
        samples = int(self.feed.samples("validation")[0])
        variance = (square - mean.square()).clamp(min=0.0) / max(samples - 1, 1)
        return mean, variance.sqrt()

    def _batches(self, split: str) -> int:
        return -(-int(self.feed.samples(split)[0]) // self.program.chunk)

    def _measure(self, pools: Pools, homes: Homes, passes: _Passes, split: str) -> Tensor:
        """Means over samples of a split, [V, 4]; nothing learns."""
        data, first = self.feed.stored(split)
        samples = int(self.feed.samples(split)[0])
        sizes = (len(first), self._batches(split), self.program.chunk, samples)
        given = (data.inputs, data.labels, None, first)
        return self._launch(pools, homes, passes, None, given, None, sizes)[0] / samples

    def _launch(
        self,
        pools: Pools,
        homes: Homes,
        passes: _Passes,
        live: Tensor | None,
        data: tuple[Tensor, Tensor, Tensor | None, Tensor],
        settings: Tensor | None,
        sizes: tuple[int, int, int, int],
    ) -> tuple[Tensor, Tensor]:
        """What the program found of each pass, [V, 4], in the order of the passes given; and the
        squared gradients of host, seeds, gates and shadows, [N, 1 + 2 S + S P]."""
        modules = self._modules(pools, homes, passes, live, sizes[1])
        room = require_fitting(self.program, modules.arena, self.config.dtype.itemsize, self.most)
        # By row, the base pass first, then those of later slots first.
        turn = torch.where(passes.first < 0, 0, 1 + homes.life.shape[1] - passes.first)
        order = (passes.environment * (2 + homes.life.shape[1]) + turn).argsort(stable=True)
        table, factors, starts, queue = self._passes(homes, passes, modules, order)
        device, count = self.feed.device, 4 * len(order)
        results = torch.zeros(count + len(modules.table), dtype=torch.float64, device=device)
        # Few large transfers: each of them waits for the device.
        parts = [modules.starts, table, starts, queue]
        small = torch.cat([each.flatten().int() for each in parts]).to(device)
        begins = [0, *torch.tensor([each.numel() for each in parts]).cumsum(0).tolist()]
        tables = [small.data_ptr() + small.itemsize * begin for begin in begins]
        wide, factors = modules.table.to(device), factors.to(device)
        kept = [each if each is None else each.contiguous() for each in data]
        kept += [results, results[count:], settings]
        addresses = [wide.data_ptr(), *tables[:2], factors.data_ptr(), *tables[2:4]]
        addresses += [0 if each is None else each.data_ptr() for each in kept]
        numbers = torch.tensor([*addresses, *sizes, modules.arena]).to(device)
        self.launcher()(numbers, sizes[0], room)
        found = results.cpu()
        ordered = torch.zeros(len(order), 4, dtype=torch.float64)
        ordered[order] = found[:count].view(-1, 4)
        norms = torch.zeros(modules.taking.shape, dtype=torch.float64)
        norms[modules.taking] = found[count:]
        return ordered, norms

    def _addresses(self, pools: Pools, live: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where everything begins that pools keep by row, and the bytes of a row, [pools, 10]."""
        bases, strides = [], []
        for key, pool in pools.items():
            state = pool.state
            moments = [*state.moments, state.moments[0]][:2]
            kept: list[Tensor | None] = [state.theta, *moments, pool.squares, state.steps]
            kept += [state.rate, state.decay, state.active, state.scale]
            kept.append(live if key == HOST else None)
            bases.append([0 if each is None else each.data_ptr() for each in kept])
            strides.append([0 if t is None or len(t) == 1 else t[0].nbytes for t in kept])
        return torch.tensor(bases), torch.tensor(strides)

    def _modules(
        self, pools: Pools, homes: Homes, passes: _Passes, live: Tensor | None, batches: int
    ) -> _Modules:
        """Host, seeds, gates and shadows of every row, one after the other in its arena."""
        number = {key: index for index, key in enumerate(pools)}
        (hosts, slots), kinds = homes.life.shape, self.widths.shape[1]
        places = [(slot, kind) for slot in range(slots) for kind in range(kinds)]

        def numbers(kind: str) -> Tensor:  # [S, P] of pools
            found = [number.get((kind, *place), ABSENT) for place in places]
            return torch.tensor(found).view(slots, kinds)

        seeds = ((passes.value > 0) | passes.learns) & (passes.shadow == ABSENT)[:, None]
        used = torch.zeros(homes.life.shape, dtype=torch.int64)
        used = used.index_add(0, passes.environment, seeds.long()) > 0  # [N, S]
        own = (passes.shadow != ABSENT).nonzero()[:, 0]
        share = torch.zeros(hosts, slots, kinds, dtype=torch.int64)
        share[passes.environment[own], passes.first[own], passes.shadow[own]] = passes.share[own]
        every, kind = torch.arange(slots), homes.life.blueprint.clamp(min=0)
        gates = torch.tensor([number.get(("gate", s, NOTHING), ABSENT) for s in range(slots)])
        gated, wide = used & (homes.gate_rows != VACANT), (hosts, slots, kinds)
        everyone = torch.arange(hosts)[:, None]
        one, all_ = torch.ones(hosts, 1, dtype=torch.int64), torch.full((hosts, slots), batches)
        columns = [  # pool, row, width, batches to learn from
            (number[HOST] * one, everyone, self.host_width * one, batches * one),
            (numbers("seed")[every, kind], homes.pool_rows, self.widths[every, kind], used * all_),
            (gates.expand(hosts, -1), homes.gate_rows, self.gate_widths, gated * all_),
            (numbers("shadow").expand(wide), homes.shadow_rows, self.widths.expand(wide), share),
        ]
        flat = [[part.expand_as(last).flatten(1) for part in parts] for *parts, last in columns]
        pool, row, width = (torch.cat(parts, dim=1) for parts in zip(*flat, strict=True))
        turns = torch.cat([last.flatten(1) for *_, last in columns], dim=1)
        width = torch.where(turns > 0, width, 0)
        place = width.cumsum(dim=1) - width
        counts = (turns > 0).sum(dim=1)
        assert int(counts.max()) <= _MOST_MODULES
        found = torch.where(turns > 0, place, ABSENT)[:, 1:].split([slots, slots, slots * kinds], 1)
        taking = turns > 0
        bases, strides = (each[pool[taking]] for each in self._addresses(pools, live))
        addresses = torch.where(bases == 0, 0, bases + row[taking][:, None] * strides)
        return _Modules(
            table=torch.cat([torch.stack([turns, place, width], 2)[taking], addresses], dim=1),
            taking=taking,
            starts=torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
            seeds=found[0],
            gates=found[1],
            shadows=found[2].view(wide),
            arena=int(width.sum(dim=1).max()),
        )

    def _passes(
        self, homes: Homes, passes: _Passes, modules: _Modules, order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whole numbers and factors of each pass, in order; where each row's begin; and all rows,
        those first that take longest."""
        owner, every = passes.environment, torch.arange(passes.value.shape[1])
        acting = (passes.value > 0) | passes.learns
        kinds = homes.life.blueprint[owner].clamp(min=0)
        place, gate = modules.seeds[owner], modules.gates[owner]
        own = (passes.shadow != ABSENT).nonzero()[:, 0]
        slot, kind = passes.first[own], passes.shadow[own]
        kinds[own, slot], gate[own, slot] = kind, ABSENT
        place[own, slot] = modules.shadows[owner[own], slot, kind]
        which = torch.where(acting, self.which[every, kinds], ABSENT)
        rooms = torch.tensor([*self.program.rooms, 0])[which]  # the last is of none
        gated = (which != ABSENT) & (gate != ABSENT)
        rooms = torch.where(gated, torch.tensor(self.program.gate_rooms), rooms)
        keeps = rooms.sum(dim=1) <= max(self.program.gate_rooms)
        columns = [
            which,
            place,
            gate,
            torch.where(keeps[:, None], rooms.cumsum(dim=1) - rooms, 0),
            passes.value > 0,  # what does not show sends nothing back either
            passes.learns,
        ]
        slots = torch.stack([column.long() for column in columns], dim=2).flatten(1)
        head = torch.stack([passes.first, passes.stop, passes.share, keeps.long()], dim=1)
        factors = torch.stack([passes.value, passes.gradient], dim=2).flatten(1)
        counts = torch.bincount(owner, minlength=len(homes.life.stage))
        starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
        table = torch.cat([head, slots], dim=1)[order]
        effort = torch.where(acting, self.effort[every, kinds], 0).sum(dim=1) + HOST_EFFORT
        queue = torch.zeros_like(counts).index_add(0, owner, effort).argsort(descending=True)
        return table, factors[order].to(self.config.dtype), starts, queue


def choose_chip(chip: Callable[[], Chip], feed: Feed, config: PopulationConfig) -> Chip | None:
    """The chip backend if it was asked for, or if nothing was and it applies."""
    if config.backend == "chip":
        return chip()
    if config.backend != "auto" or feed.device.type != "cuda" or feed.environments < FEW_HOSTS:
        return None
    try:
        made = chip()
        made.launcher()
    except (EsperError, ImportError, OSError, RuntimeError) as error:  # the last three: of torch
        log.info("The population is computed by the fused backend. %s", error)
        return None
    return made
