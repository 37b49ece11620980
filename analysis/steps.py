"""The cost of a step: seconds by phase, bytes sent, memory; and whether the phases add up to the wall time.

Costs are sums over windows divided by steps, which amortises K-FAC's periodic work; a median step would hide
the inverse. Only full windows count. The first one, which includes the warm-up, does not, unless a run has no
other window.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.records.study import Study, once_per_study
from analysis.records.window_lines import OTHER, keys_of

CLOSURE_LIMIT = 0.02
"""Largest residual of a window that closes, as a share of its wall time (our choice)."""

_PER_STEP = {"seconds": "seconds", "calls": "calls", "sent_bytes": "bytes", "wait_seconds": "wait_seconds"}
"""Mappings of a window, and what their sums over steps are called."""


def counting_windows(study: Study) -> pd.DataFrame:
    """The rows of `study.windows` that costs are computed from; see the module's docstring."""
    windows = study.windows
    by_run = windows.groupby("run", observed=True)
    counts = (windows["steps"] == by_run["steps"].transform("max")) & (windows["first_step"] > 0)
    has_some = counts.groupby(windows["run"], observed=True).transform("any").astype("bool")
    return windows[counts | ~has_some]


@once_per_study
def rank_sums(study: Study) -> pd.DataFrame:
    """One row per run and rank: sums over the windows that count, in the columns of `study.windows`.

    NaN for a phase that the rank did not have, and for waits unless they were measured in every window.
    """
    windows = counting_windows(study)
    by_rank = windows.groupby(["run", "rank"], observed=True)
    group, size = by_rank.ngroup().to_numpy(), by_rank.size()
    sums = {}
    for name in ("steps", "samples", "wall_seconds"):
        sums[name] = np.bincount(group, windows[name], len(size))  # whatever the frame's layout in memory
    for phase in keys_of(windows, "seconds"):
        absent = windows[f"seconds.{phase}"].isna().to_numpy()
        present = np.bincount(group[~absent], minlength=len(size)) > 0
        for mapping in _PER_STEP:
            if (name := f"{mapping}.{phase}") in windows:
                numbers = windows[name].to_numpy()
                known = numbers if mapping == "wait_seconds" else np.nan_to_num(numbers)
                total = np.bincount(group, np.where(absent, 0.0, known), len(size))
                sums[name] = np.where(present, total, np.nan)
    kinds = {"run": "str", "steps": "int64", "samples": "int64"}
    return pd.DataFrame(sums, index=size.index).reset_index().astype(kinds)


@once_per_study
def rank_speeds(study: Study) -> pd.DataFrame:
    """One row per run and rank: `seconds_per_step`, and the `steps`, `samples`, `wall_seconds` behind it."""
    frame = rank_sums(study)[["run", "rank", "steps", "samples", "wall_seconds"]]
    return frame.assign(seconds_per_step=frame["wall_seconds"] / frame["steps"])


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
    sums = rank_sums(study)
    phases = keys_of(sums, "seconds")
    parts = [sums.loc[:, ["run", "rank"]].iloc[:0]]
    for phase in phases:
        own = sums[sums[f"seconds.{phase}"].notna()]
        absent = pd.Series(np.nan, index=own.index)
        part = own[["run", "rank"]].assign(phase=phase)
        for mapping, name in _PER_STEP.items():
            part[f"{name}_per_step"] = own.get(f"{mapping}.{phase}", absent) / own["steps"]
        parts.append(part)
    frame = pd.concat(parts, ignore_index=True).reindex(columns=COST_COLUMNS)
    frame[COUNTS] = frame[COUNTS].fillna(0.0)
    frame["phase"] = pd.Categorical(frame["phase"], categories=phases)
    return frame.sort_values(["run", "rank", "phase"], kind="stable", ignore_index=True)


COUNTS = ["calls_per_step", "bytes_per_step"]
COST_COLUMNS = ["run", "rank", "phase", "seconds_per_step", *COUNTS, "wait_seconds_per_step"]


def waits(study: Study) -> pd.DataFrame:
    """One row per run and communication phase: `transfer` and `wait` seconds per step.

    Both are means over the ranks that take part, and amortised over all windows that count.

    If `measured`, the ranks synchronised before every collective (`split_wait` of the site): that time is
    waiting, the remainder transfer. Otherwise both are bounds: in each window, the rank that spends least in
    a phase waits least. Its seconds are an upper bound of the transfer, and the mean excess of the others is
    a lower bound of waiting.
    """
    counting = counting_windows(study)
    phases = [phase for phase in keys_of(counting, "seconds") if phase.endswith("_comm")]
    steps = counting.groupby(["run", "first_step"], observed=True)["steps"].max()
    by_run = steps.groupby("run", observed=True).sum()
    parts = [_waits(counting, phase, by_run) for phase in phases]
    columns = ["run", "phase", "transfer_seconds_per_step", "wait_seconds_per_step", "measured"]
    sums = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    sums = sums.astype({"run": "str", "phase": "str", "measured": "bool"})
    return sums.sort_values("run", kind="stable", ignore_index=True)[columns]


def _waits(counting: pd.DataFrame, phase: str, steps: pd.Series) -> pd.DataFrame:
    seconds, waited = f"seconds.{phase}", f"wait_seconds.{phase}"
    rows = counting[counting[seconds].notna()]
    by_window = rows.groupby(["run", "first_step"], observed=True)
    windows = by_window[seconds].agg(["min", "mean"])
    windows["wait"] = windows["mean"] - windows["min"]
    windows["measured"] = False
    if waited in rows:
        found = by_window[waited].agg(["mean", "count", "size"])
        windows["measured"] = found["count"] == found["size"]
        windows["wait"] = found["mean"].where(windows["measured"], windows["wait"])
    by_run = windows.groupby("run", observed=True)
    sums = by_run[["mean", "wait"]].sum()
    return pd.DataFrame(
        {
            "phase": phase,
            "transfer_seconds_per_step": (sums["mean"] - sums["wait"]) / steps.loc[sums.index],
            "wait_seconds_per_step": sums["wait"] / steps.loc[sums.index],
            "measured": by_run["measured"].all(),
        }
    ).reset_index()


def waits_measured(study: Study) -> pd.Series:
    """For every run that communicates: whether waiting was measured, not bounded; see `waits`."""
    costs = rank_phase_costs(study)
    moving = costs[costs["phase"].astype("str").str.endswith("_comm") & (costs["calls_per_step"] > 0)]
    measured: pd.Series = moving["wait_seconds_per_step"].notna().groupby(moving["run"]).all()
    return measured


def closure(study: Study) -> pd.DataFrame:
    """One row per rank and window: whether the phases add up to the wall time.

    `residual_share` is the difference between wall time and the sum of phases and `other`; a negative `other`
    (phases add up to more than the wall time) is residual too. `other_share` is `other` over wall time.
    """
    windows = study.windows
    names = ["run", "rank", "first_step", "steps", "wall_seconds", "instrument_seconds"]
    frame = windows.reindex(columns=names)
    phases = [windows[f"seconds.{phase}"].fillna(0.0) for phase in keys_of(windows, "seconds")]
    claimed = sum(phases, 0.0 * frame["wall_seconds"])
    frame["other_seconds"] = windows[f"seconds.{OTHER}"].fillna(0.0) if len(windows) else 0.0
    missing = (frame["wall_seconds"] - claimed).abs()
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


@once_per_study
def memory_peaks(study: Study) -> pd.DataFrame:
    """One row per run, rank and kind: the largest `bytes` of any window."""
    windows = study.windows
    columns = {f"memory_bytes.{kind}": kind for kind in keys_of(windows, "memory_bytes")}
    peaks = windows.groupby(["run", "rank"], observed=True)[list(columns)].max().rename(columns=columns)
    frame = peaks.reset_index().melt(["run", "rank"], var_name="kind", value_name="bytes")
    frame = frame.dropna(subset="bytes").astype({"run": "str", "kind": "str", "bytes": "float64"})
    return frame.sort_values(["run", "rank"], kind="stable", ignore_index=True)


def kfac_bytes(study: Study) -> pd.DataFrame:
    """One row per K-FAC run: `kfac_bytes`, its state on the rank with most."""
    peaks = memory_peaks(study)
    state = peaks[peaks["kind"].str.startswith("kfac_")]
    largest = state.groupby(["run", "rank"])["bytes"].sum().groupby("run").max()
    return largest.rename("kfac_bytes").reset_index().astype({"run": "str", "kfac_bytes": "float64"})


PEAKS = ("device_allocated_peak", "rss_peak")
"""Kinds of peak memory: the GPU allocator's if it was recorded, else the process's."""


def peak_bytes(study: Study) -> pd.DataFrame:
    """One row per run: the largest `peak_bytes` of any rank, and its `kind`."""
    peaks = memory_peaks(study)
    peaks = peaks[peaks["kind"].isin(PEAKS)]
    peaks = peaks.assign(order=peaks["kind"].map({kind: place for place, kind in enumerate(PEAKS)}))
    largest = peaks.groupby(["run", "order", "kind"])["bytes"].max().reset_index()
    return largest.drop_duplicates("run").rename(columns={"bytes": "peak_bytes"})[
        ["run", "kind", "peak_bytes"]
    ]
