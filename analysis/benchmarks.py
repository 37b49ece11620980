"""Scores by the rules of MLPerf Training and AlgoPerf, for studies that have the form these require.

Other studies get the reason why not; `mlperf-style` and `algoperf-style` of `analysis.rules` score any study.
Sources: as in `analysis.rules`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import pandas as pd

from analysis.comparisons import baselines, points
from analysis.completeness import NOT_STARTED
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study
from analysis.rules import SCORINGS, algoperf_score, mlperf_score
from analysis.statistics.profiles import performance_ratios, profile_score
from analysis.statistics.reference_points import reference_point

MLPERF_RUNS = {"cifar10": 5, "digits": 5, "imagenet": 5, "coco": 5}
"""Runs of a result: 5 of vision (ResNet, Mask R-CNN, SSD), MLPERF_OTHER_RUNS of everything else."""

MLPERF_OTHER_RUNS = 10

STUDIES, TRIALS = 3, 5
"""AlgoPerf's external tuning ruleset: independent studies, each of so many trials."""


@dataclass(frozen=True)
class MLPerfScore:
    """A result by MLPerf's rules, or `why` there is none."""

    arm: str
    world_size: int
    seconds: float
    factor: float
    why: str = ""


def mlperf(study: Study) -> list[MLPerfScore]:
    """Every arm as a submission, against its first-order arm as the reference, on the same world size.

    A result needs MLPerf's number of runs, of the reference twice as many, at most one miss, and the test of
    the reference convergence point. Its seconds are the mean without the fastest and slowest run, multiplied
    where the submission needed fewer epochs than the reference.
    """
    scored = time_to_accuracy(replace(study, scoring=SCORINGS["mlperf-style"]))
    runs = {(arm, size): group for arm, size, group in points(scored)}
    workloads = study.cells.drop_duplicates("arm").set_index("arm")["workload"]
    against = baselines(study)
    return [
        _mlperf(arm, size, group, runs.get((against.get(arm, ""), size)), str(workloads[arm]))
        for (arm, size), group in runs.items()
        if against.get(arm) != arm
    ]


def _mlperf(
    arm: str, size: int, runs: pd.DataFrame, reference: pd.DataFrame | None, workload: str
) -> MLPerfScore:
    def none(why: str) -> MLPerfScore:
        return MLPerfScore(arm, size, math.nan, math.nan, why)

    needed = MLPERF_RUNS.get(workload, MLPERF_OTHER_RUNS)
    if len(runs) < needed:
        return none(f"{len(runs)} runs, where MLPerf requires {needed}")
    if reference is None:
        return none("no first-order arm as the reference")
    reached = reference[reference["reached"]]
    if len(reached) < 2 * needed:
        return none(f"{len(reached)} reference runs at the target, where MLPerf requires {2 * needed}")
    runs = runs.sort_values("seed").head(needed)  # chosen before their results are known
    seconds = mlperf_score(runs)
    if math.isnan(seconds):
        return none("two runs or more missed the target")
    point = reference_point(reached["epochs"].tolist(), needed)
    factor = point.factor(runs["scored_epochs"].tolist())
    if factor is None:
        return none(
            f"it converges faster than its reference: below {point.least:.2f} epochs, where the reference "
            f"needs {point.mean:.2f}; MLPerf's closed division rejects that"
        )
    return MLPerfScore(arm, size, seconds * factor, factor)


@dataclass(frozen=True)
class AlgoPerfScores:
    """Benchmark scores by AlgoPerf's rules, from 0 to 1 by method, or `why` there are none.

    Attributes:
        workloads: over which the profiles are.
    """

    scores: dict[str, float]
    workloads: int
    why: str = ""


def algoperf(study: Study) -> AlgoPerfScores:
    """Methods as submissions: trials are their arms on a workload, studies are seeds.

    A workload is a setting on one world size. Its runtime is the median over three studies of the fastest of
    five trials (external tuning ruleset), or of the only one (self-tuning ruleset), equal for all methods.
    A run that missed, broke or was stopped is infinite, and so is a method on a workload
    that it was not run on: the profile is over all workloads.
    """
    scored = time_to_accuracy(replace(study, scoring=SCORINGS["algoperf-style"]))
    cells = study.cells[["run", "method", "setting", "world_size", "arm", "seed"]]
    if scored.empty or cells["method"].nunique() < 2:
        return AlgoPerfScores({}, 0, "it compares two methods or more, and none or one has a score")
    if study.cells["state"].isin([*NOT_STARTED, "RUNNING"]).any():
        return AlgoPerfScores({}, 0, "not all cells of the study have ended")
    every = cells.merge(scored[["run", "scored_seconds"]], on="run", how="left")
    every["scored_seconds"] = every["scored_seconds"].fillna(math.inf)
    times: dict[tuple[str, str], float] = {}
    for key, runs in every.groupby(["setting", "world_size", "method"], sort=False):
        setting, size, method = cast("tuple[str, int, str]", key)
        trials = runs.groupby("seed")["arm"].nunique()
        if len(trials) != STUDIES or trials.nunique() > 1 or trials.iloc[0] not in (1, TRIALS):
            return AlgoPerfScores({}, 0, _form(method, len(trials), sorted(set(trials))))
        times[f"{setting} on {size}", method] = algoperf_score(runs)
    if len({int(n) for n in every.groupby(["setting", "world_size", "method"])["arm"].nunique()}) > 1:
        return AlgoPerfScores({}, 0, "some methods have five trials a study and others one")
    table = pd.Series(times).unstack().fillna(math.inf)
    ratios = performance_ratios(table).reindex(table.index, fill_value=math.inf)
    scores = {str(method): profile_score(ratios[method]) for method in ratios}
    return AlgoPerfScores(scores, len(table))


def _form(method: str, studies: int, trials: list[int]) -> str:
    counted = " or ".join(str(int(n)) for n in trials) + (" trial" if trials == [1] else " trials")
    return (
        f"its rules require {STUDIES} studies (seeds) of {TRIALS} trials (arms) each, or of one, for every "
        f"method on every workload; {method} has {studies} seeds with {counted} each"
    )


def sentences(study: Study) -> list[str]:
    """For the report: the scores, or why there are none."""
    return [_mlperf_sentence(mlperf(study)), _algoperf_sentence(algoperf(study))]


def _mlperf_sentence(found: list[MLPerfScore]) -> str:
    scores = [
        f"{one.arm} on {one.world_size} {one.seconds:.4g} s"
        + (f" (its time times {one.factor:.3f}, for it needed fewer epochs)" if one.factor > 1 else "")
        for one in found
        if not one.why
    ]
    reasons = pd.Series([one.why for one in found if one.why], dtype="str").value_counts(sort=False)
    none = "; ".join(f"{why} ({n} of {len(found)})" for why, n in reasons.items())
    if not found:
        return "By MLPerf's own rules nothing is scored: an arm and a first-order reference are needed."
    if not scores:
        return f"MLPerf's own rules give no result: {none}."
    return f"By MLPerf's own rules: {'; '.join(scores)}" + (f". No result: {none}." if none else ".")


def _algoperf_sentence(found: AlgoPerfScores) -> str:
    if found.why:
        return f"AlgoPerf's own rules give no score: {found.why}."
    scores = ", ".join(f"{name} {score:.3f}" for name, score in sorted(found.scores.items()))
    counted = "1 workload" if found.workloads == 1 else f"all {found.workloads} workloads"
    return (
        f"AlgoPerf's benchmark score over {counted}: {scores}. The limit of epochs stands in for "
        "max_runtime, and the workloads are this study's, not AlgoPerf's eight."
    )
