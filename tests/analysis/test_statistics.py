"""Promise: every interval equals its definition, by hand-worked cases, printed tables and SciPy.

Their coverage is simulated in `test_coverage.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from analysis.statistics.intervals import RANKS_ONLY, holm, level, paired_ratio, ratio
from analysis.statistics.limits import largest_rank, mann_whitney_limits, order_statistic, signed_rank


def test_five_runs_get_the_wider_of_their_range_and_the_t_interval_of_their_logs_and_fewer_none():
    interval = level([math.exp(x) for x in (0.0, 1.0, 2.0, 3.0, 4.0)])
    half = 2.776445 * math.sqrt(2.5 / 5)  # t(0.975, 4 degrees of freedom); the logs' variance is 2.5
    assert half < 2  # so the range is wider
    assert (interval.low, interval.high) == pytest.approx((1, math.exp(4)))
    skewed = level([math.exp(x) for x in (0.0, 0.1, 0.1, 0.1, 1.0)])
    logs = np.array([0.0, 0.1, 0.1, 0.1, 1.0])
    t = logs.mean() - 2.776445 * logs.std(ddof=1) / math.sqrt(5)
    assert skewed.low == pytest.approx(math.exp(t), rel=1e-4)
    assert skewed.high == pytest.approx(math.e)
    assert "log-normal" in interval.method
    assert level([1.0, 2.0, 3.0, 4.0]).low is None
    missed = level([1.0, 2.0, 3.0, 4.0, math.inf])
    assert (missed.low, missed.high) == (1.0, math.inf)


@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6)])
def test_limits_of_a_median_lie_between_the_tabled_order_statistics_and_the_next(n, k):
    """Conover, Practical Nonparametric Statistics, table A3, two-sided 95 %."""
    runs = [float(value) for value in range(1, n + 1)]
    interval = level(runs)
    assert order_statistic(n) == k
    assert k <= interval.low < k + 1
    assert n - k < interval.high <= n + 1 - k
    if n == 8:  # Hettmansperger & Sheather (1986): k = 1 covers 254 of 256, k = 2 238, which is enough, too
        share = (254 / 256 - 0.95) / (16 / 256)
        weight = 7 * share / (1 + 6 * share)
        assert (interval.low, interval.high) == pytest.approx((1 + weight, 8 - weight))
    if n == 10:  # k = 2 covers 97.9 % and k = 3 only 89.1 %
        assert (interval.low, interval.high) == (2, 9)


@pytest.mark.parametrize(("m", "n", "critical"), [(4, 4, 0), (4, 8, 4), (8, 8, 13)])
def test_limits_of_a_ratio_are_the_tabled_mann_whitney_values(m, n, critical):
    """Two-sided 5 % critical values of U from Mann and Whitney's table; limits are the next difference."""
    top = [math.exp(100.0 * i) for i in range(m)]
    bottom = [math.exp(0.1 * j**1.5) for j in range(n)]
    differences = sorted(math.log(a) - math.log(b) for a in top for b in bottom)
    low, high = mann_whitney_limits(np.log(top), np.log(bottom))
    assert low == pytest.approx(differences[critical], abs=1e-9)
    assert high == pytest.approx(differences[-1 - critical], abs=1e-9)


@pytest.mark.parametrize(("m", "n"), [(4, 12), (9, 6)])
def test_unpaired_limits_are_the_wider_of_the_exact_ones_and_scipys_welch(m, n):
    rng = np.random.default_rng(m * n)
    seen = set()
    for scatter in (0.02, 0.1, 0.5):
        top, bottom = np.exp(rng.normal(0.3, scatter, m)), np.exp(rng.normal(0, 0.1, n))
        welch = stats.ttest_ind(np.log(top), np.log(bottom), equal_var=False)
        limits = welch.confidence_interval(0.95)
        exact = [float(limit) for limit in mann_whitney_limits(np.log(top), np.log(bottom))]
        interval = ratio(top, bottom)
        assert math.log(interval.low) == pytest.approx(min(exact[0], limits.low))
        assert math.log(interval.high) == pytest.approx(max(exact[1], limits.high))
        ranks = stats.mannwhitneyu(top, bottom, method="exact").pvalue
        assert interval.p_value == pytest.approx(max(ranks, welch.pvalue))
        seen |= {exact[0] < limits.low, exact[1] < limits.high}
    assert len(seen) == 2  # each is the wider one somewhere


@pytest.mark.parametrize("n", [4, 8])
def test_few_pairs_get_scipys_paired_t_limits_and_no_smaller_p_than_ranks_can_give(n):
    rng = np.random.default_rng(n)
    top, bottom = np.exp(rng.normal(0.1, 0.1, n)), np.exp(rng.normal(0, 0.1, n))
    reference = stats.ttest_rel(np.log(top), np.log(bottom))
    limits = reference.confidence_interval(0.95)
    interval = paired_ratio(top, bottom, family=50)
    assert (interval.low, interval.high) == pytest.approx((math.exp(limits.low), math.exp(limits.high)))
    assert interval.p_value == pytest.approx(max(reference.pvalue, 2 / math.comb(2 * n, n)))
    clear = paired_ratio(1e6 * top, bottom, family=50)
    smaller = stats.ttest_rel(np.log(1e6 * top), np.log(bottom)).pvalue
    assert clear.p_value == 2 / math.comb(2 * n, n) > smaller


@pytest.mark.parametrize("n", [1, 3, 4, 9])
def test_one_estimate_at_every_number_of_runs(n):
    """The median of all log ratios; of pairs, of all averages of two of them (Hodges and Lehmann 1963)."""
    rng = np.random.default_rng(n)
    top, bottom = np.exp(rng.normal(0.3, 0.2, n)), np.exp(rng.normal(0, 0.2, n))
    every = np.median([math.log(a / b) for a in top for b in bottom])
    assert ratio(top, bottom).estimate == pytest.approx(math.exp(every))
    d = np.log(top / bottom)
    pairs = np.median([(d[i] + d[j]) / 2 for i in range(n) for j in range(i, n)])
    assert paired_ratio(top, bottom).estimate == pytest.approx(math.exp(pairs))
    assert (ratio(top, bottom).low is None) == (paired_ratio(top, bottom).low is None) == (n < 4)


def test_a_miss_counts_as_slower_than_every_run_that_reached_and_is_not_dropped():
    missed = math.inf
    assert level([1.0, 2.0, missed]).estimate == 2.0
    assert level([1.0, missed, missed]).estimate == math.inf
    assert level([1.0, missed]).estimate == math.inf
    six = level([1.0, 2.0, 3.0, 4.0, 5.0, missed])
    assert (six.estimate, six.high) == (3.5, math.inf)


def test_a_ratio_with_misses_keeps_the_limit_that_is_known():
    baseline, arm = [4.0, 4.0, 5.0, math.inf], [1.0, 2.0, 2.0, 2.0]
    interval = ratio(baseline, arm)
    assert interval.estimate == pytest.approx(2.5)  # of 16 ratios six are 2, then three are 2.5
    assert (interval.low, interval.high) == (2.0, math.inf)
    assert ratio(baseline, [1.0, 2.0, 2.0, math.inf]).high == math.inf
    assert ratio(baseline, [1.0, 2.0, 2.0, math.inf]).low == 0.0
    assert paired_ratio(baseline, arm) == interval  # too few pairs for signed ranks, and no logs for t
    runs = np.log([1.0, 2.0, 3.0, 4.0, 5.0, math.inf])  # a miss over a miss is unknown: wider on both sides
    with np.errstate(invalid="ignore"):
        assert mann_whitney_limits(runs, runs) == (-math.inf, math.inf)


@pytest.mark.parametrize("of", [ratio, paired_ratio])
def test_where_an_arm_mostly_misses_there_is_no_ratio_but_ranks_tell_the_arms_apart(of):
    missed = [math.inf] * 6
    for arms in (([math.inf] * 3, [1.0] * 3), (missed, missed)):
        assert math.isnan(of(*arms).estimate)
        assert (of(*arms).low, of(*arms).p_value) == (None, None)
    never = of(missed, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (never.estimate, never.low, never.is_ratio) == (math.inf, math.inf, False)
    assert never.p_value == pytest.approx(2 / math.comb(12, 6))
    assert of([1.0] * 6, missed).estimate == 0
    half = ratio([7.0, 8.0, 9.0, *missed[:3]], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (half.estimate, half.high) == (math.inf, math.inf)
    assert half.low == pytest.approx(7 / 4)  # the sixth of 36 ratios by size: P(U <= 5) is 2.1 %
    assert "no ratio" in half.method


def test_exact_p_values_agree_with_scipy():
    rng = np.random.default_rng(0)
    for n in (4, 6, 9):
        top, bottom = np.exp(rng.normal(0.1, 0.1, (2, n)))
        miss = np.append(top[1:], math.inf)  # without a t test: a miss has no logarithm
        exact = stats.mannwhitneyu(miss, bottom, method="exact").pvalue
        assert ratio(miss, bottom).p_value == pytest.approx(exact)
    top, bottom = np.exp(rng.normal(0.1, 0.1, (2, 8)))
    exact = stats.wilcoxon(np.log(top / bottom), method="exact").pvalue
    assert paired_ratio(top, bottom).p_value == pytest.approx(exact)


def test_an_interval_and_its_p_value_say_the_same():
    rng = np.random.default_rng(1)
    for n in (4, 5, 6, 8):
        for shift in rng.uniform(0, 0.3, 40):
            top, bottom = np.exp(rng.normal(shift, 0.1, n)), np.exp(rng.normal(0, 0.1, n))
            for interval in (ratio(top, bottom), paired_ratio(top, bottom), paired_ratio(top, bottom, 9)):
                assert interval.excludes(1) == (interval.p_value < 0.05)


def test_pairing_removes_what_the_blocks_have_in_common():
    block = np.array([1.0, 3.0, 0.5, 7.0, 2.0, 5.0])
    top, bottom = 1.3 * block * [1, 1.01, 0.99, 1, 1.02, 0.98], block
    assert paired_ratio(top, bottom).excludes(1)
    assert not ratio(top, bottom).excludes(1)
    with pytest.raises(ValueError, match="the same number of runs, got 2 and 3"):
        paired_ratio([1.0, 2.0], [1.0, 2.0, 3.0])


def test_signed_rank_limits_are_the_tabled_walsh_averages():
    """Two-sided 5 % critical values of W: 0 at n = 6, 3 at 8, 8 at 10 (Wilcoxon's table)."""
    for n, critical in ((6, 0), (8, 3), (10, 8)):
        assert largest_rank(signed_rank(n)) == critical + 1


def test_holm_worked_by_hand():
    """p = 0.01, 0.04, 0.03: 3 x 0.01, then 2 x 0.03, then 0.04 raised to what came before."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_runs_that_agree_to_the_last_digit_prove_no_more_than_their_ranks():
    for of in (ratio, paired_ratio):
        assert of([5] * 4, [6] * 4).p_value == 2 / 70
        assert of([5] * 4, [5] * 4).p_value == 1
        assert of([2.0] * 4, [1.0] * 4).low == pytest.approx(2.0)
    assert paired_ratio([2.0] * 6, [2.0] * 6).p_value == 1.0
    counted = ratio([5, 5, 5], [6, 6, 6], counted=True)
    assert (counted.p_value, counted.low, counted.high) == (0, 5 / 6, 5 / 6)
    assert ratio([5, 5, 5], [5, 5, 5], counted=True).p_value == 1


def test_a_third_of_misses_leaves_a_ratio_although_most_averages_of_pairs_are_infinite():
    """Of 78 averages of pairs 38 are infinite, 8 are 0 and 4 unknown: their median is not known. Of 144
    ratios of runs 44 are infinite, 8 are 0 and 4 unknown, and the middle ones are of runs that arrived."""
    rng = np.random.default_rng(5)
    top, bottom = 2 * np.exp(rng.normal(0, 0.1, 12)), np.exp(rng.normal(0, 0.1, 12))
    top[:4], bottom[4] = math.inf, math.inf
    found = paired_ratio(top, bottom)
    assert found == ratio(top, bottom)
    assert found.low <= found.estimate < math.inf
    assert found.method == RANKS_ONLY
