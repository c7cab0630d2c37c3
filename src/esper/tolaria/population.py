"""A population: N hosts with different living seeds, trained as one computation.

It is equal to N reference trainers, row by row, and the number of operations in a step does not
grow with N. Environment i draws its weights, its seeds and the order of its data from streams of
its own, so N is only a batching knob.

Shapes: `N` environments, `S` slots, `B` batch, `Q` counterfactuals.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from esper.kasmina import Isolation, SegmentedHost, build_catalogue, decide, pass_time, remove_now
from esper.kasmina.gates import UNLIMITED, Situation, closed_gates, legality
from esper.kasmina.slotted import SlottedModel
from esper.leyline import HEADS, Actions, Blend, Legality, LifecycleOp, SeedStage, require_agreement
from esper.leyline.errors import AgreementError, require_known
from esper.leyline.lifecycle import NOTHING, Lifecycle, Transitions
from esper.leyline.settings import Range, require
from esper.leyline.shadows import AuditionPlan
from esper.leyline.slots import require_form
from esper.leyline.streams import derive_seed
from esper.tolaria.chip.launch import Chip, choose_chip
from esper.tolaria.cuda_graphs import GraphRunner
from esper.tolaria.engine import Engine, TrainingStep, as_inputs, cast_weights, losses_of
from esper.tolaria.feed import SPLITS, Feed
from esper.tolaria.plan import HOST, PassRows, Plan, PoolKey, StepPlan, build_plan, sent_to
from esper.tolaria.pools import VACANT, Birth, Pool, begin, copies_of, take_back
from esper.tolaria.population_config import EpochRecord, PopulationConfig, Snapshot, SplitScores
from esper.tolaria.random_streams import fold
from esper.tolaria.shadow_rows import ShadowEpoch, ShadowRows, shadow_places

Rate = Tensor | float | None  # for each environment, for all, or as it is
FLOW_SAMPLES = 100  # by which activations are described
# What is kept for each environment, beside its lifecycle and its rows in pools.
_KEPT = ("planted", "pool_rows", "gate_rows", "budget", "rate", "decay", "frozen")


class Population:
    """N environments over one host shape."""

    def __init__(
        self,
        build_host: Callable[[], SegmentedHost],
        feed: Feed,
        *,
        identities: Sequence[int],
        seed: int = 0,
        config: PopulationConfig | None = None,
    ) -> None:
        count = len(identities)
        require_agreement(
            "the number of environments", ("the feed", feed.environments), ("the population", count)
        )
        self.config = config or PopulationConfig()
        self.feed, self.device, self.build_host = feed, feed.device, build_host
        host = build_host()
        self.specs = host.slot_specs()
        host_params = sum(parameter.numel() for parameter in host.parameters())
        self.catalogue = build_catalogue(self.specs, host_params, self.config.blueprints)
        self.space = HEADS.resolve(self.catalogue)
        self.lifecycle = Lifecycle.dormant(count, len(self.specs))
        budget = UNLIMITED if self.config.budget is None else self.config.budget
        self.budget = torch.full((count,), budget)
        self.seed = seed
        self.seeds = self._seeds_of(identities)
        self.planted = torch.zeros(count, dtype=torch.int64)  # seeds each environment ever had
        # Rates of each environment's rows, those still to be born included; see `set_rates`.
        self.rate = torch.full((count,), self.config.rate, dtype=torch.float64)
        self.decay = torch.full((count,), self.config.decay, dtype=torch.float64)
        self.frozen = torch.zeros(count, dtype=torch.bool)  # idle until they are reset
        self.pool_rows = torch.full(self.lifecycle.shape, VACANT)  # where each seed lives
        self.gate_rows = torch.full(self.lifecycle.shape, VACANT)
        self.engine = Engine(host, build_host, self.catalogue, self.config)
        self.shadows = ShadowRows(self)
        self.pools: dict[PoolKey, Pool] = {}  # of hosts, seeds and gates
        self.newborn((HOST, self._give(HOST, torch.arange(count)), fold(self.seeds, "host")))
        self.live: Tensor | None = None  # [N, P] bool; see `silence_rows`
        self._beside: Callable[[], None] = lambda: None
        widths = {key: template.width for key, template in self.engine.templates.items()}
        chip = partial(Chip, host, self.catalogue, widths, feed, self.config)
        self._chip = choose_chip(chip, feed, self.config)
        self.backend = "fused" if self._chip is None else "chip"  # the one that computes
        graphs = self.config.graphs and self.device.type == "cuda" and self._chip is None
        self._graphs = GraphRunner(self) if graphs else None

    def __len__(self) -> int:
        return len(self.seeds)

    def _seeds_of(self, identities: Sequence[int]) -> Tensor:
        return torch.tensor([derive_seed(self.seed, "environment", each) for each in identities])

    def pool(self, key: PoolKey) -> Pool:
        """The pool of one kind of host, seed, gate or shadow, made when it is first needed."""
        pools = self.shadows.pools if key[0] == "shadow" else self.pools
        if key not in pools:
            moments, dtype = self.config.optimiser.moments, self.config.dtype
            pools[key] = Pool(self.engine.templates[key], moments, self.device, dtype)
        return pools[key]

    def _give(self, key: PoolKey, environments: Tensor) -> Tensor:
        """Rows of a pool for these environments, noted where what they hold is looked for."""
        rows = self.pool(key).give(environments)
        kind, slot, blueprint = key
        if kind == "shadow":
            self.shadows.rows[environments, slot, blueprint] = rows
        elif kind != "host":
            (self.pool_rows if kind == "seed" else self.gate_rows)[environments, slot] = rows
        return rows

    def newborn(self, *born: tuple[PoolKey, Tensor, Tensor]) -> None:
        """Fresh parameters for (pool, environments, streams): all but hosts get new rows."""
        births = []
        for key, own, streams in born:
            rows = own if key == HOST else self._give(key, own)  # host n is row n
            births.append(Birth(self.pool(key), rows, streams))
        begin(births, self.rate, self.decay)

    # --- growing -------------------------------------------------------------------------

    @property
    def situation(self) -> Situation:
        return Situation(self.lifecycle, self.catalogue, self.config.rules, self.budget)

    def legal(self) -> Legality:
        """What every host may do now; a frozen one may only wait."""
        legal = legality(self.situation, self.space)
        wait = torch.arange(len(LifecycleOp)) == LifecycleOp.WAIT
        legal.masks["op"][self.frozen] = wait
        return legal

    def apply(self, actions: Actions, legal: Legality | None = None) -> Transitions:
        """Carry out one decision a host, all or none; `legal` if it was asked for already."""
        return self._become(*decide(self.situation, actions, legal or self.legal()))

    def refusals(self, life: Lifecycle, rows: Tensor) -> list[tuple[int, int, LifecycleOp, str]]:
        """(place in `rows`, slot, op, why) of what gates kept hosts from in this state."""
        now = self.situation
        return closed_gates(replace(now, life=life.rows(rows), budget=now.budget[rows]))

    def pass_time(self) -> Transitions:
        """An epoch has ended: alphas, counters, and what needs no decision."""
        return self._become(*pass_time(self.situation))

    def remove_now(self, where: Tensor) -> Transitions:
        """Take the seeds in `where` [N, S] out at once."""
        return self._become(*remove_now(self.situation, where))

    def measure(self, **given: Tensor | None) -> None:
        """Report measurements for the gates, as `Lifecycle.measured` takes them: `contribution`
        and `gradient` [N, S], `loss_rise` [N]; NaN marks what was not measured."""
        for name, values in given.items():
            expected = (len(self),) if name == "loss_rise" else self.lifecycle.shape
            if values is not None:
                require_form(f"{name} has the wrong shape", values, expected)
        self.lifecycle = self.lifecycle.measured(**given)

    def _become(self, life: Lifecycle, record: Transitions) -> Transitions:
        """Adopt new arrays: seeds that came get rows, seeds that went give theirs back."""
        here, there = life.blueprint != NOTHING, self.lifecycle.blueprint != NOTHING
        self._take_back(there & ~here)
        self.lifecycle = life
        came = here & ~there
        if bool(came.any()):
            self._plant(came)
            self.shadows.become_seeds(came)
        return record

    def _plant(self, came: Tensor) -> None:
        """Newborn seeds, and their gates, where they `came` [N, S]."""
        numbers = self.planted[:, None] + came.cumsum(dim=1)  # of each in its environment
        self.planted += came.sum(dim=1)
        seeds = self.seeds[:, None].expand_as(came)[came]
        streams = torch.zeros(came.shape, dtype=torch.int64)
        streams[came] = fold(seeds, "seed", numbers[came])
        gated = came & (self.lifecycle.blend == Blend.GATE)
        groups = _by_pool(came, self.lifecycle.blueprint, gated)
        self.newborn(*((key, own, streams[own, key[1]]) for key, own in groups))

    def _take_back(self, gone: Tensor) -> None:
        """Give back the rows of the seeds in `gone` [N, S]."""
        take_back([(self.pools[key], rows) for key, _, rows in self.places(gone)])
        self.pool_rows[gone] = VACANT
        self.gate_rows[gone] = VACANT

    def places(self, chosen: Tensor) -> Iterator[tuple[PoolKey, Tensor, Tensor]]:
        """Where the seeds in `chosen` [N, S] live: pool by pool, their environments and rows."""
        return _places(chosen, self.lifecycle, self.pool_rows, self.gate_rows)

    # --- environments as values ----------------------------------------------------------

    def snapshot(self, over: Snapshot | None = None) -> Snapshot:
        """A copy of all environments that later training does not touch; it may be written `over`
        one that is no longer needed."""
        return Snapshot(
            lifecycle=self.lifecycle,  # never changed in place
            kept={name: getattr(self, name).clone() for name in _KEPT},
            live=None if self.live is None else self.live.clone(),
            tensors=copies_of(self.all_pools(), {} if over is None else over.tensors),
            shadow_rows=self.shadows.rows.clone(),
            readings=self.shadows.readings,
        )

    def all_pools(self) -> dict[PoolKey, Pool]:
        return self.pools | self.shadows.pools

    def put_rows(self, targets: Tensor, snapshot: Snapshot, sources: Tensor | None = None) -> None:
        """Make the environments `targets` [K] what `sources` [K] were in the snapshot.

        By default each goes back to what it was itself. Weights, seeds, shadows, optimiser state
        and lifecycle are taken over, and rates and budget; the target keeps its own random streams,
        so copies go their own ways.
        """
        sources = targets if sources is None else sources
        if targets.shape != sources.shape or len(targets.unique()) != len(targets):
            raise AgreementError(
                "Every target needs one source, and only one",
                given=f"targets {targets.tolist()}, sources {sources.tolist()}",
            )
        life = snapshot.lifecycle.rows(sources)
        self.adopt(targets, life)
        for name in ("planted", "budget", "rate", "decay", "frozen"):
            getattr(self, name)[targets] = snapshot.kept[name][sources]
        self.pools[HOST].put(targets, snapshot.tensors[HOST], sources)
        if snapshot.live is not None:
            self.silence_rows(targets, snapshot.live[sources.to(self.device)])
        self.shadows.take_over(targets, snapshot.readings, sources)
        homes = (snapshot.kept[name][sources] for name in ("pool_rows", "gate_rows"))
        seeds = _places(life.blueprint != NOTHING, life, *homes)
        for key, which, old in chain(seeds, shadow_places(snapshot.shadow_rows[sources])):
            self.pool(key).put(self._give(key, targets[which]), snapshot.tensors[key], old)

    def adopt(self, environments: Tensor, life: Lifecycle) -> None:
        """Take every seed of these environments out, whatever its stage, and adopt `life`."""
        gone = torch.zeros(self.lifecycle.shape, dtype=torch.bool)
        gone[environments] = self.lifecycle.blueprint[environments] != NOTHING
        self._take_back(gone)
        self.lifecycle = self.lifecycle.with_rows(environments, life)

    def reset_rows(self, environments: Tensor, identities: Sequence[int]) -> None:
        """Start these environments anew, as other environments with streams of their own."""
        if len(identities) != len(environments) or len(environments.unique()) != len(environments):
            raise AgreementError(
                "Every environment that starts anew needs one identity",
                given=f"environments {environments.tolist()}, identities {list(identities)}",
            )
        self.adopt(environments, Lifecycle.dormant(len(environments), len(self.specs)))
        self.shadows.restart(environments)
        self.planted[environments] = 0
        self.seeds[environments] = self._seeds_of(identities)
        self.frozen[environments] = False
        self.newborn((HOST, environments, fold(self.seeds[environments], "host")))
        if self.live is not None:
            whole = torch.ones(len(environments), self.live.shape[1], dtype=torch.bool)
            self.silence_rows(environments, whole)

    def freeze_rows(self, environments: Tensor) -> None:
        """Let these environments idle: no step, no decision until they are reset."""
        self.frozen[environments] = True
        for pool in self.pools.values():
            pool.state.active[torch.isin(pool.owner, environments).nonzero()[:, 0]] = False

    def silence_rows(self, environments: Tensor, live: Tensor) -> None:
        """Fix these hosts' [K] weights at zero where `live` [K, P] is false, until told again."""
        pool = self.pools[HOST]
        what = "Silencing needs a boolean for each weight of each host"
        require_form(what, live, (len(environments), pool.template.width), torch.bool)
        there, live = environments.to(self.device), live.to(self.device)
        if self.live is None:
            self.live = torch.ones_like(pool.state.theta[:-1], dtype=torch.bool)
            pool.outdate()  # a captured step does not know of it
        self.live[there] = live
        for tensor in (pool.state.theta, *pool.state.moments):
            tensor[there] = torch.where(live, tensor[there], 0.0)

    def set_rates(self, environments: Tensor, *, rate: Rate = None, decay: Rate = None) -> None:
        """Give these environments a learning rate or weight decay of their own, seeds included."""
        for own, given in ((self.rate, rate), (self.decay, decay)):
            if given is not None:
                own[environments] = torch.as_tensor(given, dtype=torch.float64)
        for pool in self.all_pools().values():
            pool.set_rates(pool.rows_in_use, self.rate, self.decay)

    # --- training and measuring ----------------------------------------------------------

    def do_beside_epochs(self, work: Callable[[], None]) -> None:
        """Let `work` be done once in every epoch from now on, while the device computes it."""
        self._beside = work

    def plan_of(self, rows: PassRows) -> Plan:
        """On the CPU, where it is made."""
        return build_plan(self.lifecycle, rows, self.pool_rows, self.gate_rows)

    def _step_plan(self) -> StepPlan:
        straight = self.config.isolation is Isolation.STRAIGHT_THROUGH
        training = self.plan_of(PassRows.base(self.lifecycle, straight_through=straight))
        learners: dict[PoolKey, Tensor] = {}
        for key, _, rows in self.places(self.lifecycle.at(SeedStage.TRAINING)):
            learners[key] = torch.zeros_like(self.pools[key].state.active, device="cpu")
            learners[key][rows] = True
        alone = PassRows.alone(self.lifecycle)
        isolated = not straight and len(alone.environment) > 0
        return StepPlan(training, learners, self.plan_of(alone) if isolated else None)

    def training_step(self) -> TrainingStep:
        """The fused step for the present structure."""
        return TrainingStep(self, sent_to(self._step_plan(), self.device))

    def train_epoch(self, plan: AuditionPlan | None = None) -> EpochRecord:
        """One epoch of every environment on its own batches, and of the shadows in `plan`.

        A slot that holds a seed, or whose host is frozen, has no shadows. Without a plan those that
        live are left as they are.
        """
        shadows: ShadowEpoch | None = None
        if plan is not None:  # its shadows live, and no others
            self.shadows.require_fitting(plan)
            free = ~self.lifecycle.occupied & ~self.frozen[:, None]
            where = plan.where & free[:, :, None]
            self.shadows.arrange(where)
            batches = (plan.share * self.feed.batches).round().clamp(min=1.0) * (plan.share > 0)
            shadows = ShadowEpoch(self, where, batches.long())
        before = (lambda number, index: None) if shadows is None else shadows.step
        torch._foreach_zero_([pool.squares for pool in self.pools.values()])
        order = self.feed.epoch(self.seeds, self.lifecycle.epoch)  # [T, N, B]
        found: Sequence[Tensor] = ()
        if self._chip is None:
            loss, host, seeds = self._fused_epoch(order, before)
        else:
            taught = None if shadows is None else (shadows.where, shadows.batches.flatten())
            loss, host, seeds, *found = self._chip.epoch(self, order, taught, self._beside)
            if shadows is not None:
                found += self._chip.gains(self, shadows.where)
        seeds = torch.where(self.lifecycle.occupied, seeds.sqrt(), torch.nan)
        record = EpochRecord(loss, host.sqrt(), seeds)
        if shadows is None:
            return record
        shadows.finish(record.host_gradient, found)
        return replace(record, shadowed=shadows.share)

    def _fused_epoch(
        self, order: Tensor, before: Callable[[int, Tensor], None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Means over batches of losses [N], and of squared gradients of hosts [N], seeds [N, S]."""
        # Everything but cuDNN's choice of kernels gives the same bits every time anyway.
        chosen = torch.backends.cudnn.flags(True, benchmark=False, deterministic=True)
        with chosen if self.config.deterministic else nullcontext():
            if self._graphs is not None:
                total = self._graphs.epoch(self._step_plan(), order, before)
            else:
                step = self.training_step()
                total = torch.zeros(len(self), device=self.device, dtype=torch.float64)
                for number, index in enumerate(order):
                    before(number, index)
                    total += step.run(*self.feed.fetch(index))
        self._beside()
        seeds = torch.zeros(self.lifecycle.shape, dtype=torch.float64)
        host = torch.zeros(len(self), dtype=torch.float64)
        for key, pool in self.pools.items():
            rows = pool.rows_in_use
            norms = (pool.squares.double().sum(dim=1) / self.feed.batches).cpu()[rows]
            owners = pool.owner[rows]
            if key == HOST:
                host[owners] = norms
            else:
                seeds[owners, key[1]] += norms  # a seed's body and its gate
        return (total / self.feed.batches).cpu(), host, seeds

    def evaluate(self, split: str = "validation", *, committed: bool = False) -> SplitScores:
        """Score every environment; `committed`: with fossilized seeds only, as exported."""
        off = ~self.lifecycle.at(SeedStage.FOSSILIZED) & committed
        return self.counterfactual(torch.arange(len(self)), off, split)

    @torch.no_grad()
    def counterfactual(
        self, environment: Tensor, off: Tensor, split: str = "validation"
    ) -> SplitScores:
        """Scores [Q] of environments with the seeds of `off` [Q, S] switched off.

        Each distinct subset is run once, and shares what comes before its first difference.
        """
        slots, what = len(self.specs), "A counterfactual needs a boolean for each slot"
        require_form(what, off, (len(environment), slots), torch.bool)
        effective = off & (self.lifecycle.alpha[environment] > 0)
        bits = (effective.long() << torch.arange(slots)).sum(dim=1)
        asked, inverse = (environment << slots | bits).unique(return_inverse=True)
        owners, bits = asked >> slots, asked & (1 << slots) - 1
        changed = bits > 0
        without = (bits[changed, None] >> torch.arange(slots) & 1).bool()
        scores = self._score(split, owners[changed], without)
        place = owners.clone()  # where nothing that is on was switched off: the base row
        place[changed] = len(self) + torch.arange(len(without))
        chosen = place[inverse]
        return SplitScores(scores.loss[chosen], scores.accuracy[chosen])

    @torch.no_grad()
    def flow(self) -> Tensor:
        """[N, S, K]: statistics of what reaches each slot, on validation data."""
        if self._chip is not None:
            return self._chip.flow(self, FLOW_SAMPLES)
        plan = sent_to(self.plan_of(PassRows.base(self.lifecycle)), self.device)
        weights = cast_weights(self.pools, self.config.compute_dtype)
        inputs = as_inputs(self.feed.first_samples("validation", FLOW_SAMPLES), weights)
        found: list[Tensor] = []
        self.engine.logits(weights, plan, inputs, found)
        return torch.stack(found, 1).double().cpu()

    def _score(self, split: str, owners: Tensor, off: Tensor) -> SplitScores:
        """Of every environment, then of `owners` [Q], which rise, without the seeds in `off`."""
        require_known("split", split, SPLITS)
        if self._chip is not None:
            means = self._chip.score(self, owners, off, split)
            return SplitScores(means[:, 0], 100.0 * means[:, 1])
        rows = PassRows.counterfactual(self.lifecycle, owners, off)
        plan = sent_to(self.plan_of(rows), self.device)
        weights = cast_weights(self.pools, self.config.compute_dtype)
        count = len(rows.environment)
        loss = torch.zeros(count, device=self.device, dtype=torch.float64)
        right = torch.zeros(count, device=self.device, dtype=torch.float64)
        samples = 0
        for inputs, labels in self.feed.held_out(split, rows.environment[: plan.start]):
            labels = labels[rows.environment.to(self.device)]
            outputs = self.engine.logits(weights, plan, as_inputs(inputs, weights))
            size = labels.shape[1]
            loss += losses_of(outputs, labels).double() * size
            right += (outputs.argmax(-1) == labels).double().flatten(1).mean(1) * size
            samples += size
        place = torch.cat([torch.arange(len(self)), rows.place])
        loss, accuracy = (each.cpu()[place] / samples for each in (loss, 100.0 * right))
        return SplitScores(loss, accuracy)


def extract(population: Population, environment: int) -> SlottedModel:
    """The environment's host with its seeds, in the stage they are in, independent from now on."""
    require("The environment", environment, Range(0, len(population) - 1, whole=True))
    config = population.config
    host = SlottedModel(
        population.build_host().to(population.device, config.dtype),
        isolation=config.isolation,
        rules=config.rules,
        budget=config.budget,
        blueprints=config.blueprints,
    )
    life = population.lifecycle.rows(torch.tensor([environment]))
    state = {f"lifecycle.{name}": array for name, array in life.state_dict().items()}
    state["blueprint_names"] = population.catalogue.encoded_names()
    state["counters"] = torch.tensor([int(population.planted[environment]), 0])

    own = torch.zeros(population.lifecycle.shape, dtype=torch.bool)
    own[environment] = life.blueprint[0] != NOTHING
    homes = {HOST: (environment, "model.")}  # row and prefix of its names
    for key, _, rows in population.places(own):
        part = "body" if key[0] == "seed" else "gate"
        homes[key] = (int(rows), f"slots.{key[1]}.seed.{part}.")
    for key, (row, prefix) in homes.items():
        values = population.pools[key].state.theta[row : row + 1]
        for name, value in population.engine.templates[key].views(values).items():
            state[f"{prefix}{name}"] = value[0].clone()
    host.load_state_dict(state)
    return host


def _places(
    chosen: Tensor, life: Lifecycle, pool_rows: Tensor, gate_rows: Tensor
) -> Iterator[tuple[PoolKey, Tensor, Tensor]]:
    """Pool by pool: which environments have seeds of `chosen` [N, S] there, and in which rows."""
    for key, owners in _by_pool(chosen, life.blueprint, chosen & (gate_rows != VACANT)):
        homes = pool_rows if key[0] == "seed" else gate_rows
        yield key, owners, homes[owners, key[1]]


def _by_pool(chosen: Tensor, blueprint: Tensor, gated: Tensor) -> Iterator[tuple[PoolKey, Tensor]]:
    """Pool by pool: which environments have seeds of `chosen` there, and gates, [N, S] each."""
    gate = 1 << 31  # after all kinds of its slot
    cells = torch.cat([chosen.nonzero(), gated.nonzero()])
    kinds = torch.cat([blueprint[chosen], blueprint[gated].fill_(gate)])
    codes, order = (cells[:, 1] << 32 | kinds).sort(stable=True)
    found, counts = codes.unique_consecutive(return_counts=True)
    owners = cells[order, 0].split(counts.tolist())
    for code, own in zip(found.tolist(), owners, strict=True):
        slot, kind = code >> 32, code & (1 << 32) - 1
        yield ("gate", slot, NOTHING) if kind == gate else ("seed", slot, kind), own
