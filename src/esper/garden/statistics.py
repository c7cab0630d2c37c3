"""Statistics of evaluation: what may be said about controllers, and how surely.

Scores are arrays [R, C, E]: R independent trainings of a controller (1 where nothing is trained),
C contexts, E evaluation episodes of each context. Episode e of context c is the same environment
for every training and every controller, so differences are paired. [C, E] stands for one
training. A *cell* is the mean over the episodes of one training in one context.

Intervals are percentile bootstraps: trainings are drawn anew with replacement, and within each
context (the stratum) its episodes. One draw of episodes serves all trainings and both controllers
of a comparison. The same seed gives the same interval.

Shapes: `R`, `C`, `E` as above, `B` resamples, `P` controllers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from esper.leyline.errors import AgreementError

Array = NDArray[np.float64]

DEFAULT_RESAMPLES = 2000
DEFAULT_LEVEL = 0.95
NO_GAP = 1e-9


class Estimate(NamedTuple):
    """A number and the interval it probably lies in."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """The value and, in brackets, its interval; all three in the format, `.3g` by default."""
        return self.text(spec or ".3g")

    def __str__(self) -> str:
        return format(self)

    def text(self, spec: str, unit: str = "") -> str:
        """The same, with a unit behind the value."""
        return f"{self.value:{spec}}{unit} [{self.low:{spec}}, {self.high:{spec}}]"


class Resampling(TypedDict, total=False):
    """How intervals are drawn."""

    resamples: int  # 2000 unless given
    level: float  # of the interval; 0.95 unless given
    seed: int


@dataclass(frozen=True)
class Profile:
    """For each threshold the share of episodes with a score above it."""

    thresholds: Array  # [K]
    share: Array  # [K]
    low: Array  # [K]
    high: Array  # [K]


def interquartile_mean(values: ArrayLike, axis: int = -1) -> Array:
    """The mean of the middle half; a value that the cut goes through counts with its part."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=axis)
    count = ordered.shape[axis]
    if count == 0:
        raise AgreementError("An interquartile mean needs at least one value", given=0)
    # Value i fills the stretch from i to i + 1; the middle half is from count/4 to 3 count/4.
    place = np.arange(count)
    weight = np.minimum(place + 1, 0.75 * count) - np.maximum(place, 0.25 * count)
    weight = weight.clip(min=0.0) / (0.5 * count)
    return np.asarray(np.moveaxis(ordered, axis, -1) @ weight)


def mean(values: Array) -> Array:
    """A statistic: the mean of each row."""
    return np.asarray(values.mean(axis=-1))


Statistic = Callable[[Array], Array]  # of cells [B, R x C], to [B]


def interquartile_mean_interval(scores: ArrayLike, **how: Unpack[Resampling]) -> Estimate:
    """Interquartile mean over all cells of [R, C, E], with its interval."""
    return interval(scores, statistic=interquartile_mean, **how)


def mean_interval(scores: ArrayLike, **how: Unpack[Resampling]) -> Estimate:
    """Mean over all cells of [R, C, E], with its interval."""
    return interval(scores, statistic=mean, **how)


def interval(scores: ArrayLike, *, statistic: Statistic, **how: Unpack[Resampling]) -> Estimate:
    """A statistic of the cells [B, R x C], one number for each row, with its interval."""
    runs = _runs(scores, "scores")
    draws = _Draws(runs.shape[1:], **how)
    value = statistic(runs.mean(-1).reshape(1, -1))[0]
    return draws.estimate(value, statistic(draws.cells(runs)))


def paired_difference(
    scores: ArrayLike,
    baseline: ArrayLike,
    *,
    statistic: Statistic = interquartile_mean,
    **how: Unpack[Resampling],
) -> Estimate:
    """A statistic of one controller less that of another on the same episodes.

    Contexts and episodes must be the same, trainings need not: those of each are drawn apart.
    """
    ours, theirs = _pair(scores, baseline)
    draws = _Draws(ours.shape[1:], **how)
    value = statistic(ours.mean(-1).reshape(1, -1)) - statistic(theirs.mean(-1).reshape(1, -1))
    return draws.estimate(value[0], statistic(draws.cells(ours)) - statistic(draws.cells(theirs)))


def share_of_gap(
    scores: ArrayLike, baseline: ArrayLike, ceiling: ArrayLike, **how: Unpack[Resampling]
) -> Estimate:
    """How much of the way from a baseline's mean to a ceiling's is covered, on the same episodes.

    0 is the baseline, 1 the ceiling, which must be higher. A resample in which it is not counts
    as far more than all or far less than nothing.
    """
    ours, theirs = _pair(scores, baseline)
    _, best = _pair(scores, ceiling)
    draws = _Draws(ours.shape[1:], **how)
    gap = float(best.mean() - theirs.mean())
    if gap <= 0:
        raise AgreementError(
            "There is no gap to close",
            given=f"the ceiling's mean is {best.mean():.3g}, the baseline's {theirs.mean():.3g}",
            valid="a ceiling above the baseline",
        )
    low = mean(draws.cells(theirs))
    gained, whole = mean(draws.cells(ours)) - low, mean(draws.cells(best)) - low
    drawn = gained / np.maximum(whole, NO_GAP)
    return draws.estimate((ours.mean() - theirs.mean()) / gap, drawn)


def probability_of_improvement(
    scores: ArrayLike, baseline: ArrayLike, **how: Unpack[Resampling]
) -> Estimate:
    """How often one training beats another on the same episode, a tie counting half.

    The mean over contexts, so each weighs the same; over all pairs of trainings.
    """
    ours, theirs = _pair(scores, baseline)
    gap = ours[:, None] - theirs[None]  # [R, R', C, E]
    wins = np.where(gap > 0, 1.0, np.where(gap == 0, 0.5, 0.0))
    draws = _Draws(ours.shape[1:], **how)
    contexts = ours.shape[1]
    between = np.einsum("ijce,bce->bij", wins, draws.episodes) / contexts  # [B, R, R']
    first, second = draws.trainings(len(ours)), draws.trainings(len(theirs))
    drawn = np.einsum("bij,bi,bj->b", between, first, second)
    return draws.estimate(wins.mean(), drawn)


def performance_profile(
    scores: ArrayLike, thresholds: ArrayLike, **how: Unpack[Resampling]
) -> Profile:
    """The share of episodes that score above each threshold, each context weighing the same.

    Above 0 of net gains it is one minus the rate of growth that did not pay.
    """
    runs = _runs(scores, "scores")
    limits = np.atleast_1d(np.asarray(thresholds, dtype=np.float64))
    draws = _Draws(runs.shape[1:], **how)
    trainings = draws.trainings(len(runs))
    share, low, high = (np.empty(len(limits)) for _ in range(3))
    for index, limit in enumerate(limits):
        above = (runs > limit).astype(np.float64)
        by_run = np.einsum("rce,bce->br", above, draws.episodes) / runs.shape[1]
        drawn = np.einsum("br,br->b", by_run, trainings)
        share[index], low[index], high[index] = draws.estimate(above.mean(), drawn)
    return Profile(limits, share, low, high)


def fair_draws(count: int) -> int:
    """How many of so many values a resample holds: one less, so that few are not taken for sure.

    The mean of n - 1 values drawn from n varies as much as the mean of n fresh ones would.
    """
    return max(1, count - 1)


class _Draws:
    """Which trainings and episodes each resample holds, as weights that sum to 1."""

    def __init__(self, shape: tuple[int, ...], **how: Unpack[Resampling]) -> None:
        self.resamples = how.get("resamples", DEFAULT_RESAMPLES)
        self.level = how.get("level", DEFAULT_LEVEL)
        if self.resamples < 1:
            raise AgreementError("A bootstrap needs at least one resample", given=self.resamples)
        if not 0 < self.level < 1:
            raise AgreementError("A level is between 0 and 1", given=self.level)
        self.random = np.random.default_rng(how.get("seed", 0))
        contexts, episodes = shape
        self.episodes = self._weights(contexts, episodes)  # [B, C, E]

    def _weights(self, rows: int, count: int) -> Array:
        """[B, rows, count]: how often each of `count` was drawn, as a share of all draws."""
        draws = fair_draws(count)
        chances = np.full(count, 1.0 / count)
        return self.random.multinomial(draws, chances, size=(self.resamples, rows)) / draws

    def trainings(self, count: int) -> Array:
        """[B, R]: fresh weights of a controller's trainings."""
        return self._weights(1, count)[:, 0]

    def cells(self, runs: Array) -> Array:
        """[B, R x C]: cells of trainings drawn anew, over the episodes drawn anew."""
        means = np.einsum("rce,bce->brc", runs, self.episodes)
        picked = self.random.integers(len(runs), size=(self.resamples, fair_draws(len(runs))))
        return np.asarray(
            np.take_along_axis(means, picked[:, :, None], axis=1).reshape(self.resamples, -1)
        )

    def estimate(self, value: Any, drawn: Array) -> Estimate:
        """A value, and where its resamples [B] lie."""
        low, high = np.quantile(drawn, [(1 - self.level) / 2, (1 + self.level) / 2])
        return Estimate(float(value), float(low), float(high))


def _runs(scores: ArrayLike, name: str) -> Array:
    """As [R, C, E]."""
    runs = np.asarray(scores, dtype=np.float64)
    if runs.ndim == 2:
        runs = runs[None]
    if runs.ndim != 3 or not runs.size or not np.isfinite(runs).all():
        raise AgreementError(
            f"{name} cannot be evaluated",
            given=f"{list(runs.shape)}, {int((~np.isfinite(runs)).sum())} not finite",
            valid="[trainings, contexts, episodes] or [contexts, episodes], at least one each, "
            "all finite",
        )
    return runs


def _pair(scores: ArrayLike, baseline: ArrayLike) -> tuple[Array, Array]:
    ours, theirs = _runs(scores, "scores"), _runs(baseline, "baseline")
    if ours.shape[1:] != theirs.shape[1:]:
        raise AgreementError(
            "Controllers are compared on the same contexts and episodes",
            given=f"{list(ours.shape[1:])} and {list(theirs.shape[1:])}",
        )
    return ours, theirs


# --- ranks ------------------------------------------------------------------------------------


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Rank correlation; equal values share their mean rank. NaN where one of them is constant."""
    return _correlation(*(_signs(values).sum(1) for values in _columns(x, y)))


@dataclass(frozen=True)
class RankAgreement:
    """Do two measures put controllers in the same order, ties within a standard error aside?"""

    spearman: float
    kendall: float
    counted: int  # pairs that both measures tell apart
    disagreements: tuple[tuple[int, int], ...]  # pairs that they put in opposite order


def rank_agreement(x: ArrayLike, y: ArrayLike) -> RankAgreement:
    """Compare measures [P, C, E] or [P, E] of P controllers on the same episodes.

    A pair whose means differ by less than one standard error of the (paired, by context)
    difference is a tie. A pair tied by either measure counts in neither. Without ties the
    correlations are Spearman's and Kendall's; with no disagreement they are 1.
    """
    one, other = (_by_context(values) for values in (x, y))
    if one.shape[0] != other.shape[0]:
        raise AgreementError(
            "Both measures must be of the same controllers",
            given=f"{one.shape[0]} and {other.shape[0]}",
        )
    first, second = _clear_signs(one), _clear_signs(other)
    both = (first != 0) & (second != 0)
    first, second = first * both, second * both
    upper = np.triu(both, 1)
    counted = int(upper.sum())
    pairs = zip(*np.nonzero(upper & (first != second)), strict=True)
    tau = float((first * second)[upper].mean()) if counted else float("nan")
    rho = _correlation(first.sum(1), second.sum(1))
    return RankAgreement(rho, tau, counted, tuple((int(i), int(j)) for i, j in pairs))


def _signs(values: Array) -> Array:
    """[P, P]: 1 where the row's value is larger, -1 where it is smaller.

    A row's sum is twice its rank less a constant, with ties at their mean rank.
    """
    return np.asarray(np.sign(values[:, None] - values[None]))


def _clear_signs(values: Array) -> Array:
    """[P, P] from [P, C, E]: the same of means, 0 where they differ by less than an error."""
    _, contexts, episodes = values.shape
    gaps = values[:, None] - values[None]  # [P, P, C, E]
    squared = gaps.var(-1) / max(episodes - 1, 1)  # [P, P, C] of each context's mean
    standard_error = np.sqrt(squared.sum(-1)) / contexts
    gap = gaps.mean((-1, -2))
    return np.asarray(np.where(np.abs(gap) < standard_error, 0.0, np.sign(gap)))


def _correlation(x: Array, y: Array) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale else float("nan")


def _columns(x: ArrayLike, y: ArrayLike) -> Sequence[Array]:
    columns = [np.asarray(values, dtype=np.float64) for values in (x, y)]
    if columns[0].ndim != 1 or columns[0].shape != columns[1].shape or not len(columns[0]):
        raise AgreementError(
            "A rank correlation is between two lists of one length",
            given=" and ".join(str(list(values.shape)) for values in columns),
        )
    return columns


def _by_context(values: ArrayLike) -> Array:
    """As [P, C, E]."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 2:
        array = array[:, None]
    return _runs(array, "measures")
