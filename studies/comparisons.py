"""Comparisons of controllers on the same episodes, with intervals; and what their scores look like.

Shapes: `R` trainings, `C` contexts, `E` episodes, as in `esper.garden.statistics`; `K` thresholds.
"""

from dataclasses import dataclass
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from esper.garden.statistics import (
    Array,
    Draws,
    Estimate,
    Resampling,
    Statistic,
    as_runs,
    interquartile_mean,
    mean,
)
from esper.leyline.errors import AgreementError

NO_GAP = 1e-9


@dataclass(frozen=True)
class Profile:
    """For each threshold the share of episodes with a score above it."""

    thresholds: Array  # [K]
    share: Array  # [K]
    low: Array  # [K]
    high: Array  # [K]


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
    draws = Draws(ours.shape[1:], **how)
    value = statistic(ours.mean(-1).reshape(1, -1)) - statistic(theirs.mean(-1).reshape(1, -1))
    return draws.estimate(value[0], statistic(draws.cells(ours)) - statistic(draws.cells(theirs)))


def difference_elsewhere(
    scores: ArrayLike, baseline: ArrayLike, **how: Unpack[Resampling]
) -> Estimate:
    """A mean difference where contexts are drawn anew as well: on others like these."""
    ours, theirs = _pair(scores, baseline)
    apart = ours - theirs.mean(0)
    draws = Draws(ours.shape[1:], **how)
    by_context = np.einsum("rce,bce->brc", apart, draws.episodes)
    trainings, contexts = draws.weights(len(apart)), draws.weights(apart.shape[1])
    drawn = np.einsum("brc,br,bc->b", by_context, trainings, contexts)
    return draws.estimate(apart.mean(), drawn)


def share_of_gap(
    scores: ArrayLike, baseline: ArrayLike, ceiling: ArrayLike, **how: Unpack[Resampling]
) -> Estimate:
    """How much of the way from a baseline's mean to a ceiling's is covered, on the same episodes.

    0 is the baseline, 1 the ceiling, which must be higher. A resample in which it is not counts
    as far more than all or far less than nothing.
    """
    ours, theirs = _pair(scores, baseline)
    _, best = _pair(scores, ceiling)
    draws = Draws(ours.shape[1:], **how)
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
    draws = Draws(ours.shape[1:], **how)
    contexts = ours.shape[1]
    between = np.einsum("ijce,bce->bij", wins, draws.episodes) / contexts  # [B, R, R']
    first, second = draws.weights(len(ours)), draws.weights(len(theirs))
    drawn = np.einsum("bij,bi,bj->b", between, first, second)
    return draws.estimate(wins.mean(), drawn)


def performance_profile(
    scores: ArrayLike, thresholds: ArrayLike, **how: Unpack[Resampling]
) -> Profile:
    """The share of episodes that score above each threshold, each context weighing the same.

    Above 0 of net gains it is one minus the rate of growth that did not pay.
    """
    runs = as_runs(scores, "scores")
    limits = np.atleast_1d(np.asarray(thresholds, dtype=np.float64))
    draws = Draws(runs.shape[1:], **how)
    trainings = draws.weights(len(runs))
    share, low, high = (np.empty(len(limits)) for _ in range(3))
    for index, limit in enumerate(limits):
        above = (runs > limit).astype(np.float64)
        by_run = np.einsum("rce,bce->br", above, draws.episodes) / runs.shape[1]
        drawn = np.einsum("br,br->b", by_run, trainings)
        share[index], low[index], high[index] = draws.estimate(above.mean(), drawn)
    return Profile(limits, share, low, high)


def _pair(scores: ArrayLike, baseline: ArrayLike) -> tuple[Array, Array]:
    ours, theirs = as_runs(scores, "scores"), as_runs(baseline, "baseline")
    if ours.shape[1:] != theirs.shape[1:]:
        raise AgreementError(
            "Controllers are compared on the same contexts and episodes",
            given=f"{list(ours.shape[1:])} and {list(theirs.shape[1:])}",
        )
    return ours, theirs
