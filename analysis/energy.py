"""Energy of GPUs, from what their driver counted over every window."""

from __future__ import annotations

import pandas as pd

from analysis.metrics import time_to_accuracy
from analysis.study import Study


def energy_to_target(study: Study) -> pd.DataFrame:
    """Joules of all GPUs of every run that counted them: to its target, and in all.

    Columns beside those of `time_to_accuracy`: `joules` of the windows that began before the run reached its
    target, infinite where it did not; `all_joules`; and `watts`, all of them over the slowest rank's windows'
    wall time. Ranks that share a GPU count it once each, so a run has to have a GPU a rank.
    """
    counted = study.devices.dropna(subset=["energy_joules"])
    scored = time_to_accuracy(study)
    scored = scored[scored["run"].isin(set(counted["run"].astype("str")))]
    crossings = study.evaluations.merge(scored[["run", "epochs"]], on="run")
    steps = crossings[crossings["epoch"] == crossings["epochs"]].groupby("run", observed=True)["step"].min()
    windows = study.phases.drop_duplicates(["run", "rank", "first_step"])
    walls = windows.groupby(["run", "rank"], observed=True)["wall_seconds"].sum()
    rows = []
    for run, reached in zip(scored["run"], scored["reached"], strict=True):
        own = counted[counted["run"].astype("str") == run]
        until = own[own["first_step"] < steps.get(run, float("inf"))]["energy_joules"].sum()
        total = own["energy_joules"].sum()
        rows.append((run, until if reached else float("inf"), total, total / walls.loc[run].max()))
    return scored.merge(pd.DataFrame(rows, columns=["run", "joules", "all_joules", "watts"]), on="run")


def why_none(study: Study) -> str:
    """Why no run has counted its energy, as the runs themselves say."""
    said = sorted(set(study.devices["reason"]) - {""})
    return "; ".join(said) if said else "their records are of before devices were read"
