"""Promise: MLPerf's and AlgoPerf's own rules are followed where a study has their form, and said where not.

References: the worked examples of MLPerf's rules (mlcommons/training_policies d73e20f, appendix), MLPerf's
checker, and AlgoPerf's formulas (mlcommons/algorithmic-efficiency 2c90454) by hand.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from analysis.benchmarks import algoperf, mlperf, sentences
from analysis.metrics import aggregated
from analysis.rules import RENAMED, SCORINGS
from analysis.statistics.reference_points import least_mean, reference_point
from harness.cli import main
from tests.analysis.hand_made import Run, hand_made

REFERENCE = [16, 14, 16, 17, 16, 16, 15, 16, 15, 16]


@pytest.mark.parametrize(("mean", "deviation", "least"), [(15.75, 0.433, 15.21), (20.75, 0.661, 19.93)])
def test_the_least_mean_is_that_of_the_rules_appendix(mean, deviation, least):
    assert least_mean(mean, deviation, 8, 3) == pytest.approx(least, abs=0.006)


@pytest.mark.parametrize("epochs", [REFERENCE, [20, 21, 21, 20, 22, 22, 21, 21, 20, 20], [3.5] * 10])
def test_a_reference_point_is_that_of_mlperfs_checker(epochs):
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


def test_of_more_runs_than_required_the_first_seeds_count_and_not_the_fastest(tmp_path):
    """Seven runs of 16 epochs, each faster than the last: of the first five the middle one takes 112 s."""
    runs = [Run("sgd", 1, seed, n, 2.0) for seed, n in enumerate(REFERENCE)]
    runs += [Run("comm_opt", 1, seed, 16, 8.0 - seed) for seed in range(7)]
    (one,) = mlperf(hand_made(tmp_path, runs))
    assert one.seconds == pytest.approx(16 * 6.0 + 16)


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
    assert part.scores == {
        "sgd": pytest.approx((4 - 3) / 3 / 2),
        "comm_opt": 1.0,
    }  # it was not run there
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


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_of_a_rule_is_refused_with_the_new_one(old, tmp_path, capsys):
    hand_made(tmp_path, [Run("sgd", 1, 0, 4, 9.0)])
    assert main(["report", "synthetic", "--runs", str(tmp_path / "runs"), "--rule", old]) == 2
    said = capsys.readouterr().err
    assert f"is called {old}-style now" in said
    assert "any number of" in said
