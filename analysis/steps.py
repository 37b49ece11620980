"""The cost of a step: seconds by phase, bytes sent, memory; and whether the phases add up to the wall time.

Costs are sums over windows divided by steps, which amortises K-FAC's periodic work; a median step would hide
the inverse. Only full windows count. The first one, which includes the warm-up, does not, unless a run has no
other window.
"""

from __future__ import annotations

import pandas as pd

from analysis.records.study import Study, once_per_study
from analysis.records.windows import SUMMED

CLOSURE_LIMIT = 0.02
"""Largest residual of a window that closes, as a share of its wall time (our choice)."""


@once_per_study
def rank_speeds(study: Study) -> pd.DataFrame:
    """One row per run and rank: `seconds_per_step`, and the `steps`, `samples`, `wall_seconds` behind it."""
    windows = study.windows.frame
    summed = ["steps", "samples", "wall_seconds"]
    sums = windows[windows["counts"]].groupby(["run", "rank"], observed=True)[summed].sum()
    frame = sums.reset_index()
    frame["run"] = frame["run"].astype("str")
    frame["seconds_per_step"] = frame["wall_seconds"] / frame["steps"]
    return frame


@once_per_study
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


@once_per_study
def phase_costs(study: Study) -> pd.DataFrame:
    """One row per run and phase, on the run's slowest rank: seconds, calls and bytes sent, each per step."""
    ranks = rank_phase_costs(study)
    slowest = run_speeds(study).set_index("run")["slowest_rank"]
    own = ranks[ranks["rank"] == ranks["run"].map(slowest)]
    return own.drop(columns="rank").reset_index(drop=True)


@once_per_study
def rank_phase_costs(study: Study) -> pd.DataFrame:
    """One row per run, rank and phase: seconds, calls, bytes sent and waiting, each per step."""
    sums = study.windows.sums.astype({"run": "str"})
    steps = rank_speeds(study)[["run", "rank", "steps"]].rename(columns={"steps": "divisor"})
    divisor = sums.merge(steps, on=["run", "rank"], how="left")["divisor"]
    for name in SUMMED:
        sums[f"{name}_per_step"] = sums.pop(name) / divisor
    return sums.rename(columns={"sent_bytes_per_step": "bytes_per_step"})


def waits(study: Study) -> pd.DataFrame:
    """One row per run and communication phase: `transfer` and `wait` seconds per step, mean over ranks.

    If `measured`, the ranks synchronised before every collective (`split_wait` of the site): that time is
    waiting, the remainder transfer. Otherwise both are bounds: in each window, the rank that spends least in
    a phase waits least. Its seconds are an upper bound of the transfer, and the mean excess of the others is
    a lower bound of waiting.
    """
    phases = counting_windows(study)
    phases = phases[phases["phase"].astype("str").str.endswith("_comm")]
    by_window = phases.groupby(["run", "phase", "first_step"], observed=True)
    windows = by_window["seconds"].agg(["min", "mean"]).reset_index()
    windows["steps"] = by_window["steps"].max().to_numpy()
    waited = by_window["wait_seconds"].agg(["mean", "count", "size"])
    windows["wait"] = waited["mean"].where(waited["count"] == waited["size"]).to_numpy()
    windows["measured"] = windows["wait"].notna()
    windows["wait"] = windows["wait"].fillna(windows["mean"] - windows["min"])
    by_run = windows.groupby(["run", "phase"], observed=True)
    sums = by_run[["mean", "wait", "steps"]].sum().reset_index()
    sums["measured"] = by_run["measured"].all().to_numpy()
    sums["transfer_seconds_per_step"] = (sums["mean"] - sums["wait"]) / sums["steps"]
    sums["wait_seconds_per_step"] = sums["wait"] / sums["steps"]
    kept = ["run", "phase", "transfer_seconds_per_step", "wait_seconds_per_step", "measured"]
    return sums[kept].astype({"run": "str", "phase": "str", "measured": "bool"})


def waits_measured(study: Study) -> pd.Series:
    """For every run that communicates: whether waiting was measured, not bounded; see `waits`."""
    sums = study.windows.sums
    moving = sums[sums["phase"].astype("str").str.endswith("_comm") & (sums["calls"] > 0)]
    return moving["wait_seconds"].notna().groupby(moving["run"].astype("str")).all()


def closure(study: Study) -> pd.DataFrame:
    """One row per rank and window: whether the phases add up to the wall time.

    `residual_share` is the difference between wall time and the sum of phases and `other`; a negative `other`
    (phases add up to more than the wall time) is residual too. `other_share` is `other` over wall time.
    """
    frame = study.windows.frame.copy()
    missing = (frame["wall_seconds"] - frame["claimed_seconds"]).abs()
    excess = -frame["other_seconds"].clip(upper=0)
    frame["residual_share"] = (missing + excess) / frame["wall_seconds"]
    frame["other_share"] = frame["other_seconds"].clip(lower=0) / frame["wall_seconds"]
    frame["closes"] = frame["residual_share"] <= CLOSURE_LIMIT
    return frame


def run_closure(study: Study) -> pd.DataFrame:
    """One row per run: how well its windows close, and the cost of the timers.

    Columns: `windows`, how many are `open`, the `worst` residual share; the `wall_seconds`, `other_seconds`
    and `steps` of all ranks' windows; `instrument_seconds` of those in which it was measured, NaN if none,
    and those windows' `instrument_wall_seconds` and `instrument_steps`.
    """
    windows = closure(study)
    known = windows["instrument_seconds"].notna()
    windows = windows.assign(
        open=~windows["closes"],
        other_seconds=windows["other_seconds"].clip(lower=0),
        instrument_wall_seconds=windows["wall_seconds"].where(known),
        instrument_steps=windows["steps"].where(known),
    )
    by_run = windows.groupby("run", observed=True)
    summed = ["open", "wall_seconds", "other_seconds", "steps"]
    frame = by_run[summed].sum()
    measured = ["instrument_seconds", "instrument_wall_seconds", "instrument_steps"]
    frame[measured] = by_run[measured].sum(min_count=1)
    frame["windows"] = by_run.size()
    frame["worst"] = by_run["residual_share"].max()
    return frame.reset_index().astype({"run": "str"})


def counting_windows(study: Study) -> pd.DataFrame:
    """The rows of `study.phases` that costs are computed from; see the module's docstring."""
    return study.phases[study.windows.counting]


def kfac_bytes(study: Study) -> pd.DataFrame:
    """One row per K-FAC run: `kfac_bytes`, its state on the rank with most."""
    peaks = study.memory_peaks
    state = peaks[peaks["kind"].str.startswith("kfac_")]
    largest = state.groupby(["run", "rank"])["bytes"].sum().groupby("run").max()
    return largest.rename("kfac_bytes").reset_index().astype({"run": "str", "kfac_bytes": "float64"})


PEAKS = ("device_allocated_peak", "rss_peak")
"""Kinds of peak memory: the GPU allocator's if it was recorded, else the process's."""


def peak_bytes(study: Study) -> pd.DataFrame:
    """One row per run: the largest `peak_bytes` of any rank, and its `kind`."""
    peaks = study.memory_peaks
    peaks = peaks[peaks["kind"].isin(PEAKS)]
    peaks = peaks.assign(order=peaks["kind"].map({kind: place for place, kind in enumerate(PEAKS)}))
    largest = (
        peaks.groupby(["run", "order", "kind"])["bytes"].max().reset_index().sort_values(["run", "order"])
    )
    return largest.drop_duplicates("run").rename(columns={"bytes": "peak_bytes"})[
        ["run", "kind", "peak_bytes"]
    ]
