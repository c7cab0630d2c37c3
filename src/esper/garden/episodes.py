"""Episodes: hosts of one shape that train, are measured and decide, row by row on given cases.

There is no reward here, see `environment.py`. One epoch is a transaction: a row either has its new
state or, if its training failed, the last good one with its living seeds removed, and its episode
is over.

Shapes: `N` rows, `K` rows in question, `S` slots, `W` epochs remembered, `T` epochs of an episode,
`H` heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypedDict

import torch
from torch import Tensor

from esper.datasets.generated import LENGTH
from esper.garden.cases import Case
from esper.garden.contexts import Context, Source, by_shape, lesion_mask
from esper.leyline import Actions, Legality, LifecycleOp, SeedStage, Transitions
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, DEFAULT_RENT, SCORED_EPOCHS
from esper.leyline.errors import AgreementError, UnknownNameError
from esper.leyline.shadows import AuditionPlan
from esper.leyline.signals import Signals, SignalWindow
from esper.tolaria import Feed, Governor, Population, Remedy, Trip
from esper.tolaria.flops import count_flops
from esper.tolaria.population_config import EpochRecord, PopulationConfig, SplitScores
from esper.tolaria.random_streams import uniform
from esper.tolaria.tasks import DEFAULT_BUDGET, GARDEN_BATCH, GARDEN_BATCHES

EPOCHS_ALONE = 3  # of a host before anything is planted: what it lacks shows while it learns
GARDEN_SEED = 0  # of every population: a case is the same host with the same data anywhere


class World(TypedDict, total=False):
    """What all share who play the same cases."""

    horizon: int  # epochs of an episode
    device: torch.device | str
    config: PopulationConfig | None


@dataclass(frozen=True)
class Epoch:
    """What one epoch did to every row."""

    active: Tensor  # [N] bool: rows that were in an episode; the others idled
    ended: Tensor  # [N] bool: rows whose episode ended with this epoch, rolled back ones included
    rolled_back: Tensor  # [N] bool
    transitions: Transitions  # what stands: a decision that was rolled back is not among them
    trips: tuple[Trip, ...]
    accuracy: Tensor  # [N] percent on validation data, of the network as it is
    committed: Tensor  # [N] the same with only fossilized seeds on
    test: Tensor  # [N] of the committed network on test data; NaN where it was not scored
    added: Tensor  # [N] int64 parameters in seeds while the epoch trained


class Ledger:
    """What every row's present episode has come to: rewards and results are read off it.

    How many decisions were made the lifecycle counts; those that a rollback undid are kept here.
    """

    def __init__(self, rows: int, horizon: int, chance: float = 0.0) -> None:
        """`chance`: the accuracy of a network that has not trained an epoch."""
        nothing = torch.full((rows, horizon), torch.nan, dtype=torch.float64)
        self.horizon, self.chance = horizon, chance
        self.committed = nothing.clone()  # [N, T] validation accuracy
        self.current = nothing.clone()  # [N, T]
        self.test = nothing.clone()  # [N, T] of the committed network; only where asked for
        # [N, T] so far: sum over epochs of added / host parameters, divided by the horizon
        self.exposure = torch.zeros_like(nothing)
        self.flops = torch.zeros(rows, dtype=torch.float64)  # of training, so far
        self.lived = torch.zeros(rows, dtype=torch.int64)  # epochs until the episode was over
        self.undone = torch.zeros(rows, dtype=torch.int64)  # decisions
        self.rolled_back = torch.zeros(rows, dtype=torch.bool)

    def clear(self, rows: Tensor) -> None:
        for series in (self.committed, self.current, self.test):
            series[rows] = torch.nan
        for sums in (self.exposure, self.flops, self.lived, self.undone, self.rolled_back):
            sums[rows] = 0

    def write(
        self,
        now: Tensor,
        *,
        active: Tensor,
        decided: Tensor,
        failed: Tensor,
        added_share: Tensor,
        committed: Tensor,
        current: Tensor,
    ) -> None:
        """The epoch `now` [N] of every row; [N] each.

        `decided`: was it another op than WAIT? `added_share`: parameters in seeds during the epoch
        / the host's. A row that idles after a rollback is still scored: what it committed is what
        it is worth.
        """
        rows = (now < self.horizon).nonzero()[:, 0]
        place = now[rows]
        earlier = (place - 1).clamp(min=0)
        last_good = torch.where(place > 0, self.committed[rows, earlier], self.chance)
        for series, values in ((self.current, current), (self.committed, committed)):
            series[rows, place] = torch.where(failed[rows], last_good, values[rows].double())
        paid = torch.where(place > 0, self.exposure[rows, earlier], 0.0)
        self.exposure[rows, place] = paid + added_share[rows].double() / self.horizon
        self.lived += active.long()
        self.undone += (failed & decided).long()
        self.rolled_back |= failed

    def at(self, series: Tensor, epochs: Tensor) -> Tensor:
        """[N]: a series [N, T] at these epochs [N]."""
        return series.gather(1, epochs.clamp(0, self.horizon - 1)[:, None])[:, 0]


class Episodes:
    """A population whose rows play one episode after the other, driven by actions."""

    def __init__(
        self,
        contexts: Sequence[Context],
        rows: int,
        *,
        horizon: int = DEFAULT_EPISODE_LENGTH,
        device: torch.device | str = "cpu",
        config: PopulationConfig | None = None,
        test: bool = False,
        attribute: bool = True,
        rent: float = DEFAULT_RENT,
    ) -> None:
        """`test`: score the last epochs on test data; `attribute`: measure what controllers see;
        `rent`: what they are told that seeds cost."""
        self.horizon, self.test, self.attribute, self.rent = horizon, test, attribute, rent
        self.contexts = {context.key: context for context in contexts}
        first = _one_shape(contexts)
        tasks = (task for context in contexts for task in (context.source, context.drift))
        self._sources = list(dict.fromkeys(task for task in tasks if task is not None))
        config = config or PopulationConfig()
        alone = max(config.rules.min_host_epochs, EPOCHS_ALONE)
        config = replace(config, rules=replace(config.rules, min_host_epochs=alone))
        feed = Feed(
            [_loaded(source).to(device) for source in self._sources],
            [0] * rows,
            batch=GARDEN_BATCH,
            batches=GARDEN_BATCHES,
            device=device,
            dtype=config.dtype,
        )
        host = first.build_host()
        if config.budget is None:
            size = sum(parameter.numel() for parameter in host.parameters())
            config = replace(config, budget=int(DEFAULT_BUDGET * size))
        self._live = {
            lesion: lesion_mask(host, lesion) for lesion in {each.lesion for each in contexts}
        }
        self.population = Population(
            first.build_host, feed, identities=range(rows), seed=GARDEN_SEED, config=config
        )
        self.flops = count_flops(host, torch.zeros(1, LENGTH), self.population.catalogue)
        # A failed environment is put back and idles until the round's end: its episode is over.
        self.governor = Governor(self.population, [Remedy.FREEZE])
        self.cases: list[Case | None] = [None] * rows
        self.ledger = Ledger(rows, horizon, 100.0 / feed.classes)
        self.running = torch.zeros(rows, dtype=torch.bool)
        self.drift_epoch = torch.full((rows,), -1)  # with which each row's task changes; -1: never
        self._drift_data = torch.zeros(rows, dtype=torch.int64)
        self._window = SignalWindow(rows, len(self.population.specs))
        self._legal: Legality | None = None  # of the present state, once it was asked for

    def __len__(self) -> int:
        return len(self.population)

    def begin(self, rows: Tensor, cases: Sequence[Case]) -> None:
        """Start an episode in these rows [K], each on its case."""
        for case in cases:
            if case.context.key not in self.contexts:
                known = sorted(context.name for context in self.contexts.values())
                raise UnknownNameError.of("context of these episodes", case.context.name, known)
        self.population.reset_rows(rows, [case.identity for case in cases])
        place = {source: index for index, source in enumerate(self._sources)}
        data = torch.tensor([place[case.context.source] for case in cases])
        self.population.feed.assign(rows, data)
        if set(self._live) != {None}:
            live = torch.stack([self._live[case.context.lesion] for case in cases])
            self.population.silence_rows(rows, live)
        for row, case in zip(rows.tolist(), cases, strict=True):
            self.cases[row] = case
        epochs = [case.context.drift_epoch(case.seed) for case in cases]
        self.drift_epoch[rows] = torch.tensor([-1 if each is None else each for each in epochs])
        # Where nothing changes it is not looked at.
        drifts = [case.context.drift for case in cases]
        later = [0 if each is None else place[each] for each in drifts]
        self._drift_data[rows] = torch.tensor(later)
        self.governor.forget(rows)
        self.ledger.clear(rows)
        self.running[rows] = True
        self._window.clear(rows)
        self._legal = None

    # --- what a controller sees ---------------------------------------------------------------

    def legal(self) -> Legality:
        """What every row may do now."""
        if self._legal is None:
            self._legal = self.population.legal()
        return self._legal

    def signals(self, *, deciding: bool = True) -> Signals:
        """What a controller may see now; what no feature shows only where it is for `deciding`."""
        population = self.population
        life, heads = population.lifecycle, len(population.space)
        shadows = population.shadows.readings
        return Signals(
            population.catalogue,
            life,
            population.budget,
            horizon=torch.full((len(self),), self.horizon),
            classes=population.feed.classes,
            draws=uniform(population.seeds, "decision", life.epoch, heads)
            if deciding
            else torch.zeros(len(self), heads, dtype=torch.float64),
            shadows=replace(shadows, cost=self.flops.shadows(life)) if deciding else None,
            **self._window.measured(),
            rent=self.rent,
        )

    def drifting(self) -> Tensor:
        """[K]: the rows whose task changes with the next epoch."""
        return (self.drift_epoch == self.population.lifecycle.epoch).nonzero()[:, 0]

    # --- an epoch -----------------------------------------------------------------------------

    def advance(self, actions: Actions, plan: AuditionPlan | None = None) -> Epoch:
        """Carry out the decisions, train an epoch and its shadows, measure, commit or roll back."""
        population, active = self.population, self.running.clone()
        now = population.lifecycle.epoch.clone()
        self.governor.enter_epoch()
        self.governor.forget(self.drifting())
        transitions = population.apply(actions, self.legal())
        self._legal = None
        added = population.lifecycle.params.sum(dim=1)
        record = self.train_epoch(plan)
        self.ledger.flops += torch.where(active, self.training_flops(record.shadowed), 0.0)
        found = measure(population, attribute=self.attribute)
        trips = self.governor.leave_epoch(record, found.whole)
        failed = torch.zeros(len(self), dtype=torch.bool)
        failed[[trip.environment for trip in trips]] = True
        self.ledger.write(
            now,
            active=active,
            decided=actions["op"] != LifecycleOp.WAIT,
            failed=failed,
            added_share=added.double() / population.catalogue.host_params,
            committed=found.committed,
            current=found.whole.accuracy,
        )
        self._test(now)
        self._remember(record, found, failed)
        kept = transitions.of_hosts(~failed) if trips else transitions
        changes = [kept, self.governor.removals, population.pass_time()]
        ended = active & (failed | (population.lifecycle.epoch >= self.horizon))
        self.running &= ~ended
        ledger = self.ledger
        return Epoch(
            active=active,
            ended=ended,
            rolled_back=failed,
            transitions=Transitions.joined(changes),
            trips=tuple(trips),
            accuracy=ledger.at(ledger.current, now),
            committed=ledger.at(ledger.committed, now),
            test=ledger.at(ledger.test, now),
            added=added,
        )

    def train_epoch(self, plan: AuditionPlan | None = None) -> EpochRecord:
        """One epoch of every row; what changes its task at this epoch does so first."""
        rows = self.drifting()
        if len(rows):
            self.population.feed.assign(rows, self._drift_data[rows])
        return self.population.train_epoch(plan)

    def training_flops(self, shadowed: Tensor | None = None) -> Tensor:
        """[N]: what an epoch costs every row as it is now, with what shadows learn [N, S, P]."""
        population = self.population
        samples = population.feed.batch * population.feed.batches
        life, isolation = population.lifecycle, population.config.isolation
        return self.flops.training(life, samples, isolation, shadowed)

    def _test(self, now: Tensor) -> None:
        """Score rows in the last epochs of their episodes on test data, where asked for."""
        late = (now >= self.horizon - SCORED_EPOCHS) & (now < self.horizon)
        if self.test and bool(late.any()):
            rows = late.nonzero()[:, 0]
            off = uncommitted(self.population)[rows]
            scores = self.population.counterfactual(rows, off, "test")
            self.ledger.test[rows, now[rows]] = scores.accuracy

    def _remember(self, record: EpochRecord, found: "Measured", failed: Tensor) -> None:
        """Report to the gates, and to the signals."""
        latest = {
            "train_loss": record.loss,
            "validation_loss": found.whole.loss,
            "validation_accuracy": found.whole.accuracy,
            "committed_accuracy": found.committed,
        }
        gone = failed[:, None]
        self.population.measure(
            contribution=torch.where(gone, torch.nan, found.contribution),
            gradient=torch.where(gone, torch.nan, record.seed_gradient),
            loss_rise=torch.where(failed, torch.nan, self._window.loss_rise(record.loss)),
        )
        self._window.remember(latest, record.host_gradient, ~failed)
        if self.attribute:
            self._window.remember_flow(self.population.flow(), ~failed)


def _one_shape(contexts: Sequence[Context]) -> Context:
    """The first context, after making sure that all have hosts of one shape."""
    if not contexts:
        raise AgreementError("Episodes need contexts", given="none", valid="at least one")
    first, *others = (alike[0] for alike in by_shape(contexts))
    if others:
        raise AgreementError(
            "Episodes that are played together must have hosts of one shape",
            given=f"{first.name!r}: {first.host_shape}, {others[0].name!r}: {others[0].host_shape}",
            fix="play each shape apart: by_shape(contexts)",
        )
    return first


# Generated once: episodes of the same contexts are made again and again.
_loaded = lru_cache(maxsize=64)(Source.load)


# --- measuring --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What an epoch measures of every row on validation data."""

    whole: SplitScores  # [N] of the network as it is
    committed: Tensor  # [N] accuracy with only fossilized seeds on
    contribution: Tensor  # [N, S] accuracy with the seed minus without it; NaN: not measured


def uncommitted(population: Population) -> Tensor:
    """[N, S] bool: seeds that show in the output and are not fossilized."""
    life = population.lifecycle
    return (life.alpha > 0) & ~life.at(SeedStage.FOSSILIZED)


def measure(population: Population, *, attribute: bool = True) -> Measured:
    """Score every row as it is, as committed and, to attribute, without each seed, in one pass.

    Each distinct subset of seeds is computed once, from where it first differs.
    """
    hosts, slots = population.lifecycle.shape
    everyone = torch.arange(hosts)
    none = torch.zeros(hosts, slots, dtype=torch.bool)
    seeds = (population.lifecycle.alpha > 0) & attribute & ~population.frozen[:, None]
    owners, places = seeds.nonzero(as_tuple=True)
    seed = torch.nn.functional.one_hot(places, slots).bool()
    off = torch.cat([none, uncommitted(population), seed])
    scores = population.counterfactual(torch.cat([everyone, everyone, owners]), off)
    whole, committed, without = scores.accuracy.split([hosts, hosts, len(owners)])
    contribution = torch.full((hosts, slots), torch.nan, dtype=torch.float64)
    contribution[owners, places] = whole[owners] - without
    return Measured(SplitScores(scores.loss[:hosts], whole), committed, contribution)
