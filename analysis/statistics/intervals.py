"""Intervals for a level and for a ratio. The run is the unit: steps of one run are not independent.

A ratio has one estimand and one kind of estimate at every number of runs: the factor by which a typical run
of one arm differs from one of the other, estimated by Hodges and Lehmann's median of log ratios. The number
of runs and whether they are paired decide which limits apply. Each keeps its nominal coverage, as
`make coverage` simulates; where nothing does, with fewer than four runs, there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.statistics.limits import (
    Array,
    mann_whitney_limits,
    median_limits,
    signed_rank_limits,
    t_limits,
    t_p_value,
    walsh,
    welch,
)  # fmt: skip
from analysis.statistics.power import FEWEST_RUNS, SIGNIFICANT
from analysis.statistics.power import least_p as least_p_of_ranks
from analysis.statistics.ranks import mann_whitney, signed_rank

ORDER_STATISTIC_RUNS = 6
"""Fewest runs whose range covers the median at 95 %: 1 - 2 / 2**6 = 96.9 %."""

LEVEL_RUNS = 5
"""Fewest runs of an interval of a level: their range covers the median at 93.75 %, whatever the noise. Four
that all fell on one side of it show nothing of the other, one time in eight."""

SIGNED_RANK_RUNS = 6
"""Fewest pairs for a two-sided signed-rank test at 5 %: 2 / 2**6 = 3.1 %."""

NO_SCATTER = 1e-12
"""Smaller differences of logs are rounding errors, on which a t test has no meaning."""

MEDIAN = "order-statistic interval of the median under the load of the study"
RANGE = "range of five runs, at 93.75 %, under the load of the study"
RANGE_OR_T = "the wider of the range of five runs and a t interval on logs, assuming log-normal runs"
MANN_WHITNEY = "Hodges-Lehmann on logs, the wider of exact Mann-Whitney and Welch limits"
RANKS_ONLY = "Hodges-Lehmann on logs, exact Mann-Whitney limits"
SIGNED_RANK = "Hodges-Lehmann on logs of paired runs, exact signed-rank limits"
PAIRED_T = "Hodges-Lehmann on logs of paired runs, t limits"
NO_RATIO = "no ratio: the median run of one arm missed"
COUNTED = "counted, not measured: equal in all runs of an arm"


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % confidence limits.

    Attributes:
        estimate: the estimate; infinite if the median run missed its target, so of a ratio infinite or 0;
            NaN without runs.
        low: lower limit, or None if no interval is justified; infinite or 0 if misses leave it unknown.
        high: upper limit, or None; likewise.
        n: number of runs; of a ratio, those of the smaller arm, or the pairs.
        method: the method, or the reason why there is no interval, for captions.
        p_value: of a ratio, two-sided, for the claim that it is 1; None without an interval.
    """

    estimate: float
    low: float | None
    high: float | None
    n: int
    method: str
    p_value: float | None = None

    @property
    def is_ratio(self) -> bool:
        """Whether the estimate is a number that both arms' runs give: finite and above 0."""
        return 0 < self.estimate < math.inf

    def scaled(self, factor: float) -> Interval:
        """The interval in another unit: everything times `factor` > 0."""
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return replace(self, estimate=self.estimate * factor, low=low, high=high)

    def excludes(self, value: float) -> bool:
        """Whether the whole interval lies on one side of `value`."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def level(values: Sequence[float]) -> Interval:
    """The median of one arm's positive values, one value per run.

    A run that missed its target enters as infinity: it counts as slower than every run that reached it.
    """
    runs = np.asarray(values, dtype=float)
    n, estimate = len(runs), median(runs)
    if n < LEVEL_RUNS:
        return Interval(estimate, None, None, n, f"n={n}: no interval, every run shown")
    low, high = _floats(median_limits(runs))
    if n >= ORDER_STATISTIC_RUNS:
        return Interval(estimate, low, high, n, MEDIAN)
    if not np.isfinite(runs).all() or (runs <= 0).any():
        return Interval(estimate, low, high, n, RANGE)
    lower, upper = _exponentials(t_limits(np.log(runs)))
    return Interval(estimate, min(low, lower), max(high, upper), n, RANGE_OR_T)


def ratio(numerator: Sequence[float], denominator: Sequence[float], *, counted: bool = False) -> Interval:
    """The typical run of `numerator` over that of `denominator`; both positive, one value per run.

    Speed-up of an arm over a baseline is `ratio(baseline_seconds, arm_seconds)`. Misses are infinite; exact
    limits remain valid, because ranks only need "later than all that reached the target". Without misses the
    limits are the wider of Mann-Whitney's and Welch's, and p the larger: ranks alone fail where the smaller
    arm scatters more, t alone on machines with two speeds. Values that are `counted`, such as bytes, are
    exact where all runs of an arm agree.
    """
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    n = min(len(top), len(bottom))
    if counted and n > 1 and np.ptp(top) == np.ptp(bottom) == 0 and top[0] > 0 and bottom[0] > 0:
        exact = float(top[0] / bottom[0])
        return Interval(exact, exact, exact, n, COUNTED, 1.0 if exact == 1 else 0.0)
    impossible = _impossible(top, bottom, n)
    if impossible is not None:
        return impossible
    top, bottom = np.log(top), np.log(bottom)
    with np.errstate(invalid="ignore"):  # a miss over a miss is unknown; the limits allow for it
        differences = np.subtract.outer(top, bottom).ravel()
    if n < FEWEST_RUNS:
        return _estimate_alone(differences, n)
    with np.errstate(invalid="ignore"):
        low, high = _floats(mann_whitney_limits(top, bottom))
    p_value, method = _rank_p(differences, mann_whitney(len(top), len(bottom))), RANKS_ONLY
    if np.isfinite(differences).all() and np.ptp(top) + np.ptp(bottom) > NO_SCATTER:
        lower, upper, p_of_welch = welch(top, bottom)
        low, high, method = min(low, lower), max(high, upper), MANN_WHITNEY
        p_value = max(p_value, p_of_welch)
    return _with_misses(differences, (math.exp(low), math.exp(high)), n, method, p_value)


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], family: int = 1) -> Interval:
    """As `ratio`, of paired runs: value i of both comes from the same block, so block effects cancel.

    In a block whose order is random either arm is as likely the slower one if they are equal, so signed
    ranks are exact whatever the load did. Where too few pairs leave them unable to decide a `family` of
    comparisons, the limits are Student's on the differences of logs. Their p is never below the least that
    ranks of as many unpaired runs can give: a few differences may agree by chance to any number of digits.
    Where misses leave the centre of the pairs unknown, or rule out logs, runs are compared as if unpaired.

    Raises:
        ValueError: the sides differ in length.
    """
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    n = len(top)
    if n != len(bottom):
        raise ValueError(f"both sides must have the same number of runs, got {n} and {len(bottom)}")
    impossible = _impossible(top, bottom, n)
    if impossible is not None:
        return impossible
    with np.errstate(invalid="ignore"):  # a pair of misses is unknown; see _rank_limits
        differences = np.log(top) - np.log(bottom)
        averages = walsh(differences)
    if n < FEWEST_RUNS:
        return _estimate_alone(averages, n)
    if n >= SIGNED_RANK_RUNS and family * 2 / 2**n < SIGNIFICANT:
        with np.errstate(invalid="ignore"):
            limits = _exponentials(signed_rank_limits(differences))
        found = _with_misses(averages, limits, n, SIGNED_RANK, _rank_p(averages, signed_rank(n)))
        if found.is_ratio:
            return found
    if not np.isfinite(differences).all():
        return ratio(numerator, denominator)  # blocks only widen its limits
    least = least_p_of_ranks(n, n)
    limits = _exponentials(t_limits(differences))
    if np.ptp(differences) < NO_SCATTER:  # such as whole epochs: the scatter is unknown
        p_value = 1.0 if abs(differences[0]) < NO_SCATTER else least
    else:
        p_value = max(least, t_p_value(differences))
    return _with_misses(averages, limits, n, PAIRED_T, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979): at 5 %, the chance of any false claim is at most 5 %."""
    order = np.argsort(p_values, kind="stable")
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for place, index in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - place) * float(p_values[index])))
        adjusted[index] = worst
    return adjusted


def median(values: Sequence[float] | Array) -> float:
    """The middle value; infinite if half of the runs or more missed; NaN without runs."""
    ordered = np.sort(np.asarray(values, dtype=float))
    if len(ordered) == 0:
        return math.nan
    upper, lower = ordered[len(ordered) // 2], ordered[(len(ordered) - 1) // 2]
    return float(upper if math.isinf(upper) else (lower + upper) / 2)


def _impossible(top: Array, bottom: Array, n: int) -> Interval | None:
    if n == 0:
        return Interval(math.nan, None, None, 0, "no runs on one side")
    if (top <= 0).any() or (bottom <= 0).any():
        return Interval(math.nan, None, None, n, "a value of 0 has no logarithm")
    return None


def _estimate_alone(differences: Array, n: int) -> Interval:
    return _with_misses(differences, (None, None), n, f"Hodges-Lehmann on logs, n={n}: no interval", None)


def _with_misses(
    differences: Array, limits: tuple[float | None, float | None], n: int, method: str, p_value: float | None
) -> Interval:
    """Centre and limits, if the centre is known; where one arm's typical run missed, it is infinite or 0."""
    unknown = np.isnan(differences)
    least = most = median(np.where(unknown, -np.inf, differences))
    if unknown.any():
        most = median(np.where(unknown, np.inf, differences))
    if least == most and math.isinf(least) and p_value is not None:
        return Interval(math.exp(least), *limits, n, f"{NO_RATIO}; ranks decide", p_value)
    if not (math.isfinite(least) and math.isfinite(most)):
        return Interval(math.nan, None, None, n, NO_RATIO)
    return Interval(math.exp((least + most) / 2), *limits, n, method, p_value)


def _rank_p(differences: Array, cumulative: tuple[float, ...]) -> float:
    """Exact two-sided p; ties and unknown differences count in favour of equality."""
    undecided = int((~((differences > 0) | (differences < 0))).sum())
    rarer = min(int((differences > 0).sum()), int((differences < 0).sum())) + undecided
    return min(1.0, 2 * cumulative[min(rarer, len(cumulative) - 1)])


def _floats(limits: tuple[Array, Array]) -> tuple[float, float]:
    return float(limits[0]), float(limits[1])


def _exponentials(limits: tuple[Array, Array]) -> tuple[float, float]:
    low, high = _floats(limits)
    return math.exp(low), math.exp(high)
