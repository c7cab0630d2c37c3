"""Episodes: rows of a bed that train, are measured and decide, epoch by epoch, without a reward.

One epoch is a transaction: a row either has its new state or, if its training failed, the last
good one with its living seeds removed, and its episode is over.

Shapes: `N` rows, `S` slots, `W` epochs remembered, `T` epochs of an episode, `H` heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.garden.bed import Bed, Case
from esper.garden.measuring import Measured, measure, uncommitted
from esper.leyline.constants import SCORED_EPOCHS
from esper.leyline.legality import Actions, Legality
from esper.leyline.lifecycle import Transitions
from esper.leyline.signals import Signals, SignalWindow
from esper.tolaria.governor import Governor, GovernorRules, Remedy, Trip
from esper.tolaria.population_config import EpochRecord
from esper.tolaria.random_streams import uniform

# A failed environment is put back and idles until the round's end: its episode is over.
ROLLBACK_RULES = GovernorRules(ladder=(Remedy.FREEZE,))


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
    """What is kept of every row's present episode, for rewards and results."""

    def __init__(self, rows: int, horizon: int) -> None:
        nothing = torch.full((rows, horizon), torch.nan, dtype=torch.float64)
        self.committed = nothing.clone()  # [N, T] validation accuracy
        self.current = nothing.clone()  # [N, T]
        self.test = nothing.clone()  # [N, T] of the committed network; only where asked for
        self.exposure = torch.zeros(rows, dtype=torch.float64)  # share of host × share of episode
        self.flops = torch.zeros(rows, dtype=torch.float64)  # of training, so far
        self.rolled_back = torch.zeros(rows, dtype=torch.bool)

    def clear(self, rows: Tensor) -> None:
        for series in (self.committed, self.current, self.test):
            series[rows] = torch.nan
        self.exposure[rows] = 0.0
        self.flops[rows] = 0.0
        self.rolled_back[rows] = False


class Episodes:
    """Rows of a bed, driven by actions."""

    def __init__(self, bed: Bed, *, test: bool = False, attribute: bool = True) -> None:
        """`test`: score the last epochs on test data; `attribute`: measure what controllers see."""
        self.bed, self.test, self.attribute = bed, test, attribute
        self.population = bed.population
        self.governor = Governor(self.population, ROLLBACK_RULES)
        self.ledger = Ledger(len(bed), bed.horizon)
        self.running = torch.zeros(len(bed), dtype=torch.bool)
        self._window = SignalWindow(len(bed), len(self.population.specs))
        self._horizon = torch.full((len(bed),), bed.horizon)

    def __len__(self) -> int:
        return len(self.bed)

    @property
    def cases(self) -> Sequence[Case | None]:
        return self.bed.cases

    def begin(self, rows: Tensor, cases: Sequence[Case]) -> None:
        """Start an episode in these rows."""
        self.bed.start(rows, cases)
        self.governor.forget(rows)
        self.ledger.clear(rows)
        self.running[rows] = True
        self._window.clear(rows)

    def legal(self) -> Legality:
        return self.population.legal()

    def signals(self) -> Signals:
        """What a controller may see now."""
        population = self.population
        life = population.lifecycle
        return self._window.signals(
            population.catalogue,
            life,
            population.budget,
            horizon=self._horizon,
            classes=population.feed.classes,
            draws=uniform(population.seeds, "decision", life.epoch, len(population.space)),
        )

    def advance(self, actions: Actions) -> Epoch:
        """Carry out the decisions, train an epoch, measure, and commit or roll back."""
        population, active = self.population, self.running.clone()
        now = population.lifecycle.epoch.clone()
        self.governor.enter_epoch()
        self.governor.forget(self.bed.drifting())
        transitions = population.apply(actions)
        added = population.lifecycle.params.sum(dim=1)
        self.ledger.flops += torch.where(active, self.bed.training_flops(), 0.0)
        record = self.bed.train_epoch()
        found = measure(population, attribute=self.attribute)
        trips = self.governor.leave_epoch(record, found.whole)
        failed = torch.zeros(len(self), dtype=torch.bool)
        failed[[trip.environment for trip in trips]] = True
        self._keep(now, added, found, failed)
        self._remember(record, found, failed)
        transitions = transitions.of_hosts(~failed) + self.governor.removals
        transitions = transitions + population.pass_time()
        ended = active & (failed | (population.lifecycle.epoch >= self._horizon))
        self.running &= ~ended
        place = now.clamp(max=self.bed.horizon - 1)[:, None]
        return Epoch(
            active=active,
            ended=ended,
            rolled_back=failed,
            transitions=transitions,
            trips=tuple(trips),
            accuracy=self.ledger.current.gather(1, place)[:, 0],
            committed=self.ledger.committed.gather(1, place)[:, 0],
            test=self.ledger.test.gather(1, place)[:, 0],
            added=added,
        )

    def _keep(self, now: Tensor, added: Tensor, found: Measured, failed: Tensor) -> None:
        """Write the epoch `now` [N] of every row into the ledger.

        A row that idles after a rollback is still scored: what it committed is what it is worth.
        """
        ledger, horizon = self.ledger, self.bed.horizon
        rows = (now < horizon).nonzero()[:, 0]
        place = now[rows]
        before = ledger.committed[rows, (place - 1).clamp(min=0)]
        last_good = torch.where(place > 0, before, 100.0 / self.population.feed.classes)
        for series, values in (
            (ledger.current, found.whole.accuracy),
            (ledger.committed, found.committed),
        ):
            series[rows, place] = torch.where(failed[rows], last_good, values[rows])
        ledger.exposure[rows] += (
            added[rows].double() / self.population.catalogue.host_params / horizon
        )
        ledger.rolled_back |= failed
        late = (now >= horizon - SCORED_EPOCHS) & (now < horizon)
        if self.test and bool(late.any()):
            rows = late.nonzero()[:, 0]
            off = uncommitted(self.population)[rows]
            scores = self.population.counterfactual(rows, off, "test")
            ledger.test[rows, now[rows]] = scores.accuracy

    def _remember(self, record: EpochRecord, found: Measured, failed: Tensor) -> None:
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
