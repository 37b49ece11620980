"""Promise: a 95 % interval holds the truth about 95 times in 100 at the small n that studies can afford.

References: simulation with known truth, and cases worked by hand or printed in tables.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from analysis.statistics import level, ratio

REPETITIONS = 1500
NOISE = {
    "log-normal": lambda rng, shape: rng.normal(0, 0.1, shape),
    "normal": lambda rng, shape: np.log(np.clip(1 + rng.normal(0, 0.1, shape), 0.2, None)),
    "heavy-tailed": lambda rng, shape: rng.laplace(0, 0.1, shape),
}
# Three standard errors of 1500 repetitions at 95 % are 1.7 points. Order statistics are discrete and run up
# to 99 %; the t methods lean on normality, which Laplace noise breaks, in the safe direction at these n.
LOWEST, HIGHEST = 0.925, 0.998


def coverage(truth: float, intervals) -> float:
    return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 8])
def test_an_interval_of_a_level_covers_the_true_median(n, noise):
    runs = np.exp(NOISE[noise](np.random.default_rng(n), (REPETITIONS, n)) + math.log(120))
    assert LOWEST <= coverage(120, map(level, runs)) <= HIGHEST


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("n", [3, 4, 5, 6, 8])
def test_an_interval_of_a_ratio_covers_the_true_ratio(n, noise):
    rng = np.random.default_rng(100 + n)
    slow = 2 * np.exp(NOISE[noise](rng, (REPETITIONS, n)))
    fast = np.exp(NOISE[noise](rng, (REPETITIONS, n)))
    assert LOWEST <= coverage(2, map(ratio, slow, fast)) <= HIGHEST


def test_one_or_two_runs_get_no_interval():
    for runs in ([3.0], [3.0, 5.0]):
        interval = level(runs)
        assert (interval.low, interval.high) == (None, None)
        assert "no interval" in interval.method
    assert level([3.0, 5.0]).estimate == 4.0
    assert ratio([2.0, 4.0], [1.0, 2.0, 3.0]).low is None


def test_three_runs_get_the_t_interval_of_their_logs():
    interval = level([math.exp(x) for x in (1.0, 2.0, 3.0)])
    half = 4.30265 * 1.0 / math.sqrt(3)  # t(0.975, 2 degrees of freedom); the logs' deviation is 1
    assert interval.low == pytest.approx(math.exp(2 - half), rel=1e-4)
    assert interval.high == pytest.approx(math.exp(2 + half), rel=1e-4)
    assert "log-normal" in interval.method


@pytest.mark.parametrize(("n", "k"), [(6, 1), (7, 1), (8, 1), (9, 2), (12, 3), (20, 6)])
def test_limits_of_a_median_are_the_tabled_order_statistics(n, k):
    """Conover, Practical Nonparametric Statistics, table A3, two-sided 95 %."""
    runs = [float(value) for value in range(1, n + 1)]
    interval = level(runs)
    assert (interval.low, interval.high) == (k, n + 1 - k)
    assert 1 - 2 * stats.binom.cdf(k - 1, n, 0.5) >= 0.95


@pytest.mark.parametrize(("m", "n", "critical"), [(4, 4, 0), (5, 5, 2), (6, 6, 5), (4, 8, 4), (8, 8, 13)])
def test_limits_of_a_ratio_are_the_tabled_mann_whitney_values(m, n, critical):
    """Two-sided 5 % critical values of U from Mann and Whitney's table; limits are the next difference."""
    top = [math.exp(100.0 * i) for i in range(m)]
    bottom = [math.exp(0.1 * j**1.5) for j in range(n)]
    differences = sorted(math.log(a) - math.log(b) for a in top for b in bottom)
    interval = ratio(top, bottom)
    assert math.log(interval.low) == pytest.approx(differences[critical], abs=1e-9)
    assert math.log(interval.high) == pytest.approx(differences[-1 - critical], abs=1e-9)


def test_welch_at_three_runs_agrees_with_scipy():
    top, bottom = [2.0, 2.2, 2.6], [1.0, 1.3, 1.1]
    reference = stats.ttest_ind(np.log(top), np.log(bottom), equal_var=False).confidence_interval(0.95)
    interval = ratio(top, bottom)
    assert (interval.low, interval.high) == pytest.approx((math.exp(reference.low), math.exp(reference.high)))


def test_a_miss_counts_as_slower_than_every_arrival_and_is_not_dropped():
    missed = math.inf
    assert level([1.0, 2.0, missed]).estimate == 2.0
    assert level([1.0, missed, missed]).estimate == math.inf
    assert level([1.0, missed]).estimate == math.inf
    six = level([1.0, 2.0, 3.0, 4.0, 5.0, missed])
    assert (six.estimate, six.low, six.high) == (3.5, 1.0, math.inf)


def test_a_ratio_with_misses_has_no_interval_and_says_why():
    interval = ratio([4.0, 4.0, 4.0, math.inf], [1.0, 2.0, 2.0, 2.0])
    assert interval.estimate == 2.0
    assert interval.low is None
    assert "missed" in interval.method
    assert math.isnan(ratio([math.inf] * 3, [1.0] * 3).estimate)


def test_swapping_the_arms_inverts_the_ratio():
    top, bottom = [1.0, 1.4, 1.2, 1.9], [0.6, 0.7, 0.5, 0.9, 0.8]
    there, back = ratio(top, bottom), ratio(bottom, top)
    assert there.estimate == pytest.approx(1 / back.estimate)
    assert there.low == pytest.approx(1 / back.high)


def test_equal_runs_give_an_interval_of_no_width():
    assert level([2.0] * 4).low == pytest.approx(2.0)
    assert ratio([2.0] * 3, [1.0] * 3).high == pytest.approx(2.0)
    assert ratio([2.0] * 4, [1.0] * 4).low == pytest.approx(2.0)
