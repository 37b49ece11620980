"""The 95 % limits of every interval, for many samples at once: runs are along the last axis.

All use logs or ranks, so none assumes normal seconds. `make coverage`
simulates how often each holds the truth, in results/coverage.md.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from analysis.statistics.ranks import mann_whitney, signed_rank

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2

LEAST_COVERAGE = 0.92
"""Of the median by the inner of two pairs of order statistics between which limits may lie (our choice). On a
machine with two speeds far apart limits between two pairs cover no more than the inner one does."""

Array = NDArray[np.float64]
Limits = tuple[Array, Array]


def t_limits(values: Array) -> Limits:
    """Student's limits of the mean, `[..., n]` to two of `[...]`."""
    n = values.shape[-1]
    half = special.stdtrit(n - 1, 1 - TAIL) * values.std(axis=-1, ddof=1) / math.sqrt(n)
    mean = values.mean(axis=-1)
    return mean - half, mean + half


def t_p_value(values: Array) -> float:
    """Two-sided p of Student's test that the mean is 0, `[n]`."""
    n = len(values)
    t = abs(float(values.mean())) / (float(values.std(ddof=1)) / math.sqrt(n))
    return 2 * float(special.stdtr(n - 1, -t))


def welch(top: Array, bottom: Array) -> tuple[float, float, float]:
    """Welch's limits of the difference of two means, and the two-sided p that they are equal.

    The variances may differ, and may not both be 0. Arms are `[n]` and `[m]`.
    """
    parts = [float(arm.var(ddof=1)) / len(arm) for arm in (top, bottom)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(arm) - 1) for part, arm in zip(parts, (top, bottom), strict=True)
    )
    difference, scatter = float(top.mean() - bottom.mean()), math.sqrt(sum(parts))
    half = float(special.stdtrit(freedom, 1 - TAIL)) * scatter
    p_value = 2 * float(special.stdtr(freedom, -abs(difference) / scatter))
    return difference - half, difference + half, p_value


def median_limits(values: Array) -> Limits:
    """Order statistics around the median, which cover it at 95 % (of five runs 93.75 %) for any noise.

    x[k] .. x[n+1-k] misses the median when fewer than k of n runs fall on one side of it. Where the next pair
    inwards covers it at `LEAST_COVERAGE` too, for any noise, the limits lie between both pairs, so that they
    cover it at 95 % (Hettmansperger & Sheather 1986, exact for Laplace noise): at 8, 11 or 14 runs, for one,
    where the outer pair alone covers about 99 %. If a neighbour is infinite (a run that missed), the outer
    one is used.
    """
    ordered = np.sort(values, axis=-1)
    n = values.shape[-1]
    k = max(order_statistic(n), 1)
    inner, outer = _median_coverage(n, k + 1), _median_coverage(n, k)
    weight = 0.0
    if inner >= LEAST_COVERAGE:
        share = (outer - CONFIDENCE) / (outer - inner)
        weight = (n - k) * share / (k + (n - 2 * k) * share)
    low = _between(ordered[..., k - 1], ordered[..., k], weight)
    high = _between(ordered[..., n - k], ordered[..., n - k - 1], weight)
    return low, high


def order_statistic(n: int) -> int:
    """The largest k whose k-th smallest and largest of n runs cover the median at 95 %; 0 below n = 6."""
    return int(stats.binom.ppf(TAIL, n, 0.5))


def mann_whitney_limits(top: Array, bottom: Array) -> Limits:
    """Exact limits of a shift between two arms: order statistics of all differences."""
    differences = top[..., :, None] - bottom[..., None, :]
    flat = differences.reshape(*differences.shape[:-2], -1)
    return _rank_limits(flat, largest_rank(tuple(mann_whitney(top.shape[-1], bottom.shape[-1]))))


def signed_rank_limits(differences: Array) -> Limits:
    """Exact limits of the centre of paired differences: order statistics of Walsh averages (Tukey)."""
    return _rank_limits(walsh(differences), largest_rank(tuple(signed_rank(differences.shape[-1]))))


def walsh(differences: Array) -> Array:
    """Averages of all pairs of differences, each with itself too: `[..., n]` to `[..., n(n+1)/2]`."""
    i, j = _pairs(differences.shape[-1])
    with np.errstate(invalid="ignore"):  # misses on both sides have no average; see _rank_limits
        averages: Array = (differences[..., i] + differences[..., j]) / 2
    return averages


@lru_cache
def _pairs(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    i, j = np.triu_indices(n)
    return i, j


def largest_rank(cumulative: tuple[float, ...]) -> int:
    """The largest k with P(statistic < k) <= 2.5 %; 0 if even the extreme is more likely."""
    return int(np.searchsorted(cumulative, TAIL, side="right"))


def _rank_limits(values: Array, k: int) -> Limits:
    """The k-th smallest and k-th largest; unknown values widen the interval on both sides."""
    low = np.sort(np.where(np.isnan(values), -np.inf, values), axis=-1)[..., k - 1]
    high = np.sort(np.where(np.isnan(values), np.inf, values), axis=-1)[..., -k]
    return low, high


def _median_coverage(n: int, k: int) -> float:
    return float(1 - 2 * stats.binom.cdf(k - 1, n, 0.5))


def _between(outer: Array, inner: Array, weight: float) -> Array:
    known = np.isfinite(outer) & np.isfinite(inner)
    mixed = (1 - weight) * np.where(known, outer, 0) + weight * np.where(known, inner, 0)
    return np.where(known, mixed, outer)
