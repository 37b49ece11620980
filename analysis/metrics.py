"""Time to accuracy, speed-up and scaling, from single runs to intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import numpy as np
import pandas as pd

from analysis.statistics import Interval, level, ratio
from analysis.steps import run_speeds
from analysis.tables import Study

Rule = Callable[[np.ndarray], int | None]
"""From "this evaluation was at or beyond the target", in time order, to the evaluation that counts."""

Clock = Literal["train", "wall"]
"""`train` leaves evaluation out (AlgoPerf's complaint #858); `wall` counts it (MLPerf)."""

BASE = "the base itself"
"""Why a base's speed-up over itself has no interval."""

IDENTITY = ["run", "arm", "setting", "method", "world_size", "seed", "state", "oversubscribed"]


def first_crossing(reached: np.ndarray) -> int | None:
    """The first evaluation at or beyond the target."""
    return int(reached.argmax()) if reached.any() else None


def sustained(k: int) -> Rule:
    """The first of `k` evaluations in a row at or beyond the target.

    Only runs with `stop_at_target: false` go on long enough to be scored by this.
    """

    def rule(reached: np.ndarray) -> int | None:
        starts = range(len(reached) - k + 1)
        return next((start for start in starts if reached[start : start + k].all()), None)

    return rule


def time_to_accuracy(study: Study, rule: Rule = first_crossing, clock: Clock = "train") -> pd.DataFrame:
    """When every run that has trained reached its target.

    Columns beside the run's identity: `reached`; `seconds` and `epochs` at the crossing or, for a run that
    missed, at its last evaluation (right-censored, never dropped); `seconds_per_epoch`, their quotient; and
    `scored_seconds`: `seconds`, with a miss as infinity, for medians.
    """
    histories = {str(run): rows for run, rows in study.evaluations.groupby("run", observed=True)}
    rows: list[dict[str, Any]] = []
    cells: Iterator[Any] = study.cells.itertuples(index=False)
    for cell in cells:
        history = histories.get(cell.run)
        if history is not None:
            rows.append({"run": cell.run} | _score(history, cell, rule, clock))
        elif cell.train_seconds > 0 and clock == "train":
            rows.append(
                {"run": cell.run, "reached": False, "seconds": cell.train_seconds, "epochs": math.nan}
            )
    scored = pd.DataFrame(rows, columns=["run", "reached", "seconds", "epochs"])
    scored = scored.astype({"run": "str", "reached": "bool", "seconds": "float64", "epochs": "float64"})
    scored["seconds_per_epoch"] = scored["seconds"] / scored["epochs"]
    scored["scored_seconds"] = scored["seconds"].where(scored["reached"], math.inf)
    return in_order(study, study.cells[IDENTITY].merge(scored, on="run"))


def _score(history: pd.DataFrame, cell: Any, rule: Rule, clock: Clock) -> dict[str, Any]:
    history = history[history["metric"] == cell.target_metric].sort_values("step")
    if history.empty:
        return {"reached": False, "seconds": math.nan, "epochs": math.nan}
    values = history["value"].to_numpy()
    higher = cell.target_direction == "higher"
    crossing = rule(values >= cell.target_value if higher else values <= cell.target_value)
    evaluation = history.iloc[-1 if crossing is None else crossing]
    return {
        "reached": crossing is not None,
        "seconds": evaluation[f"{clock}_seconds"],
        "epochs": evaluation["epoch"],
    }


def baselines(study: Study) -> dict[str, str]:
    """For every arm the first-order arm of the same setting that it is measured against, if there is one."""
    cells = study.cells
    first_order = cells[cells["strategy"].isna()].sort_values(["method", "arm"])
    of_setting = first_order.drop_duplicates("setting").set_index("setting")["arm"]
    arms = cells.drop_duplicates("arm").set_index("arm")["setting"].map(of_setting)
    return {str(arm): str(baseline) for arm, baseline in arms.dropna().items()}


def speedups_over_baseline(study: Study, scored: pd.DataFrame) -> dict[tuple[str, int], Interval]:
    """Time-to-accuracy of the baseline over that of the arm, by arm and world size.

    Args:
        study: where the baselines come from.
        scored: rows of `time_to_accuracy`.
    """
    seconds = {(arm, size): runs["scored_seconds"].tolist() for arm, size, runs in points(scored)}
    baseline = baselines(study)
    found = {}
    for (arm, world_size), values in seconds.items():
        against = baseline.get(arm)
        if against is not None and against != arm and (against, world_size) in seconds:
            found[arm, world_size] = ratio(seconds[against, world_size], values)
    return found


def scaling(study: Study) -> pd.DataFrame:
    """One row per run: `seconds_per_step` of the slowest rank, `samples_per_second` of all ranks."""
    columns = [*IDENTITY, "scaling", "global_batch_size"]
    return in_order(study, study.cells[columns].merge(run_speeds(study), on="run"))


def scaling_levels(study: Study) -> pd.DataFrame:
    """One row per arm and world size: step time, speed-up and efficiency as `Interval` objects.

    The base is the same arm at world size 1, or at its smallest where 1 was not run: `base_world_size`.
    Speed-up is the ratio of samples per second, which is right for strong scaling (same work, less time)
    and for weak scaling (more work, same time). Efficiency is speed-up over `world_size / base_world_size`.
    """
    rows = []
    for arm, runs in scaling(study).groupby("arm", sort=False):
        base_size = int(runs["world_size"].min())
        base = runs[runs["world_size"] == base_size]
        for _, size, group in points(runs):
            speedup = ratio(group["samples_per_second"].tolist(), base["samples_per_second"].tolist())
            if size == base_size:
                speedup = Interval(1.0, None, None, len(group), BASE)
            rows.append(
                {
                    "arm": arm,
                    "world_size": size,
                    "scaling": group["scaling"].iloc[0],
                    "seconds_per_step": level(group["seconds_per_step"].tolist()),
                    "speedup": speedup,
                    "efficiency": _scaled(speedup, base_size / size),
                    "base_world_size": base_size,
                    "base_seconds_per_step": level(base["seconds_per_step"].tolist()).estimate,
                    "oversubscribed": bool(group["oversubscribed"].any()),
                }
            )
    return pd.DataFrame(rows)


def points(frame: pd.DataFrame) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """The runs of every arm and world size, in the frame's order of arms."""
    for key, runs in frame.groupby(["arm", "world_size"], sort=False):
        arm, world_size = cast("tuple[str, int]", key)
        yield arm, int(world_size), runs


def in_order(study: Study, frame: pd.DataFrame) -> pd.DataFrame:
    """Rows sorted for showing: first-order arms before K-FAC's, then by name, world size and seed."""
    order = {arm: place for place, arm in enumerate(arm_order(study))}
    keys = pd.DataFrame({"arm": frame["arm"].map(order), "p": frame["world_size"], "s": frame["seed"]})
    return frame.loc[keys.sort_values(["arm", "p", "s"]).index].reset_index(drop=True)


def arm_order(study: Study) -> list[str]:
    """Arms in the order in which every table and figure shows them."""
    cells = study.cells
    keys = pd.DataFrame({"kfac": cells["strategy"].notna(), "setting": cells["setting"], "arm": cells["arm"]})
    return list(keys.sort_values(["setting", "kfac", "arm"])["arm"].drop_duplicates())


def _scaled(interval: Interval, factor: float) -> Interval:
    low = None if interval.low is None else interval.low * factor
    high = None if interval.high is None else interval.high * factor
    return Interval(interval.estimate * factor, low, high, interval.n, interval.method)
