"""Do two scores rank controllers alike?

Shapes: `P` controllers, `C` contexts, `E` episodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from esper.garden.statistics import Array, as_runs
from esper.leyline.errors import AgreementError


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
    return as_runs(array, "measures")
