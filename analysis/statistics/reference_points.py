"""MLPerf's test that a submission does not converge faster than its reference.

Source: MLPerf Training rules, "Reference Convergence Points" (mlcommons/training_policies d73e20f), and
`rcp_checker.py` (mlcommons/logging 7bbf792), which decides: unlike the rules' appendix it takes the deviation
of all reference runs, those that the mean leaves out included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05


def olympic_mean(values: np.ndarray) -> float:
    """Mean without the smallest and the largest value; NaN of fewer than three."""
    ordered = np.sort(values)
    return float(ordered[1:-1].mean()) if len(ordered) > 2 else math.nan


@dataclass(frozen=True)
class ReferencePoint:
    """What reference runs at one batch size allow.

    Attributes:
        mean: epochs to the target, without the fastest and the slowest run.
        least: fewest mean epochs of a submission that passes.
    """

    mean: float
    least: float

    def factor(self, epochs: Sequence[float]) -> float | None:
        """What multiplies a submission's seconds: 1, or more if it needed fewer epochs; None if it fails."""
        own = olympic_mean(np.asarray(epochs, dtype=float))
        if not own >= self.least:
            return None
        return max(1.0, self.mean / own)


def reference_point(epochs: Sequence[float], submission_runs: int) -> ReferencePoint:
    """The point of at least twice as many reference runs as a submission has.

    Raises:
        ValueError: there are fewer.
    """
    if len(epochs) < 2 * submission_runs:
        raise ValueError(
            f"{len(epochs)} reference runs are fewer than twice a submission's {submission_runs}"
        )
    runs = np.asarray(epochs, dtype=float)
    mean = olympic_mean(runs)
    return ReferencePoint(mean, least_mean(mean, float(runs.std()), len(runs) - 2, submission_runs - 2))


def least_mean(mean: float, deviation: float, runs: int, submission_runs: int) -> float:
    """Smallest mean that a one-sided t test at 5 % does not call faster than `mean`; equal deviations."""
    quantile = float(stats.t.ppf(1 - LEVEL, runs + submission_runs - 2))
    return mean - quantile * deviation * math.sqrt(1 / runs + 1 / submission_runs)
