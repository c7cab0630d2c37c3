"""Statistics of evaluation: what may be said about controllers, and how surely.

Scores are arrays [R, C, E]: R independent trainings of a controller (1 where nothing is trained),
C contexts, E evaluation episodes of each context. Episode e of context c is the same environment
for every training and every controller, so differences are paired. [C, E] stands for one
training. A *cell* is the mean over the episodes of one training in one context.

Intervals are percentile bootstraps: trainings are drawn anew with replacement, and within each
context (the stratum) its episodes. One draw of episodes serves all trainings and both controllers
of a comparison. The same seed gives the same interval.

Shapes: `R`, `C`, `E` as above, `B` resamples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from esper.leyline.errors import AgreementError

Array = NDArray[np.float64]

DEFAULT_RESAMPLES = 2000
DEFAULT_LEVEL = 0.95


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
    runs = as_runs(scores, "scores")
    draws = Draws(runs.shape[1:], **how)
    value = statistic(runs.mean(-1).reshape(1, -1))[0]
    return draws.estimate(value, statistic(draws.cells(runs)))


def fair_draws(count: int) -> int:
    """How many of so many values a resample holds: one less, so that few are not taken for sure.

    The mean of n - 1 values drawn from n varies as much as the mean of n fresh ones would.
    """
    return max(1, count - 1)


class Draws:
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

    def weights(self, count: int) -> Array:
        """[B, count]: fresh weights, of a controller's trainings for example."""
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


def as_runs(scores: ArrayLike, name: str) -> Array:
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
