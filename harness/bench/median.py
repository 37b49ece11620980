"""The median of a benchmark's repetitions, with its confidence interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from scipy.stats import quantile_test


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """`median`, and `low` and `high`: its 95 % confidence interval, from order statistics.

    Distribution-free for independent values; NaN for fewer than six.
    """
    interval: Any = quantile_test(values).confidence_interval(0.95)  # scipy-stubs takes it for a float
    return {
        "median": statistics.median(values),
        "low": float(interval.low),
        "high": float(interval.high),
    }
