"""Promise: every rule of time to accuracy follows its published text, worked by hand.

MLPerf Training rules (mlcommons/training_policies d73e20f), "Benchmark Results": drop the fastest and the
slowest run, mean of the rest; one run that did not converge may be the slowest; with more the result is
invalid. AlgoPerf technical documentation (mlcommons/algorithmic-efficiency 2c90454): median over studies of
each study's fastest trial, a trial that misses is infinite; performance profiles and their integral up to 4.
The benchmarks' own rules are followed where a study has their form, and said where not: MLPerf's checker and
the appendix' worked examples, and AlgoPerf's formulas by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from analysis.benchmarks import algoperf, mlperf, sentences
from analysis.metrics import aggregated, time_to_accuracy
from analysis.rules import CLOCKS, RENAMED, SCORINGS, Rule, algoperf_score, median_score, mlperf_score
from analysis.statistics.profiles import performance_ratios, profile, profile_score
from analysis.statistics.reference_points import least_mean, reference_point
from harness.cli import main
from tests.analysis.hand_made import Run, hand_made

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
    for seconds, score in (((10.0, MISS, 20.0), 20.0), ((10.0, MISS, MISS), MISS)):  # of one: the median
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


REFERENCE = [16, 14, 16, 17, 16, 16, 15, 16, 15, 16]


@pytest.mark.parametrize("epochs", [REFERENCE, [3.5] * 10])
def test_a_reference_point_is_that_of_mlperfs_checker_and_appendix(epochs):
    checker = RCP_Checker.__new__(RCP_Checker)
    checker.alpha, checker.tolerance, checker.submission_runs, checker.verbose = 0.05, 1e-6, 5, False
    checker.ruleset, checker.benchmark = "5.0.0", "resnet"
    record = {"Benchmark": "resnet", "BS": 128, "Epochs to converge": sorted(epochs), "Hyperparams": {}}
    checker.rcp_data = {"one": record}
    checker.compute_rcp_stats()
    found = reference_point(epochs, 5)
    assert found.mean == pytest.approx(record["RCP Mean"])
    assert found.least == pytest.approx(record["Min Epochs"], abs=1e-4)
    for submission in ([15, 15, 15, 16, 16], [19, 19, 19, 20, 21], [2, 3, 4, 5, 6], [25] * 5):
        passed, factor = checker._eval_submission_record(record, sorted(submission), "")
        assert found.factor(submission) == (pytest.approx(max(factor, 1)) if passed else None)
    for mean, deviation, least in ((15.75, 0.433, 15.21), (20.75, 0.661, 19.93)):  # the appendix' examples
        assert least_mean(mean, deviation, 8, 3) == pytest.approx(least, abs=0.006)


def epochs_study(folder, reference, submission, misses=0):
    runs = [Run("sgd", 1, seed, n, 2.0) for seed, n in enumerate(reference)]
    runs += [
        Run("comm_opt", 1, seed, n, 1.0 + seed, misses=seed >= len(submission) - misses)
        for seed, n in enumerate(submission)
    ]
    return hand_made(folder, runs)


def test_a_submission_is_the_mean_of_its_middle_runs_times_the_factor(tmp_path):
    """16, 30, 48, 64 and 80 s and 1 s a epoch of evaluation: the middle ones are 45, 64 and 80."""
    study = epochs_study(tmp_path, REFERENCE, [16, 15, 16, 16, 16])
    (one,) = mlperf(study)
    wall = sorted(epochs * (1.0 + seed) + epochs for seed, epochs in enumerate([16, 15, 16, 16, 16]))
    assert (one.why, one.factor) == ("", 1.0)
    assert one.seconds == pytest.approx(sum(wall[1:-1]) / 3)
    assert "By MLPerf's own rules: comm_opt on 1 " in sentences(study)[0]
    (normalized,) = mlperf(epochs_study(tmp_path / "b", REFERENCE, [15, 15, 15, 16, 16]))
    assert normalized.factor == pytest.approx(15.75 / (46 / 3))
    wall = sorted(epochs * (1.0 + seed) + epochs for seed, epochs in enumerate([15, 15, 15, 16, 16]))
    assert normalized.seconds == pytest.approx(sum(wall[1:-1]) / 3 * normalized.factor)
    # Of seven runs, each faster than the last, the first five count: the middle one takes 112 s.
    runs = [Run("sgd", 1, seed, n, 2.0) for seed, n in enumerate(REFERENCE)]
    runs += [Run("comm_opt", 1, seed, 16, 8.0 - seed) for seed in range(7)]
    (first,) = mlperf(hand_made(tmp_path / "c", runs))
    assert first.seconds == pytest.approx(16 * 6.0 + 16)


@pytest.mark.parametrize(
    ("reference", "submission", "misses", "why"),
    [
        (REFERENCE, [8] * 5, 0, "converges faster than its reference"),
        (REFERENCE[:9], [16] * 5, 0, "9 reference runs at the target, where MLPerf requires 10"),
        (REFERENCE, [16] * 4, 0, "4 runs, where MLPerf requires 5"),
        (REFERENCE, [16] * 5, 2, "two runs or more missed"),
    ],
)
def test_what_mlperf_rejects_has_no_result_and_a_reason(reference, submission, misses, why, tmp_path):
    study = epochs_study(tmp_path, reference, submission, misses)
    assert why in mlperf(study)[0].why
    assert why in sentences(study)[0]


def tuning(folder, methods=("sgd", "comm_opt"), trials=5, studies=3, lost=()):
    """Trial i of a study of sgd takes 10 - i s per epoch, of K-FAC 6 - i; a workload is a world size."""
    runs = [
        Run(method, size, study, 2 * size, base - trial, patch={"optimizer.lr": 0.1 * (trial + 1)},
            state="FAILED" if (method, size) in lost else "COMPLETED")
        for method, base in zip(methods, (10.0, 6.0), strict=True)
        for size in (1, 2) for study in range(studies) for trial in range(trials)
    ]  # fmt: skip
    return hand_made(folder, runs)


@pytest.mark.slow
def test_algoperfs_score_is_the_integral_over_all_workloads(tmp_path):
    """The best trials take 6 and 2 s an epoch: SGD is within a factor of 3 of K-FAC on both workloads."""
    found = algoperf(tuning(tmp_path))
    assert (found.workloads, found.why) == (2, "")
    assert found.scores == {"sgd": pytest.approx((4 - 3) / 3), "comm_opt": 1.0}
    study = tuning(tmp_path / "part")
    cells = study.cells
    part = algoperf(study.only((cells["method"] != "sgd") | (cells["world_size"] == 1)))
    assert part.scores == {"sgd": pytest.approx((4 - 3) / 3 / 2), "comm_opt": 1.0}  # it was not run there
    lost = algoperf(tuning(tmp_path / "lost", lost=[("sgd", 2)]))
    assert lost.scores == {"sgd": pytest.approx((4 - 3) / 3 / 2), "comm_opt": 1.0}
    nobody = algoperf(tuning(tmp_path / "nobody", lost=[("sgd", 2), ("comm_opt", 2)]))
    assert nobody.scores["comm_opt"] == 0.5  # a workload that nobody solved is one of all


def test_algoperf_needs_equal_trials_of_every_method(tmp_path):
    found = algoperf(tuning(tmp_path, trials=2))
    assert found.scores == {}
    assert "5 trials (arms) each, or of one, for every method on every workload" in found.why
    assert "has 3 seeds with 2 trials each" in found.why
    uneven = [Run("sgd", 1, 0, 4, 9.0)] + [
        Run("comm_opt", 1, 0, 4, 5.0 + n, patch={"kfac.damping": 0.01 * n}) for n in (1, 2)
    ]
    study = replace(hand_made(tmp_path / "uneven", uneven), scoring=SCORINGS["algoperf-style"])
    assert aggregated(study)["seconds"].isna().all()  # the best of two is no match for the only one


def test_another_target_scores_the_same_runs_unless_they_stopped_before_it(tmp_path, capsys):
    study = hand_made(tmp_path, [Run("sgd", 1, seed, 4, 9.0) for seed in range(4)])
    assert time_to_accuracy(study)["seconds"].tolist() == [36.0] * 4
    easier = time_to_accuracy(study.at_target(0.1))
    assert (easier["seconds"].tolist(), easier["epochs"].tolist()) == ([9.0] * 4, [1.0] * 4)
    with pytest.raises(ValueError, match=r"4 of 4 runs, such as sgd-.*, stopped at their own target"):
        study.at_target(0.99)
    whole = replace(study, cells=study.cells.assign(stop_reason="epochs")).at_target(0.99)
    assert time_to_accuracy(whole)["reached"].tolist() == [False] * 4
    arguments = ["report", "synthetic", "--runs", str(tmp_path / "runs"), "--figure", "scaling", "--target"]
    assert main([*arguments, "0.1"]) == 0
    page = (tmp_path / "runs" / "synthetic" / "report-first-at-0.1" / "report.html").read_text()
    assert "accuracy ≥ 0.1" in page
    assert main([*arguments, "0.99"]) == 2
    assert "--target=0.99: 4 of 4 runs" in capsys.readouterr().err


def test_an_old_name_of_a_rule_is_refused_with_the_new_one(tmp_path, capsys):
    old = next(iter(RENAMED))
    hand_made(tmp_path, [Run("sgd", 1, 0, 4, 9.0)])
    assert main(["report", "synthetic", "--runs", str(tmp_path / "runs"), "--rule", old]) == 2
    said = capsys.readouterr().err
    assert f"is called {old}-style now" in said
    assert "any number of" in said
