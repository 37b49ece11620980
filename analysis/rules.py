"""Rules of time to accuracy: which evaluation counts, on which clock, and how runs become a score.

`mlperf-style` and `algoperf-style` follow those benchmarks' ways to score, for any study;
`analysis.benchmarks` scores by the benchmarks' own rules, for studies that have their form.

Sources: MLPerf Training rules, "Run Results" and "Benchmark Results" (mlcommons/training_policies d73e20f);
AlgoPerf technical documentation, "External tuning ruleset" and "Scoring" (mlcommons/algorithmic-efficiency
2c90454).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pandas as pd

from analysis.statistics.intervals import median
from analysis.statistics.reference_points import olympic_mean


@dataclass(frozen=True)
class Rule:
    """The first of `in_a_row` evaluations in a row at or beyond the target; of 1 it is the first crossing.

    Runs that stopped at their first crossing cannot be scored by more than one in a row.
    """

    in_a_row: int = 1

    def __call__(self, reached: np.ndarray) -> int | None:
        """Index of the evaluation that counts; `reached`, in time order: whether each is at the target."""
        starts = range(len(reached) - self.in_a_row + 1)
        return next((start for start in starts if reached[start : start + self.in_a_row].all()), None)

    @property
    def about(self) -> str:
        """For captions."""
        if self.in_a_row == 1:
            return "first evaluation at the target"
        return f"first of {self.in_a_row} in a row at the target"


@dataclass(frozen=True)
class Clock:
    """Computes the seconds of evaluations."""

    seconds: Callable[[pd.DataFrame], pd.Series]
    about: str


CLOCKS: Mapping[str, Clock] = MappingProxyType(
    {
        "train": Clock(lambda rows: rows["train_seconds"], "evaluation time not counted"),
        "train+eval": Clock(
            lambda rows: rows["train_seconds"] + rows["eval_seconds"], "evaluation time counted"
        ),
        "wall": Clock(
            lambda rows: rows["wall_seconds"], "wall time, with evaluations and the writing of records"
        ),
    }
)


def median_score(runs: pd.DataFrame) -> float:
    """The median run; infinite where half of them or more missed."""
    return median(runs["scored_seconds"].tolist())


def mlperf_score(runs: pd.DataFrame) -> float:
    """Mean without the fastest and the slowest run; one miss is the slowest, two are invalid.

    Returns:
        Seconds; NaN if the result is invalid, or if there are fewer than three runs.
    """
    seconds = runs["scored_seconds"].to_numpy(dtype=float)
    return math.nan if np.isinf(seconds).sum() > 1 else olympic_mean(seconds)


def algoperf_score(runs: pd.DataFrame) -> float:
    """Median over studies of each study's fastest trial; a miss is infinite and part of the median.

    A study is a seed, its trials are the arms among `runs`: give it one arm, and it is the median over seeds
    (self-tuning ruleset); give it all arms of a method, and each seed takes its best (external tuning
    ruleset).
    """
    return median(runs.groupby("seed")["scored_seconds"].min().tolist())


Aggregate = Callable[[pd.DataFrame], float]


@dataclass(frozen=True)
class Scoring:
    """A complete rule of time to accuracy.

    Attributes:
        rule: which evaluation counts.
        clock: a key of `CLOCKS`.
        aggregate: from runs, with `seed` and `scored_seconds` (a miss infinite), to seconds.
        pools_arms: whether `aggregate` takes all arms of a method together, as trials of one tuning. Then
            there is no score where methods have unequal numbers of trials: the best of five is no match for
            the best of one.
        lacks: what the benchmark of that name requires beyond this rule.
    """

    title: str
    rule: Rule = Rule()
    clock: str = "train"
    aggregate: Aggregate = median_score
    pools_arms: bool = False
    lacks: str = ""

    @property
    def about(self) -> str:
        """For captions: `first evaluation at the target, evaluation time not counted`."""
        return f"{self.rule.about}, {CLOCKS[self.clock].about}"


SCORINGS: Mapping[str, Scoring] = MappingProxyType(
    {
        "first": Scoring("first crossing, train clock, median"),
        "sustained": Scoring("3 in a row, train clock, median", rule=Rule(3)),
        "wall": Scoring("first crossing, wall clock, median", clock="wall"),
        "mlperf-style": Scoring(
            "MLPerf style", clock="wall", aggregate=mlperf_score,
            lacks="any number of runs from 3, no reference convergence points, starts at the first batch",
        ),
        "algoperf-style": Scoring(
            "AlgoPerf style", aggregate=algoperf_score, pools_arms=True,
            lacks="any number of studies and trials, no max_runtime, no profile over workloads",
        ),
    }
)  # fmt: skip
"""The rules by the names that `kronscale report --rule` takes; `first` is the default."""

RENAMED: Mapping[str, str] = MappingProxyType({"mlperf": "mlperf-style", "algoperf": "algoperf-style"})
"""Names of before November 2026, which said more than the rules do."""
