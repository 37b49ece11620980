"""Energy of GPUs, from their driver's counters over every window."""

from __future__ import annotations

import pandas as pd

from analysis.metrics import time_to_accuracy
from analysis.records.study import Study


def energy_to_target(study: Study) -> pd.DataFrame:
    """Joules of all GPUs of every run that recorded energy: to its target, and in total.

    Columns beside those of `time_to_accuracy`: `joules` of the windows that began before the run reached its
    target, infinite if it did not; `all_joules`; and `watts`, the total over the wall time of the slowest
    rank's windows. Ranks that share a GPU would count it once each, so every rank needs its own GPU.
    """
    counted = study.devices.dropna(subset=["energy_joules"])
    scored = time_to_accuracy(study)
    scored = scored[scored["run"].isin(set(counted["run"].astype("str")))]
    crossings = study.evaluations.merge(scored[["run", "epochs"]], on="run")
    steps = crossings[crossings["epoch"] == crossings["epochs"]].groupby("run", observed=True)["step"].min()
    walls = study.windows.groupby(["run", "rank"], observed=True)["wall_seconds"].sum()
    rows = []
    for run, reached in zip(scored["run"], scored["reached"], strict=True):
        own = counted[counted["run"].astype("str") == run]
        until = own[own["first_step"] < steps.get(run, float("inf"))]["energy_joules"].sum()
        total = own["energy_joules"].sum()
        rows.append((run, until if reached else float("inf"), total, total / walls.loc[run].max()))
    return scored.merge(pd.DataFrame(rows, columns=["run", "joules", "all_joules", "watts"]), on="run")


def why_none(study: Study) -> str:
    """Why no run has recorded its energy: the reasons in the device records."""
    said = sorted(set(study.devices["reason"]) - {""})
    return "; ".join(said) if said else "their records are older than device records"
