"""Time to accuracy and scaling, from single runs to intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd

from analysis.comparisons import compared, points
from analysis.completeness import completed
from analysis.records.study import Study, once_per_study
from analysis.rules import CLOCKS, Scoring
from analysis.statistics.intervals import Interval, level
from analysis.steps import run_speeds

BASE = "the base itself"
"""Method of the base's own speed-up, which has no interval."""

IDENTITY = ["run", "arm", "setting", "method", "world_size", "seed", "state", "oversubscribed", "block"]

FINAL_COLUMNS = [
    *IDENTITY, "global_batch_size", "workload", "metric", "value", "best_value", "train_seconds", "epochs",
    "fixed_length",
]  # fmt: skip


History = Mapping[str, np.ndarray]
"""The evaluations of a run as arrays: a frame for each would cost more than what is computed from it."""


@once_per_study
def time_to_accuracy(study: Study) -> pd.DataFrame:
    """When every completed run reached its target, by `study.scoring`; see `analysis.completeness`.

    Columns beside the run's identity: `reached`; `seconds` and `epochs` at the crossing or, for a run that
    missed, at its last evaluation (right-censored, never dropped); `seconds_per_epoch`, their quotient; and
    `scored_seconds` and `scored_epochs`: the same with a miss as infinity, for medians. A run without an
    evaluation missed, on every clock. If the rule requires more evaluations in a row than a run has, because
    it stopped at its first crossing, all runs of its arm and world size are left out: those that did not stop
    are the ones that missed.
    """
    clock = CLOCKS[study.scoring.clock].seconds(study.evaluations)
    evaluations = study.evaluations.assign(seconds=clock).sort_values("step", kind="stable")
    by_run = _histories(evaluations, ("metric", "value", "epoch", "seconds"))
    rows: list[dict[str, Any]] = []
    unscorable = set()
    cells: Iterator[Any] = study.cells[completed(study.cells)].itertuples(index=False)
    for cell in cells:
        one = _score(by_run.get(cell.run), cell, study.scoring)
        if one is None:
            unscorable.add((cell.arm, cell.world_size))
        else:
            rows.append({"run": cell.run, **one})
    scored = pd.DataFrame(rows, columns=["run", "reached", "seconds", "epochs"])
    scored = scored.astype({"run": "str", "reached": "bool", "seconds": "float64", "epochs": "float64"})
    scored["seconds_per_epoch"] = scored["seconds"] / scored["epochs"]
    for name in ("seconds", "epochs"):
        scored[f"scored_{name}"] = scored[name].where(scored["reached"], math.inf)
    found = study.cells[IDENTITY].merge(scored, on="run")
    points_of = pd.Series(list(zip(found["arm"], found["world_size"], strict=True)), dtype="object")
    return in_order(study, found[~points_of.isin(unscorable).to_numpy(dtype=bool)].reset_index(drop=True))


def _histories(evaluations: pd.DataFrame, columns: Sequence[str]) -> dict[str, History]:
    """By run, these columns of its evaluations."""
    arrays = {name: evaluations[name].to_numpy("object" if name == "metric" else None) for name in columns}
    places = evaluations.groupby("run", observed=True).indices
    return {str(run): {name: values[at] for name, values in arrays.items()} for run, at in places.items()}


def _score(history: History | None, cell: Any, scoring: Scoring) -> dict[str, Any] | None:
    """The score of a completed run; None if the rule needs evaluations that it was not to have."""
    measured = np.empty(0) if history is None else history["metric"]
    places = np.flatnonzero(measured == cell.target_metric)
    if history is None or not len(places):
        seconds = cell.train_seconds if scoring.clock == "train" else math.nan
        return {"reached": False, "seconds": seconds, "epochs": math.nan}
    values = history["value"][places]
    higher = cell.target_direction == "higher"
    crossing = scoring.rule(values >= cell.target_value if higher else values <= cell.target_value)
    if crossing is None and scoring.rule.in_a_row > 1 and cell.stop_reason == "target":
        return None
    place = places[-1 if crossing is None else crossing]
    return {
        "reached": crossing is not None,
        "seconds": float(history["seconds"][place]),
        "epochs": float(history["epoch"][place]),
    }


def aggregated(study: Study) -> pd.DataFrame:
    """One row per arm and world size, or method where the rule pools arms: `seconds` by `study.scoring`."""
    scored = time_to_accuracy(study)
    by = "method" if study.scoring.pools_arms else "arm"
    trials = scored.groupby(["setting", "world_size", "method"])["arm"].nunique().groupby(level=[0, 1])
    fair = (trials.min() == trials.max()).to_dict()
    rows = []
    for key, runs in scored.groupby([by, "setting", "world_size"], sort=False):
        name, setting, size = cast("tuple[str, str, int]", key)
        comparable = fair[setting, size] or not study.scoring.pools_arms
        seconds = study.scoring.aggregate(runs) if comparable else math.nan
        rows.append(
            {by: name, "setting": setting, "world_size": int(size), "runs": len(runs), "seconds": seconds}
        )
    return pd.DataFrame(rows, columns=[by, "setting", "world_size", "runs", "seconds"])


def scaling(study: Study) -> pd.DataFrame:
    """One row per run: `seconds_per_step` of the slowest rank, `samples_per_second` of all ranks."""
    columns = [*IDENTITY, "scaling", "global_batch_size"]
    return in_order(study, study.cells[columns].merge(run_speeds(study), on="run"))


def scaling_levels(study: Study) -> pd.DataFrame:
    """One row per arm and world size: step time, speed-up and efficiency as `Interval` objects.

    The base is the same arm at world size 1 or, without such runs, at its smallest: `base_world_size`.
    Speed-up is the ratio of samples per second, which suits strong scaling (same work, less time) and
    weak scaling (more work, same time). Efficiency is speed-up over `world_size / base_world_size`.
    """
    rows = []
    for arm, runs in scaling(study).groupby("arm", sort=False):
        base_size = int(runs["world_size"].min())
        base = runs[runs["world_size"] == base_size]
        for _, size, group in points(runs):
            speedup = compared(group, base, "samples_per_second")
            if size == base_size:
                speedup = Interval(1.0, None, None, len(group), BASE)
            rows.append(
                {
                    "arm": arm,
                    "world_size": size,
                    "scaling": group["scaling"].iloc[0],
                    "seconds_per_step": level(group["seconds_per_step"].tolist()),
                    "speedup": speedup,
                    "efficiency": speedup.scaled(base_size / size),
                    "base_world_size": base_size,
                    "base_seconds_per_step": level(base["seconds_per_step"].tolist()).estimate,
                    "oversubscribed": bool(group["oversubscribed"].any()),
                }
            )
    return pd.DataFrame(rows)


def in_order(study: Study, frame: pd.DataFrame) -> pd.DataFrame:
    """Rows in display order: first-order arms before K-FAC's, then by name, world size and seed."""
    order = {arm: place for place, arm in enumerate(arm_order(study))}
    keys = pd.DataFrame({"arm": frame["arm"].map(order), "p": frame["world_size"], "s": frame["seed"]})
    return frame.loc[keys.sort_values(["arm", "p", "s"]).index].reset_index(drop=True)


def kfac_cells(study: Study) -> pd.Series:
    """Mask over `study.cells`: the cells that use K-FAC."""
    return study.cells["strategy"].notna()


def arm_order(study: Study) -> list[str]:
    """Arms in the order in which every table and figure shows them."""
    cells = study.cells
    keys = pd.DataFrame({"kfac": cells["strategy"].notna(), "setting": cells["setting"], "arm": cells["arm"]})
    return list(keys.sort_values(["setting", "kfac", "arm"])["arm"].drop_duplicates())


def finals(study: Study) -> pd.DataFrame:
    """One row per completed run with an evaluation: the target's metric and the clocks at the last one.

    Columns beside the run's identity: `value`, `best_value`, `train_seconds`, `epochs`, `fixed_length`:
    whether the run continued after its target, so that its last value is not just the target.
    """
    cells = study.cells[completed(study.cells)]
    rows = study.evaluations.astype({"run": "str"}).merge(
        cells[["run", "target_metric", "target_direction"]], on="run"
    )
    rows = rows[rows["metric"] == rows["target_metric"]].sort_values(["run", "step"])
    if rows.empty:
        return pd.DataFrame(columns=FINAL_COLUMNS).astype({"fixed_length": "bool"})
    last = rows.drop_duplicates("run", keep="last").set_index("run")
    frame = last[["metric", "value", "train_seconds"]].assign(epochs=last["epoch"])
    sign = last["target_direction"].map({"higher": 1.0, "lower": -1.0})
    signed = rows["value"] * rows["run"].map(sign)
    frame["best_value"] = signed.groupby(rows["run"]).max() * sign
    fixed = study.value_of("training.stop_at_target").eq(False)[cells.index]
    frame["fixed_length"] = frame.index.map(dict(zip(cells["run"], fixed, strict=True)))
    merged = cells[[*IDENTITY, "global_batch_size", "workload"]].merge(frame.reset_index(), on="run")
    return in_order(study, merged[FINAL_COLUMNS])
