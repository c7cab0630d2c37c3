"""A population: N hosts with different living seeds, trained as one computation.

It is equal to N reference trainers, row by row, and the number of operations in a step does not
grow with N. Environment i draws its weights, its seeds and the order of its data from streams of
its own, so N is only a batching knob.

Shapes: `N` environments, `S` slots, `B` batch, `Q` counterfactuals.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from esper.kasmina.blueprints import build_catalogue
from esper.kasmina.gates import UNLIMITED, Situation
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.isolation import Isolation
from esper.kasmina.lifecycle import decide, pass_time, remove_now
from esper.kasmina.masks import legality
from esper.leyline.errors import AgreementError, GateRefusedError, UnknownNameError
from esper.leyline.heads import HEADS
from esper.leyline.legality import Actions, Legality
from esper.leyline.lifecycle import NOTHING, Lifecycle, Transitions
from esper.leyline.ops import Blend, LifecycleOp
from esper.leyline.slots import require_agreement
from esper.leyline.stages import SeedStage
from esper.leyline.streams import derive_seed
from esper.tolaria.cuda_graphs import GraphRunner
from esper.tolaria.engine import Engine, is_own, losses_of, templates_of
from esper.tolaria.feed import SPLITS, Feed
from esper.tolaria.plan import (
    HOST,
    Plan,
    PoolKey,
    Rows,
    build_plan,
    counterfactual_rows,
    isolated_rows,
    training_rows,
)
from esper.tolaria.pools import VACANT, Pool
from esper.tolaria.settings import EpochRecord, PopulationConfig, Scores
from esper.tolaria.shuffle import fold
from esper.tolaria.templates import Template
from esper.tolaria.training import TrainingStep, as_inputs, cast_weights

FLOW_SAMPLES = 100  # by which activations are described


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
        self.seeds = torch.tensor([derive_seed(seed, "environment", each) for each in identities])
        self.planted = torch.zeros(count, dtype=torch.int64)  # seeds each environment ever had
        # Rates of each environment's rows, those still to be born included; see `set_rates`.
        self.rate = torch.full((count,), self.config.rate, dtype=torch.float64)
        self.decay = torch.full((count,), self.config.decay, dtype=torch.float64)
        self.frozen = torch.zeros(count, dtype=torch.bool)  # idle until they are reset
        self.pool_rows = torch.full(self.lifecycle.shape, VACANT)  # where each seed lives
        self.gate_rows = torch.full(self.lifecycle.shape, VACANT)
        templates = templates_of(self.specs, self.catalogue)
        host_template = Template(build_host, known=is_own(type(host)))
        self.engine = Engine(host, templates, host_template, self.config.compiler)
        self.pools: dict[PoolKey, Pool] = {}
        everyone = torch.arange(count)
        self.newborn(HOST, everyone, fold(self.seeds, "host"))
        self.live: Tensor | None = None  # [N, P] bool; see `silence_rows`
        self._step: TrainingStep | None = None  # of the present structure
        graphs = self.config.graphs and self.device.type == "cuda"
        self._graphs = GraphRunner(feed, self.pools, self._make_step) if graphs else None

    def __len__(self) -> int:
        return len(self.seeds)

    def pool(self, key: PoolKey) -> Pool:
        """The pool of one kind of host, seed or gate, made when it is first needed."""
        if key not in self.pools:
            self.pools[key] = Pool(
                self.engine.template(key),
                self.config.optimiser.moments,
                device=self.device,
                dtype=self.config.dtype,
            )
        return self.pools[key]

    def newborn(
        self, key: PoolKey, environments: Tensor, streams: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Rows with fresh parameters for these environments; given ones start anew in place."""
        pool = self.pool(key)
        rows = pool.give(environments) if rows is None else rows
        pool.start(
            rows,
            pool.template.newborn(streams.to(self.device)),
            rate=self.rate[environments],
            decay=self.decay[environments],
        )
        return rows

    def structure_changed(self) -> None:
        """What was built for the structure so far no longer holds."""
        self._step = None

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

    def apply(self, actions: Actions) -> Transitions:
        """Carry out one decision a host, all or none."""
        if len(actions) == len(self):
            refused = self.frozen & (actions["op"] != LifecycleOp.WAIT)
            if bool(refused.any()):
                raise GateRefusedError(
                    f"Host {int(refused.nonzero()[0, 0])} is frozen",
                    given=LifecycleOp(int(actions["op"][refused][0])).name,
                    valid="WAIT, until reset_rows() starts it anew",
                )
        return self._become(*decide(self.situation, actions))

    def pass_time(self) -> Transitions:
        """An epoch has ended: alphas, counters, and what needs no decision."""
        return self._become(*pass_time(self.situation))

    def remove_now(self, where: Tensor) -> Transitions:
        """Take the seeds in `where` [N, S] out at once."""
        return self._become(*remove_now(self.situation, where))

    def measure(
        self,
        *,
        contribution: Tensor | None = None,
        gradient: Tensor | None = None,
        loss_rise: Tensor | None = None,
    ) -> None:
        """Report measurements for the gates; NaN marks what was not measured."""
        shapes = {"contribution": self.lifecycle.shape, "gradient": self.lifecycle.shape}
        given = {"contribution": contribution, "gradient": gradient, "loss_rise": loss_rise}
        for name, values in given.items():
            expected = shapes.get(name, (len(self),))
            if values is not None and tuple(values.shape) != expected:
                raise AgreementError(
                    f"{name} has the wrong shape",
                    given=list(values.shape),
                    valid=list(expected),
                )
        self.lifecycle = self.lifecycle.measured(
            contribution=contribution, gradient=gradient, loss_rise=loss_rise
        )

    def _become(self, life: Lifecycle, record: Transitions) -> Transitions:
        """Adopt new arrays: seeds that came get rows, seeds that went give theirs back."""
        before, self.lifecycle = self.lifecycle, life
        here, there = life.blueprint != NOTHING, before.blueprint != NOTHING
        for slot in range(life.shape[1]):
            self.remove_seeds(slot, (there & ~here)[:, slot].nonzero()[:, 0], before)
            came = (here & ~there)[:, slot].nonzero()[:, 0]
            if len(came):
                self._plant(slot, came)
        self.structure_changed()
        return record

    def _plant(self, slot: int, came: Tensor) -> None:
        self.planted[came] += 1
        streams = fold(self.seeds[came], "seed", self.planted[came])
        kinds = self.lifecycle.blueprint[came, slot]
        for kind in kinds.unique().tolist():
            chosen = kinds == kind
            rows = self.newborn(("seed", slot, kind), came[chosen], streams[chosen])
            self.pool_rows[came[chosen], slot] = rows
        gated = self.lifecycle.blend[came, slot] == Blend.GATE
        if bool(gated.any()):
            rows = self.newborn(("gate", slot, NOTHING), came[gated], streams[gated])
            self.gate_rows[came[gated], slot] = rows

    def remove_seeds(self, slot: int, gone: Tensor, before: Lifecycle) -> None:
        """Give back the rows of the seeds that these environments had at a slot."""
        for key, rows in self._places(slot, gone, before):
            self.pools[key].take_back(rows)
        self.pool_rows[gone, slot] = VACANT
        self.gate_rows[gone, slot] = VACANT

    def _places(
        self, slot: int, environments: Tensor, life: Lifecycle
    ) -> Iterator[tuple[PoolKey, Tensor]]:
        """Where the seeds of these environments at one slot live: pool by pool, their rows."""
        kinds = life.blueprint[environments, slot]
        for kind in kinds.unique().tolist():
            yield ("seed", slot, kind), self.pool_rows[environments[kinds == kind], slot]
        gates = self.gate_rows[environments, slot]
        if bool((gates != VACANT).any()):
            yield ("gate", slot, NOTHING), gates[gates != VACANT]

    # --- training and measuring ----------------------------------------------------------

    def _plan(self, rows: Rows, device: torch.device | None = None) -> Plan:
        where = device or self.device
        return build_plan(self.lifecycle, rows, self.pool_rows, self.gate_rows, where)

    def _training_plans(self, device: torch.device) -> tuple[Plan, Plan | None]:
        """The pass of all hosts, and the one of isolated seeds when there are any."""
        straight = self.config.isolation is Isolation.STRAIGHT_THROUGH
        training = self._plan(training_rows(self.lifecycle, straight), device)
        rows = isolated_rows(self.lifecycle)
        if straight or not len(rows.environment):
            return training, None
        return training, self._plan(rows, device)

    def _make_step(
        self, training: Plan, isolated: Plan | None, learners: Mapping[PoolKey, Tensor]
    ) -> TrainingStep:
        return TrainingStep(
            self.engine,
            self.pools,
            self.config.optimiser,
            training,
            isolated,
            learners,
            self.config.compute_dtype,
            self.live,
        )

    def training_step(self) -> TrainingStep:
        """The fused step for the present structure, built once and kept until it changes."""
        if self._step is None:
            learners = self._rows_by_pool(self.lifecycle.at(SeedStage.TRAINING))
            self._step = self._make_step(*self._training_plans(self.device), learners)
        return self._step

    def _rows_by_pool(self, chosen: Tensor) -> dict[PoolKey, Tensor]:
        """For seeds in `chosen` [N, S]: their rows in each pool as masks [R, 1]."""
        masks: dict[PoolKey, Tensor] = {}
        for slot in range(chosen.shape[1]):
            environments = chosen[:, slot].nonzero()[:, 0]
            for key, rows in self._places(slot, environments, self.lifecycle):
                mask = torch.zeros(self.pools[key].capacity + 1, 1, dtype=torch.bool)
                mask[rows] = True
                masks[key] = mask.to(self.device)
        return masks

    def train_epoch(self) -> EpochRecord:
        """One epoch of every environment on its own batches."""
        for pool in self.pools.values():
            pool.squares.zero_()
        order = self.feed.epoch(self.seeds, self.lifecycle.epoch)  # [T, N, B]
        with self._determinism():
            return self._record(self._train(order) / self.feed.batches)

    def _determinism(self) -> AbstractContextManager[object]:
        """Everything but cuDNN's choice of kernels gives the same bits every time anyway."""
        if not self.config.deterministic:
            return nullcontext()
        flags: AbstractContextManager[object] = torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True
        )
        return flags

    def _train(self, order: Tensor) -> Tensor:
        """Train on all batches; the summed losses [N]."""
        if self._graphs is not None:
            learners = self._rows_by_pool(self.lifecycle.at(SeedStage.TRAINING))
            plans = self._training_plans(torch.device("cpu"))
            return self._graphs.epoch(*plans, learners, order)
        step = self.training_step()
        total = torch.zeros(len(self), device=self.device, dtype=torch.float64)
        for index in order:
            total += step.run(*self.feed.fetch(index))
        return total

    def _record(self, loss: Tensor) -> EpochRecord:
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
        there = self.lifecycle.occupied
        return EpochRecord(loss.cpu(), host.sqrt(), torch.where(there, seeds.sqrt(), torch.nan))

    @torch.no_grad()
    def evaluate(self, split: str = "validation", *, committed: bool = False) -> Scores:
        """Score every environment; `committed`: with fossilized seeds only, as exported."""
        life = self.lifecycle
        if committed:
            kept = life.at(SeedStage.FOSSILIZED)
            life = replace(life, alpha=torch.where(kept, life.alpha, 0.0))
        nothing = torch.zeros(0, dtype=torch.int64)
        rows = counterfactual_rows(life, nothing, torch.zeros(0, life.shape[1], dtype=torch.bool))
        return self._score(split, rows)

    @torch.no_grad()
    def counterfactual(self, environment: Tensor, off: Tensor, split: str = "validation") -> Scores:
        """Scores [Q] of environments with the seeds of `off` [Q, S] switched off.

        Each distinct subset is run once, and shares what comes before its first difference.
        """
        slots = len(self.specs)
        if off.dtype != torch.bool or off.shape != (len(environment), slots):
            raise AgreementError(
                "A counterfactual needs an environment and a boolean for each slot",
                given=f"{len(environment)} environments, {off.dtype} {list(off.shape)}",
                valid=f"torch.bool [{len(environment)}, {slots}]",
            )
        effective = off & (self.lifecycle.alpha[environment] > 0)
        asked = torch.cat([environment[:, None], effective.long()], dim=1)
        asked, inverse = asked.unique(dim=0, return_inverse=True)
        changed = asked[:, 1:].any(dim=1)
        rows = counterfactual_rows(self.lifecycle, asked[changed, 0], asked[changed, 1:] == 1)
        scores = self._score(split, rows)
        place = asked[:, 0].clone()  # where nothing that is on was switched off: the base row
        place[changed] = rows.place
        chosen = place[inverse]
        return Scores(scores.loss[chosen], scores.accuracy[chosen])

    @torch.no_grad()
    def flow(self) -> Tensor:
        """[N, S, K]: statistics of what reaches each slot, on validation data."""
        nothing = torch.zeros(0, dtype=torch.int64)
        none = torch.zeros(0, len(self.specs), dtype=torch.bool)
        plan = self._plan(counterfactual_rows(self.lifecycle, nothing, none))
        weights = cast_weights(self.pools, self.config.compute_dtype)
        inputs = as_inputs(self.feed.first_samples("validation", FLOW_SAMPLES), weights)
        found: list[Tensor] = []
        self.engine.logits(weights, plan, inputs, found)
        return torch.stack(found, 1).double().cpu()

    def _score(self, split: str, rows: Rows) -> Scores:
        if split not in SPLITS:
            raise UnknownNameError.of("split", split, SPLITS)
        plan = self._plan(rows)
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
        return Scores((loss / samples).cpu(), (100.0 * right / samples).cpu())
