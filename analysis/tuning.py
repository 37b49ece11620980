"""Trials of a sweep that tunes: which setting of each method is best, and how much that choice matters."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pandas as pd

from analysis.conditions import loads
from analysis.metrics import finals, time_to_accuracy
from analysis.records.study import Study

TRIAL_COLUMNS = [
    "method", "trial", "place", "runs", "reached", "median_seconds", "median_epochs", "best_value",
    "train_seconds", "state",
]  # fmt: skip


def has_trials(study: Study) -> bool:
    """Whether any cell is a trial."""
    return bool(study.cells["trial"].notna().any())


def trials(study: Study) -> pd.DataFrame:
    """One row per trial, best first within a method, and a column for every field that some trials vary.

    Columns: `place` (1 is the best), `runs` scored, `reached`, `median_seconds` and `median_epochs` to the
    target by `study.scoring` (infinite if the median run missed), `best_value` of the target's metric (median
    over runs), `train_seconds` spent on all runs, and `state`: COMPLETED, or those of the runs that are not.
    Order: median seconds, misses last and among themselves by their best value.
    """
    cells = study.cells[study.cells["trial"].notna()]
    scored = time_to_accuracy(study).set_index("run")
    best = finals(study).set_index("run")["best_value"]
    settings = _settings(study, cells)
    rows: list[dict[str, Any]] = []
    for key, group in cells.groupby(["method", "trial"], sort=False):
        method, trial = cast("tuple[str, int]", key)
        runs = scored.loc[[run for run in group["run"] if run in scored.index]]
        open_states = sorted(set(group["state"]) - {"COMPLETED"})
        damaged = group.loc[~group["valid"], "why"]
        rows.append(
            {
                "method": method,
                "trial": int(trial),
                "runs": len(runs),
                "reached": int(runs["reached"].sum()),
                "median_seconds": _median(runs["scored_seconds"]),
                "median_epochs": _median(runs["scored_epochs"]),
                "best_value": float(best.reindex(group["run"]).median()),
                "train_seconds": float(group["train_seconds"].sum()),
                "state": "damaged" if len(damaged) else ", ".join(open_states) or "COMPLETED",
                **settings[str(group["run"].iloc[0])],
            }
        )
    frame = pd.DataFrame(rows).sort_values("trial", kind="stable")
    directions = set(cells["target_direction"])
    sign = -1.0 if directions == {"higher"} else 1.0
    frame["badness"] = (frame["best_value"] * sign).fillna(math.inf)
    frame["seconds_order"] = frame["median_seconds"].fillna(math.inf)
    frame = frame.sort_values(["seconds_order", "badness", "trial"], kind="stable")
    frame["place"] = frame.groupby("method").cumcount() + 1
    order = {method: number for number, method in enumerate(cells["method"].drop_duplicates())}
    frame = frame.iloc[np.lexsort((frame["place"], frame["method"].map(order)))]
    tuned = [name for name in frame.columns if "." in name]
    return frame[[*TRIAL_COLUMNS, *tuned]].reset_index(drop=True)


def by_method(study: Study) -> pd.DataFrame:
    """One row per method: how its trials came out.

    Columns: `trials`, `reached` (trials whose median run reached the target), `best_seconds`,
    `median_seconds` and `worst_seconds` of the trials (a miss is infinite), `regret`: the median trial's
    seconds over the best's, which is what an untuned choice costs; `spent_seconds` on all trials.
    """
    rows = []
    table = trials(study)
    for method, group in table.groupby("method", sort=False):
        seconds = group["median_seconds"].fillna(math.inf)
        best, middle = float(seconds.min()), _median(seconds)
        rows.append(
            {
                "method": str(method),
                "trials": len(group),
                "reached": int(np.isfinite(seconds).sum()),
                "best_seconds": best,
                "median_seconds": middle,
                "worst_seconds": float(seconds.max()),
                "regret": middle / best if math.isfinite(best) else math.nan,
                "spent_seconds": float(group["train_seconds"].sum()),
            }
        )
    return pd.DataFrame(rows)


def slowed_trials(study: Study) -> pd.DataFrame:
    """Trials that would be their method's best but for other processes, if these cost as much as they took.

    Columns: `method`, `trial`, `median_seconds`, `load` (share of the CPUs of its most disturbed run that
    others had), `best` and `best_seconds` of the trial in the first place.
    """
    load = loads(study)
    cells = study.cells[study.cells["trial"].notna()]
    of_trial = (
        cells.assign(load=cells["run"].map(load).astype("float64")).groupby(["method", "trial"])["load"].max()
    )
    rows = []
    for method, group in trials(study).groupby("method", sort=False):
        best = group.iloc[0]
        for row in group.iloc[1:].to_dict("records"):
            share = float(of_trial[method, row["trial"]])
            if row["median_seconds"] * (1 - share) < best["median_seconds"] < math.inf:
                rows.append(
                    {
                        "method": method, "trial": row["trial"], "median_seconds": row["median_seconds"],
                        "load": share, "best": int(best["trial"]), "best_seconds": best["median_seconds"],
                    }
                )  # fmt: skip
    columns = ["method", "trial", "median_seconds", "load", "best", "best_seconds"]
    return pd.DataFrame(rows, columns=columns)


def slowed_words(slowed: pd.DataFrame) -> list[str]:
    """A sentence for each row of `slowed_trials`."""
    return [
        f"{row['method']}: trial {row['trial']} took {row['median_seconds']:.4g} s while others had "
        f"{row['load']:.0%} of its CPUs; without them it may be ahead of trial {row['best']} "
        f"({row['best_seconds']:.4g} s), the best"
        for row in slowed.to_dict("records")
    ]


def _median(values: pd.Series) -> float:
    """The median, in which infinities count: that of 1 and infinity is infinite."""
    return float(np.median(values)) if len(values) else math.nan


def _settings(study: Study, cells: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """By run, the fields that vary among the trials of its method."""
    fields = study.fields.set_index("run").loc[cells["run"]]
    columns = [
        name for name in fields.columns
        if "." in name and not name.startswith("target.")
    ]  # fmt: skip
    found: dict[str, dict[str, Any]] = {run: {} for run in cells["run"]}
    for _, group in cells.groupby("method", sort=False):
        own = fields.loc[group["run"], columns]
        varied = [name for name in columns if own[name].map(repr).nunique() > 1]
        for run, row in own[varied].iterrows():
            found[str(run)] = {str(name): value for name, value in row.items() if value is not None}
    return found
