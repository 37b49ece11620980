"""Whether runs had equal conditions: drift over the study, effects of order, equal work, disturbed blocks.

Forward and backward are the same work for all arms of one setting and world size. So where they take longer,
the machine was slower, and the seconds of other phases are not comparable either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd

from analysis.completeness import completed
from analysis.records.study import Study, once_per_study
from analysis.statistics.trend import Trend, trend
from analysis.steps import phase_costs, run_speeds

EQUAL_WORK_RATIO = 1.1
"""Largest ratio of equal work, between arms or between runs of a point, without a remark (our choice)."""

LOADED = 0.1
"""Largest share of a run's CPUs that others may have without a remark (our choice)."""

SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Reasons for a GPU's reduced clock that are a disturbance; a cap of its power is how it is run."""

POINT = ["arm", "world_size"]


@dataclass(frozen=True)
class Gap:
    """Equal work that differs between the arms of a setting and world size.

    Attributes:
        ratio: median seconds of forward and backward, of `slow` over `fast`.
    """

    world_size: int
    fast: str
    slow: str
    ratio: float
    setting: str


@once_per_study
def equal_work(study: Study) -> pd.DataFrame:
    """One row per completed run with windows: `work_seconds` of forward and backward a step, `step_seconds`.

    Both are those of the run's slowest rank. Beside them `run`, `arm`, `setting`, `world_size`, `seed`,
    `block`, `oversubscribed`, `started_at`; `pace`: `work_seconds` over the median of the run's point; and
    `load`: the share of the run's CPUs that others had, on the rank with most, NaN if it was not measured;
    `gpus_disturbed`: whether a window of a GPU had foreign processes or a reduced clock, see `SLOWED`.
    """
    columns = ["run", *POINT, "setting", "seed", "block", "oversubscribed", "started_at"]
    runs = study.cells[completed(study.cells)][columns]
    costs = phase_costs(study)
    work = costs[costs["phase"].isin(["forward", "backward"])].groupby("run")["seconds_per_step"].sum()
    steps = run_speeds(study).set_index("run")["seconds_per_step"]
    runs = runs.assign(
        work_seconds=runs["run"].map(work).astype("float64"),
        step_seconds=runs["run"].map(steps).astype("float64"),
    )
    runs = runs.dropna(subset=["work_seconds", "step_seconds", "started_at"])
    runs = runs[(runs["work_seconds"] > 0) & (runs["step_seconds"] > 0)].reset_index(drop=True)
    runs["pace"] = runs["work_seconds"] / runs.groupby(POINT)["work_seconds"].transform("median")
    gpus = runs["run"].isin(set(study.devices[_on_gpus(study.devices)]["run"]))
    return runs.assign(load=runs["run"].map(loads(study)).astype("float64"), gpus_disturbed=gpus)


def loads(study: Study) -> pd.Series:
    """Share of its CPUs that a run lost to other processes and the hypervisor, on the rank that lost most."""
    windows = study.windows
    kinds = ["load_seconds.capacity", "load_seconds.foreign", "load_seconds.steal"]
    if kinds[0] not in windows:
        return pd.Series(dtype="float64")
    sums = windows[windows[kinds[0]].notna()].groupby(["run", "rank"], observed=True)[kinds].sum()
    capacity, foreign, steal = (sums[kind] for kind in kinds)
    shares = (foreign + steal) / capacity.where(capacity > 0)
    most = shares.groupby("run", observed=True).max()
    return pd.Series(most.to_numpy(), index=most.index.astype("str"))


def gaps(runs: pd.DataFrame) -> list[Gap]:
    """Settings and world sizes whose arms differ in equal work by more than `EQUAL_WORK_RATIO`.

    Args:
        runs: rows of `equal_work`.
    """
    found = []
    for (setting, size), group in runs[~runs["oversubscribed"]].groupby(
        ["setting", "world_size"], sort=False
    ):
        medians = group.groupby("arm")["work_seconds"].median().sort_values()
        ratio = float(medians.iloc[-1] / medians.iloc[0])
        if ratio > EQUAL_WORK_RATIO:
            fast, slow = str(medians.index[0]), str(medians.index[-1])
            found.append(Gap(int(cast("int", size)), fast, slow, ratio, str(setting)))
    return found


def drift(runs: pd.DataFrame) -> Trend:
    """Trend of the seconds of a step over the study, of runs of the same arm and world size."""
    points = runs[~runs["oversubscribed"]].groupby(POINT)
    return trend((one["started_at"].tolist(), np.log(one["step_seconds"]).tolist()) for _, one in points)


def order_effect(runs: pd.DataFrame) -> Trend:
    """Trend of the seconds of a step over the places of a block, relative to the arm's usual seconds."""
    judged = runs[~runs["oversubscribed"] & (runs["block"] != "")]
    typical = judged.groupby(POINT)["step_seconds"].transform("median")
    judged = judged.assign(
        pace=np.log(judged["step_seconds"] / typical), place=judged.groupby("block")["started_at"].rank()
    )
    return trend((one["place"].tolist(), one["pace"].tolist()) for _, one in judged.groupby("block"))


def disturbed(runs: pd.DataFrame) -> pd.Series:
    """Mask: the runs whose equal work took too long, or whose load was high.

    Too long is more than `EQUAL_WORK_RATIO` times the median of the arm and world size, of at least three
    runs, for with two it does not say which was disturbed. A high load is above `LOADED`, where it was
    measured. A disturbed GPU counts, too.
    """
    enough = runs.groupby(POINT)["run"].transform("size") >= 3
    others = (runs["load"] > LOADED) | runs["gpus_disturbed"]
    mask: pd.Series = ((enough & (runs["pace"] > EQUAL_WORK_RATIO)) | others) & ~runs["oversubscribed"]
    return mask


def disturbed_blocks(runs: pd.DataFrame) -> list[str]:
    """The blocks of disturbed runs."""
    return sorted(set(runs[disturbed(runs)]["block"]) - {""})


def cells_to_repeat(study: Study) -> set[str]:
    """Ids of the cells of disturbed blocks, and of disturbed runs that are in no block."""
    runs = equal_work(study)
    cells = study.cells
    alone = cells["run"].isin(runs[disturbed(runs)]["run"])
    return set(cells[alone | cells["block"].isin(disturbed_blocks(runs))]["cell"])


def _on_gpus(devices: pd.DataFrame) -> pd.Series:
    """Mask: windows in which something disturbed the GPU."""
    slowed = devices["throttle_reasons"].map(lambda reasons: bool(set(reasons.split()) & set(SLOWED)))
    return slowed.astype("bool") | (devices["foreign_processes"] != "")


def without_disturbed(study: Study, runs: pd.DataFrame) -> Study:
    """The study without disturbed runs and without all runs of their blocks."""
    cells = study.cells
    dropped = cells["run"].isin(runs[disturbed(runs)]["run"]) | cells["block"].isin(disturbed_blocks(runs))
    return study.only(~dropped)
