"""Statistics against slow and obvious references, known answers, and how often intervals hold."""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray

from esper.garden.statistics import (
    Estimate,
    interquartile_mean,
    interquartile_mean_interval,
    interval,
    mean_interval,
)
from esper.leyline import AgreementError
from studies.comparisons import (
    paired_difference,
    performance_profile,
    probability_of_improvement,
    share_of_gap,
)
from tests.garden.rank_agreement import rank_agreement, spearman

Array = NDArray[np.float64]


def noise(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


# --- the interquartile mean ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], 7.0),
        ([1.0, 3.0], 2.0),
        ([0.0, 1.0, 2.0, 90.0], 1.5),
        ([5, 1, 4, 2, 3], 3.0),
        ([0.0, 0.0, 10.0], 10 / 6),  # the middle 1.5 of 3: a quarter, a whole, a quarter
        ([*range(8), 1e9, -1e9, 1e9, -1e9], 3.5),
    ],
)
def test_known_interquartile_means(values: list[float], expected: float) -> None:
    assert float(interquartile_mean(values)) == pytest.approx(expected)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_the_interquartile_mean_is_the_trimmed_mean_of_four_copies(values: list[float]) -> None:
    # Of 4n values a quarter is a whole number, so that nothing has to be divided.
    four = sorted(values * 4)
    expected = np.mean(four[len(values) : 3 * len(values)])
    assert float(interquartile_mean(values)) == pytest.approx(expected, abs=1e-9)


def test_interquartile_means_are_taken_along_an_axis() -> None:
    table = noise(0, 4, 7, 3)
    expected = [[float(interquartile_mean(table[i, :, j])) for j in range(3)] for i in range(4)]
    np.testing.assert_allclose(interquartile_mean(table, axis=1), expected)
    with pytest.raises(AgreementError, match="at least one"):
        interquartile_mean([])


# --- intervals ----------------------------------------------------------------------------


def slow_bootstrap(runs: Array, resamples: int, seed: int) -> tuple[float, float]:
    """Trainings anew, and in each context its episodes anew, one at a time."""
    random = np.random.default_rng(seed)
    trainings, contexts, episodes = runs.shape
    values = []
    for _ in range(resamples):
        picked = [random.integers(episodes, size=episodes) for _ in range(contexts)]
        cells = [
            np.mean([runs[training, context, e] for e in picked[context]])
            for training in random.integers(trainings, size=trainings)
            for context in range(contexts)
        ]
        values.append(float(interquartile_mean(cells)))
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def test_the_interval_is_that_of_a_slow_bootstrap() -> None:
    runs = noise(1, 5, 1, 1) + noise(2, 1, 6, 8) + 0.5 * noise(3, 5, 6, 8)
    fast = interquartile_mean_interval(runs, resamples=20_000)
    low, high = slow_bootstrap(runs, 2_000, seed=5)
    assert fast.value == pytest.approx(float(interquartile_mean(runs.mean(-1).ravel())))
    assert (fast.low, fast.high) == pytest.approx((low, high), abs=0.06 * (high - low) + 1e-3)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    runs = noise(0, 3, 4, 5)
    one, again, other = (mean_interval(runs, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert one.value == other.value == pytest.approx(runs.mean())
    assert one.low < one.value < one.high


def test_what_does_not_vary_has_no_width() -> None:
    assert mean_interval(np.full((3, 2, 4), 5.0)) == pytest.approx((5.0, 5.0, 5.0))
    contexts = np.arange(4.0)[:, None].repeat(3, 1)  # they differ, but are not drawn anew
    assert mean_interval(contexts) == pytest.approx((1.5, 1.5, 1.5))


def test_trainings_that_differ_widen_the_interval_however_many_episodes_there_are() -> None:
    runs = np.arange(5.0)[:, None, None] + np.zeros((5, 3, 200))
    wide = mean_interval(runs)
    assert wide.high - wide.low > 2.0
    flat = mean_interval(runs.mean(0))
    assert flat.high - flat.low == pytest.approx(0.0)


def test_luck_that_trainings_share_is_not_averaged_away() -> None:
    shared = noise(4, 1, 1, 12).repeat(50, axis=0)  # 50 trainings met the same 12 environments
    width = np.subtract(*mean_interval(shared)[:0:-1])
    alone = np.subtract(*mean_interval(shared[:1])[:0:-1])
    assert width == pytest.approx(alone, rel=0.1)


@pytest.mark.parametrize(("trainings", "least", "most"), [(5, 0.78, 0.92), (20, 0.88, 0.98)])
def test_intervals_hold_the_truth_about_as_often_as_the_docs_say(
    trainings: int, least: float, most: float
) -> None:
    held = 0
    for trial in range(300):
        runs = noise(2 * trial, trainings, 1, 1) + noise(2 * trial + 1, trainings, 4, 16)
        found = mean_interval(runs, resamples=400, seed=trial)
        held += found.low <= 0.0 <= found.high
    assert least <= held / 300 <= most, held / 300


def test_torch_tensors_and_single_trainings_are_accepted() -> None:
    runs = noise(0, 4, 6)
    assert mean_interval(torch.from_numpy(runs)) == mean_interval(runs[None])


def test_any_statistic_of_cells_can_be_given() -> None:
    runs = noise(0, 5, 4, 6)
    worst = interval(runs, statistic=lambda cells: cells.min(axis=-1))
    assert worst.value == pytest.approx(runs.mean(-1).min())
    assert worst.low <= worst.high


def test_differences_are_paired() -> None:
    luck = 20 * noise(5, 1, 3, 16)
    better, worse = luck + 1.0, luck
    sure = paired_difference(better, worse)
    assert sure.value == pytest.approx(1.0)
    assert sure.low == pytest.approx(1.0, abs=0.3)
    assert sure.high == pytest.approx(1.0, abs=0.3)
    apart = interquartile_mean_interval(better)
    assert apart.high - apart.low > 5.0
    mean = paired_difference(better, worse, statistic=lambda cells: cells.mean(-1))
    assert mean == pytest.approx((1.0, 1.0, 1.0))


def test_a_trained_controller_is_compared_with_one_that_is_not() -> None:
    trained, fixed = 1.0 + 0.1 * noise(0, 5, 3, 16), noise(1, 3, 16)
    mean = paired_difference(trained, fixed, statistic=lambda cells: cells.mean(-1))
    assert mean.value == pytest.approx(trained.mean() - fixed.mean())
    assert mean.low < mean.value < mean.high


# --- how often, and how many --------------------------------------------------------------


def slow_improvement(ours: Array, theirs: Array) -> float:
    contexts, episodes = ours.shape[1:]
    total = 0.0
    for c, e in itertools.product(range(contexts), range(episodes)):
        for x, y in itertools.product(ours[:, c, e], theirs[:, c, e]):
            total += 1.0 if x > y else 0.5 if x == y else 0.0
    return total / (contexts * episodes * len(ours) * len(theirs))


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=20)
def test_the_probability_of_improvement_counts_pairs(seed: int, first: int, second: int) -> None:
    random = np.random.default_rng(seed)
    ours = random.integers(0, 4, (first, 3, 5)).astype(float)
    theirs = random.integers(0, 4, (second, 3, 5)).astype(float)
    found = probability_of_improvement(ours, theirs, resamples=50)
    assert found.value == pytest.approx(slow_improvement(ours, theirs))
    assert 0.0 <= found.low <= found.high <= 1.0
    other = probability_of_improvement(theirs, ours, resamples=50)
    assert found.value + other.value == pytest.approx(1.0)


def test_who_always_wins_improves_surely_and_who_ties_by_half() -> None:
    runs = noise(0, 4, 3, 8)
    assert probability_of_improvement(runs + 100, runs) == pytest.approx((1.0, 1.0, 1.0))
    fixed = noise(0, 3, 8)
    assert probability_of_improvement(fixed, fixed) == pytest.approx((0.5, 0.5, 0.5))
    even = probability_of_improvement(noise(1, 5, 3, 16), noise(2, 5, 3, 16))
    assert even.low < 0.5 < even.high


def test_a_profile_is_the_share_of_episodes_above_each_threshold() -> None:
    runs = noise(0, 3, 4, 10)
    limits = [-10.0, -0.5, 0.0, 0.5, 10.0]
    found = performance_profile(runs, limits, resamples=500)
    assert found.share.tolist() == pytest.approx([(runs > limit).mean() for limit in limits])
    assert found.share[0] == 1.0
    assert found.share[-1] == 0.0
    assert bool((found.low <= found.share).all() and (found.share <= found.high).all())
    assert bool((found.low[1:4] < found.high[1:4]).all())
    one = performance_profile(runs, 0.0, resamples=500)
    assert one.share.tolist() == pytest.approx([(runs > 0).mean()])


# --- ranks --------------------------------------------------------------------------------


def mean_ranks(values: list[float]) -> list[float]:
    return [
        1 + sum(other < value for other in values) + (values.count(value) - 1) / 2
        for value in values
    ]


def pearson(x: list[float], y: list[float]) -> float:
    mx, my = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


pairs_of_lists = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        *(st.lists(st.integers(0, 4).map(float), min_size=n, max_size=n) for _ in range(2))
    )
)


@given(pairs_of_lists)
def test_the_rank_correlation_is_that_of_the_definition(
    both: tuple[list[float], list[float]],
) -> None:
    x, y = both
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(spearman(x, y))
        return
    assert spearman(x, y) == pytest.approx(pearson(mean_ranks(x), mean_ranks(y)))


def test_known_rank_correlations() -> None:
    # As computed by scipy.stats.spearmanr.
    x, y = [1.0, 2.0, 2.0, 4.0, 5.0, 7.0], [2.0, 1.0, 3.0, 3.0, 9.0, 8.0]
    assert spearman(x, y) == pytest.approx(0.8088235294117647)
    assert spearman(x, [-value for value in x]) == pytest.approx(-1.0)


@given(st.integers(0, 1000))
@settings(max_examples=30)
def test_without_ties_the_agreement_is_the_plain_correlation(seed: int) -> None:
    x, y = noise(seed, 7, 1), noise(seed + 5000, 7, 1)
    found = rank_agreement(x, y)  # one episode: no error is known, every difference counts
    assert found.spearman == pytest.approx(spearman(x[:, 0], y[:, 0]))
    assert found.counted == 21
    assert found.kendall == pytest.approx(1 - 2 * len(found.disagreements) / 21)


def test_pairs_within_a_standard_error_do_not_disagree() -> None:
    jitter = np.array([-1.0, 1.0, -1.0, 1.0])
    x = np.array([[0.0], [0.01], [5.0], [9.0]]) + np.zeros(4)
    x[0] += jitter  # 0 and 1 cannot be told apart by x,
    y = np.array([[1.0], [0.0], [5.0], [9.0]]) + np.zeros(4)  # which y puts the other way round
    assert spearman(x.mean(1), y.mean(1)) < 1.0
    found = rank_agreement(x, y)
    assert (found.spearman, found.kendall) == pytest.approx((1.0, 1.0))
    assert (found.counted, found.disagreements) == (5, ())


def test_a_clear_disagreement_is_named() -> None:
    x = np.array([0.0, 1.0, 2.0, 3.0])[:, None] + 0.1 * noise(0, 1, 8)
    y = np.array([0.0, 2.0, 1.0, 3.0])[:, None] + 0.1 * noise(1, 1, 8)
    found = rank_agreement(x, y)
    assert found.disagreements == ((1, 2),)
    assert found.counted == 6
    assert found.kendall == pytest.approx(4 / 6)
    assert found.spearman == pytest.approx(0.8)


def test_the_error_of_a_difference_is_paired_and_within_contexts() -> None:
    # Contexts differ by far more than controllers, and episodes of a context by as much.
    world = 100 * noise(0, 1, 6, 1) + 10 * noise(1, 1, 6, 4)
    x = world + np.array([0.0, 1.0])[:, None, None]
    assert rank_agreement(x, x).counted == 1
    # Each context's difference has a variance of 4 / 3: its mean one of 1 / 3, theirs 1 / 3 / 6.
    jitter = np.array([-1.0, 1.0, -1.0, 1.0])
    error = math.sqrt(1 / 3 / 6)
    for gap, counted in ((0.99 * error, 0), (1.01 * error, 1)):
        x = world + np.array([0.0, gap])[:, None, None]
        x[1] += jitter
        assert rank_agreement(x, x).counted == counted


def test_what_cannot_be_told_apart_at_all_has_no_correlation() -> None:
    same = np.zeros((3, 5))
    found = rank_agreement(same, same)
    assert math.isnan(found.spearman)
    assert math.isnan(found.kendall)
    assert found.counted == 0


# --- bad input ----------------------------------------------------------------------------


def test_an_estimate_reads_well() -> None:
    assert str(Estimate(0.51234, 0.4, 0.6)) == "0.512 [0.4, 0.6]"


def test_bad_input_is_refused() -> None:
    runs = np.zeros((2, 3, 4))
    runs[0, 0, 0] = math.nan
    with pytest.raises(AgreementError, match=r"\[2, 3, 4\], 1 not finite"):
        mean_interval(runs)
    with pytest.raises(AgreementError, match=r"\[trainings, contexts, episodes\]"):
        mean_interval([1.0, 2.0])
    with pytest.raises(AgreementError, match="at least one each"):
        mean_interval(np.zeros((2, 0, 4)))
    with pytest.raises(AgreementError, match="same contexts"):
        paired_difference(np.zeros((2, 3)), np.zeros((2, 4)))
    with pytest.raises(AgreementError, match="same controllers"):
        rank_agreement(np.zeros((2, 3)), np.zeros((3, 3)))
    with pytest.raises(AgreementError, match="one length"):
        spearman([1.0, 2.0], [1.0])
    with pytest.raises(AgreementError, match="at least one resample"):
        mean_interval(np.zeros((2, 3)), resamples=0)
    with pytest.raises(AgreementError, match="between 0 and 1"):
        mean_interval(np.zeros((2, 3)), level=95)


def test_the_share_of_a_gap_is_where_a_controller_stands_between_two_others() -> None:
    base = np.random.default_rng(0).normal(0.0, 1.0, size=(1, 6, 12))
    ours = np.stack([base[0] + 3.0 + shift for shift in (-0.2, 0.0, 0.2)])
    found = share_of_gap(ours, base, base + 4.0)
    assert found.value == pytest.approx(0.75)
    assert 0.699 < found.low < 0.75 < found.high < 0.801
    assert share_of_gap(base + 4.0, base, base + 4.0) == pytest.approx((1.0, 1.0, 1.0))
    with pytest.raises(AgreementError, match="no gap"):
        share_of_gap(ours, base, base)


def test_an_estimate_is_written_with_its_interval_in_any_format() -> None:
    found = Estimate(4.51, 3.6, -5.42)
    assert f"{found:+.1f}" == "+4.5 [+3.6, -5.4]"
    assert f"{found:.0%}" == "451% [360%, -542%]"
    assert str(found) == f"{found:.3g}" == "4.51 [3.6, -5.42]"
    assert found.text(".1f", " %") == "4.5 % [3.6, -5.4]"
