"""Intervals for a level and for a ratio. The run is the unit: steps of one run are not independent.

Which method applies is decided by the number of runs alone; each was chosen because it keeps its nominal
coverage at that number (`tests/analysis/test_statistics.py` simulates it), where a bootstrap over three
runs covers 74 % and pooled steps cover 15 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95

ORDER_STATISTIC_RUNS = 6
"""Fewest runs whose range covers the median with 95 %: 1 - 2 / 2**6 = 96.9 %."""

RANK_RUNS = 4
"""Fewest runs per arm for a two-sided Mann-Whitney test at 5 %: 2 / C(8, 4) = 2.9 %."""

T_RUNS = 3
"""Below this a t interval is so wide that it says nothing; the points are shown instead."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % confidence limits.

    Attributes:
        estimate: the estimate; infinite where the median run missed its target; NaN without runs.
        low: lower limit, or None where no interval is justified.
        high: upper limit, or None.
        n: runs behind it; of a ratio, those of the smaller arm.
        method: the method, or the reason for having no interval, for captions.
    """

    estimate: float
    low: float | None
    high: float | None
    n: int
    method: str


def level(values: Sequence[float]) -> Interval:
    """The median of one arm's positive values, one value per run.

    A run that missed its target enters as infinity: it counts as slower than every run that arrived.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    n = len(ordered)
    estimate = _median(ordered)
    if n < T_RUNS:
        return Interval(estimate, None, None, n, f"n={n}: no interval, every run shown")
    if n >= ORDER_STATISTIC_RUNS:
        # x[k-1] .. x[n-k] misses the median when fewer than k of n runs fall on one side of it.
        k = int(stats.binom.ppf((1 - CONFIDENCE) / 2, n, 0.5))
        low, high = float(ordered[k - 1]), float(ordered[n - k])
        return Interval(estimate, low, high, n, "order-statistic interval of the median")
    if not np.isfinite(ordered).all():
        return Interval(estimate, None, None, n, "some runs missed, and a miss has no logarithm")
    logs = np.log(ordered)
    half = _t_quantile(n - 1) * logs.std(ddof=1) / math.sqrt(n)
    low, high = np.exp(logs.mean() - half), np.exp(logs.mean() + half)
    return Interval(estimate, float(low), float(high), n, "t interval on logs, assuming log-normal runs")


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """How many times `numerator`'s typical run is `denominator`'s; both positive, one value per run.

    Speed-up of an arm over a baseline is `ratio(baseline_seconds, arm_seconds)`.
    """
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    n = min(len(top), len(bottom))
    if n == 0:
        return Interval(math.nan, None, None, 0, "no runs on one side")
    if not (np.isfinite(top).all() and np.isfinite(bottom).all()):
        estimate = _ratio_of_medians(top, bottom)
        return Interval(estimate, None, None, n, "ratio of medians, no interval: some runs missed")
    if n < T_RUNS:
        return Interval(
            _ratio_of_medians(top, bottom), None, None, n, f"ratio of medians, n={n}: no interval"
        )
    if n < RANK_RUNS:
        return _welch(np.log(top), np.log(bottom))
    return _hodges_lehmann(np.log(top), np.log(bottom))


def _welch(top: np.ndarray, bottom: np.ndarray) -> Interval:
    difference = float(top.mean() - bottom.mean())
    parts = [arm.var(ddof=1) / len(arm) for arm in (top, bottom)]
    variance = float(sum(parts))
    if variance == 0:
        half = 0.0
    else:
        freedom = variance**2 / sum(
            part**2 / (len(arm) - 1) for part, arm in zip(parts, (top, bottom), strict=True)
        )
        half = _t_quantile(freedom) * math.sqrt(variance)
    low, high = math.exp(difference - half), math.exp(difference + half)
    return Interval(math.exp(difference), low, high, min(len(top), len(bottom)), "Welch t interval on logs")


def _hodges_lehmann(top: np.ndarray, bottom: np.ndarray) -> Interval:
    differences = np.sort(np.subtract.outer(top, bottom).ravel())
    k = _mann_whitney_limit(len(top), len(bottom))
    low, high = math.exp(differences[k - 1]), math.exp(differences[-k])
    estimate = math.exp(float(np.median(differences)))
    method = "Hodges-Lehmann on logs, exact Mann-Whitney limits"
    return Interval(estimate, low, high, min(len(top), len(bottom)), method)


def _mann_whitney_limit(m: int, n: int) -> int:
    """The largest k with P(U < k) <= 2.5 % under equal arms (Hollander, Wolfe & Chicken, section 4.3).

    Arrangements by U are the coefficients of the Gaussian binomial [m+n choose m], built one factor
    (1 - q**(n+i)) / (1 - q**i) at a time.
    """
    counts = np.zeros(m * n + 1)
    counts[0] = 1
    for i in range(1, m + 1):
        for u in range(m * n, n + i - 1, -1):
            counts[u] -= counts[u - n - i]
        for u in range(i, m * n + 1):
            counts[u] += counts[u - i]
    cumulative = np.cumsum(counts) / math.comb(m + n, m)
    return max(1, int(np.searchsorted(cumulative, (1 - CONFIDENCE) / 2, side="right")))


def _median(ordered: np.ndarray) -> float:
    if len(ordered) == 0:
        return math.nan
    upper = ordered[len(ordered) // 2]
    lower = ordered[(len(ordered) - 1) // 2]
    return float(upper if math.isinf(upper) else (lower + upper) / 2)


def _ratio_of_medians(top: np.ndarray, bottom: np.ndarray) -> float:
    above, below = _median(np.sort(top)), _median(np.sort(bottom))
    return math.nan if math.isinf(above) or math.isinf(below) else above / below


def _t_quantile(freedom: float) -> float:
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom))
