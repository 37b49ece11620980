"""Performance profiles: how often a method is within a factor of the best, over several workloads.

Source: Dolan & Moré (2002), and AlgoPerf's technical documentation, "Benchmark score via integrated
performance profiles" (mlcommons/algorithmic-efficiency 2c90454).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

LARGEST_RATIO = 4.0
"""Upper limit of AlgoPerf's integral: beyond four times the best, a method scores nothing."""


def performance_ratios(seconds: pd.DataFrame) -> pd.DataFrame:
    """Seconds over the best method's on the same workload; infinite for a miss.

    Args:
        seconds: `[workload, method]`, the score of each; infinite for a miss, NaN if it was not run,
            which stays NaN: a profile covers the workloads that a method ran. Workloads that no method solved
            are left out.
    """
    finite = seconds.where(np.isfinite(seconds))
    solved = finite.notna().any(axis=1)
    return seconds[solved].div(finite[solved].min(axis=1), axis=0)


def profile(ratios: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """The steps of one method's profile: factors, ascending from 1, and the share of its workloads within."""
    ratios = ratios.dropna()
    steps = np.unique(np.append(1.0, ratios[ratios <= LARGEST_RATIO]))
    return steps, np.array([float((ratios <= step).mean()) for step in steps])


def profile_score(ratios: pd.Series) -> float:
    """The profile's area between 1 and `LARGEST_RATIO`, over that width: 1 is fastest everywhere."""
    steps, shares = profile(ratios)
    widths = np.diff(np.append(steps, LARGEST_RATIO))
    return float((shares * widths).sum() / (LARGEST_RATIO - 1))
