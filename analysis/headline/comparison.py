"""Every arm against the best first-order arm of its setting, and which arms the tuning had chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd

from analysis.comparisons import compared
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import Interval, level
from analysis.tuning import trials

COLUMNS = [
    "study", "workload", "model", "batch", "precision", "ranks", "arm", "kfac", "runs", "reached",
    "median_seconds", "baseline", "speedup", "low", "high", "method", "fewer_epochs", "cost_ratio", "chosen",
]  # fmt: skip

SETTING = ["model", "batch", "precision", "ranks"]
"""What a comparison holds fixed, beside its study and workload."""
POINT = ["study", *SETTING]
TUNING = "-tuning"
"""In the name of the sweep of a study's trials; without it, it is the study's name."""


@dataclass(frozen=True)
class Point:
    """What a comparison holds fixed."""

    study: str
    workload: str
    model: str
    batch: int
    precision: str
    ranks: int

    @property
    def words(self) -> str:
        """Such as `resnet8, batch 512, bfloat16, 2 ranks`."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.model}, batch {self.batch:,}, {self.precision}, {ranks}"


def speedups(study: Study) -> pd.DataFrame:
    """One row per study, point and arm: how many times sooner than the best first-order arm it is there.

    The baseline is the first-order arm with the smallest median seconds in these very runs, so an accident of
    the runs favours the first-order side. Columns: `runs` scored, `reached`, `speedup` with its limits and
    `method`; its factors `fewer_epochs` and `cost_ratio` (seconds per epoch, the arm's over the baseline's):
    an arm breaks even where they are equal; `chosen`: K-FAC's arm whose method had the best trial of all of
    K-FAC's in the tuning or, without trials, the arm with the smallest median.
    """
    best_kfac = {str(sweep): _best_tuned(study, str(sweep)) for sweep in study.cells["sweep"].unique()}
    rows: list[dict[str, Any]] = []
    for point, runs in _points(study):
        rows += _at_point(point, runs, best_kfac[point.study])
    return pd.DataFrame(rows, columns=COLUMNS)


def against(study: Study, point: Point, arm: str, base: str) -> Interval | None:
    """How many times sooner `arm` is at the target than `base`; None if one of them has no runs there."""
    arms = next((_arms(runs) for where, runs in _points(study) if where == point), {})
    if arm not in arms or base not in arms:
        return None
    return compared(arms[base], arms[arm], "scored_seconds", len(arms) - 1)


def scores(study: Study) -> pd.DataFrame:
    """Speed-ups as ratios of scores by `study.scoring`, the best first-order arm's over each arm's.

    For rules that make one number of all runs, which has no interval here: `low` and `high` are NaN.
    """
    rows: list[dict[str, Any]] = []
    for point, runs in _points(study):
        score = {arm: study.scoring.aggregate(group) for arm, group in _arms(runs).items()}
        first_order = [arm for arm, group in _arms(runs).items() if not group["kfac"].any()]
        valid = [arm for arm in first_order if math.isfinite(score[arm])]
        if not valid:
            continue
        baseline = min(valid, key=lambda arm: (score[arm], arm))
        rows += [
            {
                "study": point.study, "model": point.model, "batch": point.batch,
                "precision": point.precision, "ranks": point.ranks, "arm": arm,
                "baseline": baseline, "speedup": score[baseline] / score[arm],
                "low": math.nan, "high": math.nan,
            }
            for arm in score
        ]  # fmt: skip
    return pd.DataFrame(rows, columns=[*POINT, "arm", "baseline", "speedup", "low", "high"])


def is_number(value: object) -> bool:
    """Whether a cell of these tables holds a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _points(study: Study) -> Iterator[tuple[Point, pd.DataFrame]]:
    """The scored runs of every study and point, without trials."""
    cells = study.cells[study.cells["trial"].isna()]
    scored = time_to_accuracy(study)
    scored = scored[scored["run"].isin(set(cells["run"]))]
    of_run = cells.set_index("run").loc[scored["run"]]
    models, precisions = (
        dict(zip(study.cells["run"], study.value_of(path), strict=True))
        for path in ("workload.options.model", "training.precision")
    )
    scored = scored.assign(
        study=of_run["sweep"].to_numpy(),
        workload=of_run["workload"].to_numpy(),
        batch=of_run["global_batch_size"].to_numpy(),
        kfac=of_run["strategy"].notna().to_numpy(),
        model=[str(models.get(run) or "its network") for run in scored["run"]],
        precision=[str(precisions[run]) for run in scored["run"]],
    )
    fixed = ["study", "workload", "model", "batch", "precision", "world_size"]
    for key, runs in scored.groupby(fixed, sort=True):
        yield Point(*cast("tuple[str, str, str, int, str, int]", key)), runs


def _arms(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The runs of every arm at a point, by its method if that has one arm there, else by its whole name."""
    arms_of = runs.groupby("method")["arm"].nunique()
    found = {}
    for arm, group in runs.groupby("arm", sort=False):
        method = str(group["method"].iloc[0])
        found[method if arms_of[method] == 1 else str(arm)] = group
    return found


def _at_point(point: Point, runs: pd.DataFrame, best_kfac: str) -> list[dict[str, Any]]:
    arms = _arms(runs)
    medians = {arm: level(group["scored_seconds"].tolist()).estimate for arm, group in arms.items()}
    first_order = [arm for arm, group in arms.items() if not group["kfac"].any()]
    baseline = min(first_order, key=lambda arm: (medians[arm], arm), default="")
    of_kfac = [arm for arm in arms if arm not in first_order]
    named = [arm for arm in of_kfac if str(arms[arm]["method"].iloc[0]) == best_kfac]
    chosen = min(named or of_kfac, key=lambda arm: (medians[arm], arm), default="")
    rows = []
    for arm, group in arms.items():
        row: dict[str, Any] = {
            "study": point.study, "workload": point.workload, "model": point.model, "batch": point.batch,
            "precision": point.precision, "ranks": point.ranks, "arm": arm, "kfac": arm not in first_order,
            "runs": len(group), "reached": int(group["reached"].sum()), "median_seconds": medians[arm],
            "baseline": baseline, "chosen": arm == chosen,
        }  # fmt: skip
        if baseline and arm != baseline:
            base = arms[baseline]
            speedup = compared(base, group, "scored_seconds", len(arms) - 1)
            epochs = compared(base, group, "scored_epochs", len(arms) - 1)
            timed = [frame.dropna(subset="seconds_per_epoch") for frame in (group, base)]
            cost = compared(timed[0], timed[1], "seconds_per_epoch", len(arms) - 1)
            row |= _limits(speedup) | {"fewer_epochs": epochs.estimate, "cost_ratio": cost.estimate}
        rows.append(row)
    return sorted(rows, key=lambda row: (row["kfac"], row["median_seconds"], row["arm"]))


def _limits(speedup: Interval) -> dict[str, Any]:
    return {
        "speedup": speedup.estimate, "low": speedup.low, "high": speedup.high, "method": speedup.method,
    }  # fmt: skip


def tunings(study: Study) -> dict[str, Study]:
    """By name of a study, the trials that its methods were chosen from."""
    of_trials = study.cells[study.cells["trial"].notna()]
    return {
        str(sweep).replace(TUNING, ""): study.of_cells(set(group["cell"]))
        for sweep, group in of_trials.groupby("sweep", sort=True)
    }


def _best_tuned(study: Study, name: str) -> str:
    """The method of K-FAC with the best trial of the study's tuning; empty if there are no trials."""
    own = tunings(study).get(name)
    if own is None:
        return ""
    of_kfac = set(own.cells.loc[own.cells["strategy"].notna(), "method"])
    table = trials(own)
    table = table[table["method"].isin(of_kfac)].sort_values(["median_seconds", "method"], kind="stable")
    return str(table["method"].iloc[0]) if len(table) else ""
