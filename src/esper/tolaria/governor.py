"""The governor: one environment's failure never reaches another, and costs it one epoch.

It keeps a snapshot of every environment as it enters an epoch. After the epoch it looks at losses,
gradients, parameters and optimiser state; an environment that failed is put back to its snapshot,
alone, and a remedy follows: first the epoch is skipped, then what was growing is pruned, then the
environment is frozen.

Shapes: `N` environments, `H` epochs remembered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from esper.leyline import LIVING_STAGES, EsperError, SeedStage, Transitions
from esper.tolaria.pools import VACANT
from esper.tolaria.population import Population
from esper.tolaria.population_config import EpochRecord, Snapshot, SplitScores


class Failure(StrEnum):
    """What the governor saw."""

    NON_FINITE_LOSS = "non-finite loss"
    NON_FINITE_GRADIENT = "non-finite gradient"
    NON_FINITE_STATE = "non-finite parameters or optimiser state"
    EXPLOSION = "loss explosion"
    COLLAPSE = "collapse to chance"


class Remedy(StrEnum):
    """What it does after putting the environment back; each step includes the ones before."""

    SKIP = "skip"  # the epoch is lost
    PRUNE = "prune"  # living seeds are removed at once
    FREEZE = "freeze"  # the environment idles until it is reset


# When an environment has failed.
HISTORY = 8  # epochs of loss that are remembered
SPREAD = 10.0  # a loss this many robust deviations above the median has exploded ...
FACTOR = 3.0  # ... if it is also this many times the median
LEAST = 0.5  # ... and this much above it,
CEILING = 1e4  # or above this in any case
MAGNITUDE = 1e8  # weights and gradients beyond this are as bad as infinite
MARGIN = 2.0  # points above chance that count as chance
BETTER = 10.0  # points above chance an environment must once have reached, and
ERRORS = 5.0  # standard errors of a validation score by which it was above chance


@dataclass(frozen=True)
class Trip:
    """One intervention, with the numbers that led to it."""

    environment: int
    epoch: int
    cause: Failure
    remedy: Remedy
    value: float
    limit: float

    def __str__(self) -> str:
        return (
            f"environment {self.environment}, epoch {self.epoch}: {self.cause.value} "
            f"({self.value:.4g}, limit {self.limit:.4g}); rolled back, then {self.remedy.value}"
        )


class Governor:
    """Watches a population. Call `enter_epoch` before and `leave_epoch` after its training."""

    def __init__(self, population: Population, ladder: Sequence[Remedy] = tuple(Remedy)) -> None:
        """`ladder`: what follows the first, second, ... and every later time."""
        self.population, self.ladder = population, ladder
        count = len(population)
        self.losses = torch.full((count, HISTORY), torch.nan, dtype=torch.float64)
        self.best = torch.zeros(count, dtype=torch.float64)  # accuracy
        self.trips = torch.zeros(count, dtype=torch.int64)
        self._seeds = population.seeds.clone()  # whose memory this is
        self._snapshot: Snapshot | None = None
        self._spare: Snapshot | None = None  # of an epoch before, to be written over
        self.removals = Transitions.none()  # stage changes of the last remedies

    def enter_epoch(self) -> None:
        """Remember every environment as it is now; one that was restarted has no past."""
        self.forget((self.population.seeds != self._seeds).nonzero()[:, 0])
        self._seeds = self.population.seeds.clone()
        self._snapshot = self.population.snapshot(self._spare)

    def forget(self, environments: Tensor) -> None:
        """These environments have no past: they were started anew, or their task has changed."""
        self.losses[environments], self.best[environments] = torch.nan, 0.0
        self.trips[environments] = 0

    def leave_epoch(self, record: EpochRecord, scores: SplitScores | None = None) -> list[Trip]:
        """Look at every environment; put the failed ones back and apply their remedies."""
        if self._snapshot is None:
            raise EsperError(
                "The governor has no snapshot to go back to",
                given="leave_epoch without enter_epoch",
                fix="call enter_epoch() before training the epoch",
            )
        ladder, trips = self.ladder, []
        for environment, (cause, value, limit) in sorted(self._examine(record, scores).items()):
            remedy = ladder[min(int(self.trips[environment]), len(ladder) - 1)]
            epoch = int(self.population.lifecycle.epoch[environment])
            trips.append(Trip(environment, epoch, cause, remedy, value, limit))
        failed = torch.tensor([trip.environment for trip in trips], dtype=torch.int64)
        self.trips[failed] += 1
        healthy = torch.ones(len(self.population), dtype=torch.bool)
        healthy[failed] = False
        shifted = self.losses.roll(-1, dims=1)
        shifted[:, -1] = record.loss
        self.losses = torch.where(healthy[:, None], shifted, self.losses)
        if scores is not None:
            self.best = torch.where(healthy, self.best.maximum(scores.accuracy), self.best)
        self.removals = Transitions.none()
        if trips:
            self.population.put_rows(failed, self._snapshot)
            pruned = [t.environment for t in trips if t.remedy is not Remedy.SKIP]
            frozen = [t.environment for t in trips if t.remedy is Remedy.FREEZE]
            where = torch.zeros(self.population.lifecycle.shape, dtype=torch.bool)
            where[pruned] = True
            where &= self.population.lifecycle.at(*sorted(LIVING_STAGES), SeedStage.PRUNED)
            if bool(where.any()):
                self.removals = self.population.remove_now(where)
            if frozen:
                self.population.freeze_rows(torch.tensor(frozen))
        self._spare, self._snapshot = self._snapshot, None
        return trips

    def _examine(
        self, record: EpochRecord, scores: SplitScores | None
    ) -> dict[int, tuple[Failure, float, float]]:
        """The first cause for each failed environment, with the value seen and its limit."""
        nothing = torch.zeros(len(self.population), dtype=torch.float64)
        loss, limit = record.loss, self._loss_limit(record.loss)
        gradients, states = self._beyond()
        findings = [  # cause, failed, value, limit
            (Failure.NON_FINITE_LOSS, ~loss.isfinite(), loss, nothing),
            (Failure.NON_FINITE_GRADIENT, gradients > 0, gradients, nothing),
            (Failure.NON_FINITE_STATE, states > 0, states, nothing),
            (Failure.EXPLOSION, loss > limit, loss, limit),
        ]
        if scores is not None:
            chance = 100.0 / self.population.feed.classes
            samples = self.population.feed.samples("validation").double()
            error = (chance * (100.0 - chance) / samples).sqrt()
            needed = (ERRORS * error).clamp(min=BETTER)
            reached = self.best >= chance + needed
            floor = torch.full_like(nothing, chance + MARGIN)
            collapsed = reached & (scores.accuracy <= floor)
            findings.append((Failure.COLLAPSE, collapsed, scores.accuracy, floor))
        # Rows that were reset since the epoch began have nothing to go back to.
        exempt = self.population.frozen | (self.population.seeds != self._seeds)
        found: dict[int, tuple[Failure, float, float]] = {}
        for cause, failed, value, bound in findings:
            for environment in (failed & ~exempt).nonzero()[:, 0].tolist():
                numbers = float(value[environment]), float(bound[environment])
                found.setdefault(environment, (cause, *numbers))
        return found

    def _beyond(self) -> tuple[Tensor, Tensor]:
        """[N] each: how many numbers of an environment's gradients, and of its weights and their
        optimiser state, are not finite, or as good as not."""
        moments = [f"moment{i}" for i in range(self.population.config.optimiser.moments)]
        pools = self.population.pools.values()
        limits = dict.fromkeys(("squares", "theta", *moments), MAGNITUDE)
        limits |= {name: MAGNITUDE**2 for name in ("squares", "moment1") if name in limits}
        nothing = torch.zeros(2, len(self.population), dtype=torch.float64)
        # Where all sizes add up to less than the limit, none is beyond it: the rule, in few passes.
        tensors = [pool.tensors() for pool in pools]
        sums = torch._foreach_norm([each[name] for name in limits for each in tensors], 1)
        most = torch.stack(sums).view(len(limits), -1).amax(dim=1).tolist()
        if all(size <= limit for size, limit in zip(most, limits.values(), strict=True)):
            return nothing[0], nothing[1]
        counts = []
        for each in tensors:
            bad = {name: (~(each[name][:-1].abs() <= limits[name])).sum(dim=1) for name in limits}
            gradients = bad.pop("squares")
            counts.append(torch.stack([gradients, sum(bad.values(), torch.zeros_like(gradients))]))
        owner = torch.cat([pool.owner for pool in pools])
        used = owner != VACANT
        found = torch.cat(counts, dim=1).cpu()[:, used].double()  # the one transfer
        gradients, states = nothing.index_add(1, owner[used], found)
        return gradients, states

    def _loss_limit(self, loss: Tensor) -> Tensor:
        """[N]: above this a loss has exploded, by the median and the spread of its own past; where
        it is about the least of them it has not, and the limit is the ceiling."""
        limit = torch.full_like(loss, CEILING)
        lowest = self.losses.nan_to_num(torch.inf).amin(dim=1)
        rows = (loss > lowest + LEAST).nonzero()[:, 0]
        past, ceiling = self.losses[rows], limit[rows]
        median = past.nanmedian(dim=1).values
        deviation = (past - median[:, None]).abs().nanmedian(dim=1).values
        robust = median + SPREAD * 1.4826 * deviation
        robust = robust.maximum(median * FACTOR).maximum(median + LEAST)
        enough = (~past.isnan()).sum(dim=1) >= 2
        limit[rows] = torch.where(enough, robust.minimum(ceiling), ceiling)
        return limit
