"""Limits of a median from order statistics, for benchmarks that repeat in one process."""

from __future__ import annotations

from collections.abc import Sequence

from scipy.stats import binom


def median_limits(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The narrowest symmetric pair of order statistics that covers the median with at least `level`.

    Distribution-free for independent values (Conover 1999, section 3.2); all of them where six or fewer.
    """
    ordered, n = sorted(values), len(values)
    below = max(
        int(binom.ppf((1 - level) / 2, n, 0.5)), 1
    )  # P(fewer than `below` lie under) <= (1 - level) / 2
    return ordered[below - 1], ordered[n - below]
