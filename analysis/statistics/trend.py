"""A test for a trend within groups: for drift over a study, and for effects of the order within blocks.

Source: Mann (1945), Kendall's statistic against time; Hirsch, Slack & Smith (1982), its sum over seasons. A
group is a season: only values of the same group are compared with each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FEWEST_PAIRS = 10
"""Fewest comparisons within groups for a p value; the statistic is close to normal from about ten."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trend:
    """A trend of values against time.

    Attributes:
        p_value: two-sided, for no trend in any group; None with fewer than `FEWEST_PAIRS` comparisons.
        rise: median over all comparisons of the later value less the earlier one.
        pairs: comparisons within groups.
    """

    p_value: float | None
    rise: float
    pairs: int


def trend(groups: Iterable[tuple[Sequence[float], Sequence[float]]]) -> Trend:
    """The trend common to all groups, each given as its times and its values."""
    total, variance, pairs = 0.0, 0.0, 0
    rises: list[Array] = []
    for times, values in groups:
        t, v = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
        first, second = np.triu_indices(len(t), 1)
        apart = t[second] != t[first]
        rises.append(((v[second] - v[first]) * np.sign(t[second] - t[first]))[apart])
        total += float(np.sign(rises[-1]).sum())
        variance += _variance(t, v)
        pairs += len(rises[-1])
    rise = float(np.median(np.concatenate(rises))) if pairs else 0.0
    if pairs < FEWEST_PAIRS or variance == 0:
        return Trend(None, rise, pairs)
    z = max(abs(total) - 1, 0.0) / math.sqrt(variance)  # the correction for continuity
    return Trend(2 * (1 - NormalDist().cdf(z)), rise, pairs)


def _variance(times: Array, values: Array) -> float:
    """Of Kendall's statistic without a trend, with ties in either (Kendall 1970, section 4.4)."""
    n = len(times)
    ties = [np.unique(one, return_counts=True)[1].astype(float) for one in (times, values)]
    found = _spread(np.array([float(n)])) - sum(_spread(counts) for counts in ties)
    if n > 1:
        found += math.prod(float((c * (c - 1)).sum()) for c in ties) / (2 * n * (n - 1))
    if n > 2:
        triples = math.prod(float((c * (c - 1) * (c - 2)).sum()) for c in ties)
        found += triples / (9 * n * (n - 1) * (n - 2))
    return found


def _spread(counts: Array) -> float:
    return float((counts * (counts - 1) * (2 * counts + 5)).sum()) / 18
