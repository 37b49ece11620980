"""Promise: every rule of time to accuracy follows its published text, worked by hand.

MLPerf Training rules (mlcommons/training_policies d73e20f), "Benchmark Results": drop the fastest and the
slowest run, mean of the rest; one run that did not converge may be the slowest; with more the result is
invalid. AlgoPerf technical documentation (mlcommons/algorithmic-efficiency 2c90454): median over studies of
each study's fastest trial, a trial that misses is infinite; performance profiles and their integral up to 4.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from analysis.rules import (
    CLOCKS,
    SCORINGS,
    Rule,
    algoperf_score,
    median_score,
    mlperf_score,
)
from analysis.statistics.profiles import performance_ratios, profile, profile_score

MISS = math.inf


@pytest.mark.parametrize(
    ("curve", "first", "twice"),
    [
        ([0.1, 0.96, 0.94, 0.97, 0.98], 1, 3),
        ([0.96, 0.97], 0, 0),
        ([0.1, math.nan, 0.96], 2, None),
        ([0.1, 0.2], None, None),
        ([], None, None),
    ],
)
def test_rules_pick_the_evaluation_that_counts(curve, first, twice):
    reached = np.array(curve) >= 0.95
    assert Rule()(reached) == first
    assert Rule(2)(reached) == twice


def runs(*seconds, seeds=None):
    return pd.DataFrame({"seed": seeds or range(len(seconds)), "scored_seconds": seconds})


@pytest.mark.parametrize(
    ("seconds", "score"),
    [
        ((100.0, 110.0, 120.0, 130.0, 190.0), 120.0),  # 100 and 190 are dropped: (110 + 120 + 130) / 3
        ((100.0, 110.0, 120.0, 130.0, MISS), 120.0),  # the miss is the slowest run
        ((10.0, 20.0, 60.0), 20.0),  # of three only the middle one is left
        ((1.0, 2.0, MISS, MISS, 3.0), math.nan),
        ((1.0, 2.0), math.nan),
        ((MISS, 20.0, 10.0, 30.0), 25.0),  # (20 + 30) / 2
    ],
)
def test_mlperf_averages_without_the_fastest_and_the_slowest(seconds, score):
    assert mlperf_score(runs(*seconds)) == pytest.approx(score, nan_ok=True)


def test_algoperf_takes_the_best_trial_of_each_study_and_the_median_of_studies():
    """Three studies of two trials: the minima are 10, 25 and infinite, so the median is 25."""
    seconds, studies = (12.0, 10.0, MISS, 25.0, MISS, MISS), [0, 0, 1, 1, 2, 2]
    assert algoperf_score(runs(*seconds, seeds=studies)) == 25.0
    for seconds, score in (
        ((10.0, MISS, 20.0), 20.0),
        ((10.0, MISS, MISS), MISS),
    ):  # of one: the median
        assert algoperf_score(runs(*seconds)) == median_score(runs(*seconds)) == score


def test_clocks_differ_by_what_they_count():
    rows = pd.DataFrame({"train_seconds": [10.0], "eval_seconds": [2.0], "wall_seconds": [13.5]})
    assert {name: clock.seconds(rows).item() for name, clock in CLOCKS.items()} == {
        "train": 10.0, "train+eval": 12.0, "wall": 13.5,
    }  # fmt: skip
    assert SCORINGS["mlperf-style"].clock == "wall"
    assert SCORINGS["algoperf-style"].clock == "train"


def test_performance_profiles_worked_by_hand():
    """Two methods on three workloads that somebody solved: ratios 1, 1, miss and 2, 1, 1."""
    table = pd.DataFrame(
        {"a": [10.0, 30.0, MISS, MISS], "b": [20.0, 30.0, 5.0, MISS]}, index=["w1", "w2", "w3", "nobody"]
    )
    ratios = performance_ratios(table)
    assert list(ratios.index) == ["w1", "w2", "w3"]
    assert ratios["a"].tolist() == [1.0, 1.0, MISS]
    assert ratios["b"].tolist() == [2.0, 1.0, 1.0]
    steps, shares = profile(ratios["b"])
    assert steps.tolist() == [1.0, 2.0]
    assert shares == pytest.approx([2 / 3, 1.0])
    assert profile_score(ratios["a"]) == pytest.approx(2 / 3)
    assert profile_score(ratios["b"]) == pytest.approx((2 / 3 * 1 + 1 * 2) / 3)
    assert profile_score(pd.Series([4.5, 4.5])) == profile_score(pd.Series([MISS, MISS])) == 0
    not_run = performance_ratios(table.iloc[:2].assign(b=[20.0, math.nan]))["b"]  # it counts as a miss
    assert profile(not_run)[1].tolist() == [0.0, 1.0]
    assert profile_score(not_run) == pytest.approx(2 / 3)
