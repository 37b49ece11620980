"""What a step costs: seconds by phase, bytes sent, memory; and whether the instrument's parts add up.

Costs are sums over windows divided by steps, so that K-FAC's periodic work is amortised; a median step
would hide the inverse. Only whole windows count, and the first, which holds the warm-up, does not; where a
run has no other window, all of its windows count.
"""

from __future__ import annotations

import pandas as pd

from analysis.record_files import OTHER
from analysis.study import Study

WINDOW = ["run", "rank", "first_step"]

CLOSURE_LIMIT = 0.02
"""Largest share of a window's wall time by which its phases may miss it (practice of this project)."""


def rank_speeds(study: Study) -> pd.DataFrame:
    """One row per run and rank: `seconds_per_step`, and the `steps`, `samples`, `wall_seconds` behind it."""
    windows = counting_windows(study).drop_duplicates(WINDOW)
    sums = windows.groupby(["run", "rank"], observed=True)[["steps", "samples", "wall_seconds"]].sum()
    frame = sums.reset_index()
    frame["run"] = frame["run"].astype("str")
    frame["seconds_per_step"] = frame["wall_seconds"] / frame["steps"]
    return frame


def run_speeds(study: Study) -> pd.DataFrame:
    """One row per run: `seconds_per_step` of its `slowest_rank`, `samples_per_second` of all ranks."""
    ranks = rank_speeds(study)
    slowest = ranks.loc[ranks.groupby("run")["seconds_per_step"].idxmax()]
    samples = ranks.groupby("run")["samples"].sum()
    frame = slowest[["run", "rank", "seconds_per_step", "steps", "wall_seconds"]].rename(
        columns={"rank": "slowest_rank"}
    )
    frame["samples_per_second"] = frame["run"].map(samples).astype("float64") / frame.pop("wall_seconds")
    return frame.reset_index(drop=True)


def phase_costs(study: Study) -> pd.DataFrame:
    """One row per run and phase, on the run's slowest rank: seconds, calls and bytes sent, each per step."""
    ranks = rank_phase_costs(study)
    slowest = run_speeds(study).set_index("run")["slowest_rank"]
    own = ranks[ranks["rank"] == ranks["run"].map(slowest)]
    return own.drop(columns="rank").reset_index(drop=True)


def rank_phase_costs(study: Study) -> pd.DataFrame:
    """One row per run, rank and phase: seconds, calls and bytes sent, each per step."""
    phases = counting_windows(study)
    ranks = ["run", "rank"]
    by_phase = phases.groupby([*ranks, "phase"], observed=True)
    sums = by_phase[["seconds", "calls", "sent_bytes"]].sum().reset_index()
    steps = phases.drop_duplicates(WINDOW).groupby(ranks, observed=True)["steps"].sum()
    divisor = sums.merge(steps.rename("divisor").reset_index(), on=ranks, how="left")["divisor"]
    for name in ("seconds", "calls", "sent_bytes"):
        sums[f"{name}_per_step"] = sums.pop(name) / divisor
    sums["run"] = sums["run"].astype("str")
    return sums.rename(columns={"sent_bytes_per_step": "bytes_per_step"})


def waits(study: Study) -> pd.DataFrame:
    """One row per run and communication phase: `transfer` and `wait` seconds per step, by window.

    In each window the rank that spends least in a phase waits least: its seconds are an upper bound of what
    moving takes, and what the others spend beyond it, on average, is a lower bound of waiting for late ranks.
    """
    phases = counting_windows(study)
    phases = phases[phases["phase"].astype("str").str.endswith("_comm")]
    by_window = phases.groupby(["run", "phase", "first_step"], observed=True)
    windows = by_window["seconds"].agg(["min", "mean"]).reset_index()
    windows["steps"] = by_window["steps"].max().to_numpy()
    sums = windows.groupby(["run", "phase"], observed=True)[["min", "mean", "steps"]].sum().reset_index()
    sums["transfer_seconds_per_step"] = sums["min"] / sums["steps"]
    sums["wait_seconds_per_step"] = (sums["mean"] - sums["min"]) / sums["steps"]
    kept = ["run", "phase", "transfer_seconds_per_step", "wait_seconds_per_step"]
    return sums[kept].astype({"run": "str", "phase": "str"})


def memory_peaks(study: Study) -> pd.DataFrame:
    """One row per run, rank and kind: the largest `bytes` of any window."""
    peaks = study.memory.groupby(["run", "rank", "kind"], observed=True)["bytes"].max().reset_index()
    return peaks.astype({"run": "str", "kind": "str"})


def closure(study: Study) -> pd.DataFrame:
    """One row per rank and window: do the phases add up to the wall time?

    `residual_share` is how far phases and `other` together lie from the wall; where `other` is negative,
    phases claim more than there was, and that counts as residual too. `other_share` is `other` over wall.
    """
    phases = study.phases
    windows = phases.groupby(WINDOW, observed=True)
    frame = windows[["wall_seconds"]].first()
    frame["claimed_seconds"] = windows["seconds"].sum()
    other = phases[phases["phase"] == OTHER].groupby(WINDOW, observed=True)["seconds"].sum()
    frame["other_seconds"] = other.reindex(frame.index).fillna(0.0)
    missing = (frame["wall_seconds"] - frame["claimed_seconds"]).abs()
    excess = -frame["other_seconds"].clip(upper=0)
    frame["residual_share"] = (missing + excess) / frame["wall_seconds"]
    frame["other_share"] = frame["other_seconds"].clip(lower=0) / frame["wall_seconds"]
    frame["closes"] = frame["residual_share"] <= CLOSURE_LIMIT
    return frame.reset_index().astype({"run": "str"})


def counting_windows(study: Study) -> pd.DataFrame:
    """The rows of `study.phases` that costs are computed from; see the head of this module."""
    phases = study.phases
    whole = phases["steps"] == phases.groupby("run", observed=True)["steps"].transform("max")
    counts = whole & (phases["first_step"] > 0)
    run_has_some = counts.groupby(phases["run"], observed=True).transform("any")
    return phases[counts | ~run_has_some]


def kfac_bytes(study: Study) -> pd.DataFrame:
    """One row per K-FAC run: `kfac_bytes`, its state on the rank that holds most."""
    peaks = memory_peaks(study)
    state = peaks[peaks["kind"].str.startswith("kfac_")]
    largest = state.groupby(["run", "rank"])["bytes"].sum().groupby("run").max()
    return largest.rename("kfac_bytes").reset_index().astype({"run": "str", "kfac_bytes": "float64"})


PEAKS = ("device_allocated_peak", "rss_peak")
"""What a rank needs at most: the allocator's peak on a GPU where it was recorded, else the process's."""


def peak_bytes(study: Study) -> pd.DataFrame:
    """One row per run: `peak_bytes` of the rank that needs most, and its `kind`."""
    peaks = memory_peaks(study)
    peaks = peaks[peaks["kind"].isin(PEAKS)]
    peaks = peaks.assign(order=peaks["kind"].map({kind: place for place, kind in enumerate(PEAKS)}))
    largest = (
        peaks.groupby(["run", "order", "kind"])["bytes"].max().reset_index().sort_values(["run", "order"])
    )
    return largest.drop_duplicates("run").rename(columns={"bytes": "peak_bytes"})[
        ["run", "kind", "peak_bytes"]
    ]
