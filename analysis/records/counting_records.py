"""Which records of a run count (`harness.runs.record_lines`), and whether any are missing or doubled.

A run whose records are incomplete is left out of all frames, and `Study.cells` says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pandas as pd

from analysis.records.run_files import RunFiles
from harness.runs.record_lines import last_step, segment_limits

Faults = dict[str, list[str]]
"""Sentences by run."""

COLUMNS = {
    "run": "str", "rank": "int64", "segment": "int64", "first_step": "int64", "away_seconds": "float64",
    "bitwise": "bool",
}  # fmt: skip


def are_effective(kind: str, rows: pd.DataFrame, segments: pd.DataFrame) -> pd.Series:
    """Whether each row counts, so that no step and no evaluation is in a table twice.

    Args:
        kind: of the records.
        rows: one record a row.
        segments: as in `COLUMNS`; a run without segments was never resumed.
    """
    first_steps: dict[str, dict[int, int]] = defaultdict(dict)
    for run, segment, step in segments[["run", "segment", "first_step"]].drop_duplicates().to_numpy():
        first_steps[run][segment] = min(step, first_steps[run].get(segment, step))
    limits = {
        (run, segment): limit
        for run, steps in first_steps.items()
        for segment, limit in segment_limits(steps).items()
    }
    if not limits:
        return pd.Series(data=True, index=rows.index)
    keys = pd.MultiIndex.from_arrays([rows["run"].astype("str"), rows["segment"]])
    limit = pd.Series(pd.Series(limits).reindex(keys).to_numpy(), index=rows.index).fillna(np.inf)
    effective: pd.Series = last_step(kind, rows) <= limit
    return effective


def incomplete(
    runs: Iterable[RunFiles], windows: pd.DataFrame, evaluations: pd.DataFrame, segments: pd.DataFrame
) -> Faults:
    """Runs with missing or doubled records, and what is wrong with each.

    The windows of every rank follow one another from step 0. In a completed run those of all ranks end at the
    step of the last evaluation.

    Args:
        runs: those whose files are not damaged.
        windows: those that count; a row per rank and window.
        evaluations: those that count, in the order written.
        segments: all starts of all ranks.
    """
    faults: Faults = defaultdict(list)
    rows = windows[["run", "rank", "first_step", "steps"]]
    writer = rows["run"].cat.codes.astype("int64") * (rows["rank"].max() + 1) + rows["rank"]
    rows = rows.assign(end=rows["first_step"] + rows["steps"], writer=writer)
    rows = rows.sort_values("writer", kind="stable")  # of several attempts, one after the other
    begins = rows["writer"] != rows["writer"].shift()
    rows["expected"] = rows["end"].shift(fill_value=0).mask(begins, 0)
    # A rank of a world of another size than before begins where that one ended.
    moved = rows["run"].isin(set(segments.loc[~segments["bitwise"], "run"])) & begins
    wrong = rows[(rows["first_step"] != rows["expected"]) & ~moved]
    for row in wrong.drop_duplicates("run").itertuples():
        faults[str(row.run)].append(
            f"rank {row.rank} has a window from step {row.first_step}, must be from step {row.expected}: "
            "records are missing, doubled or out of order"
        )
    ends: dict[str, dict[int, int]] = defaultdict(dict)
    last = rows["writer"] != rows["writer"].shift(-1)
    for run, rank, end in rows.loc[last, ["run", "rank", "end"]].to_numpy():
        ends[run][rank] = end
    evaluated = evaluations.groupby("run", observed=True)["step"].last()
    for files in runs:
        if files.completed and (why := _unfinished(files, ends[files.run], evaluated.get(files.run))):
            faults[files.run].append(why)
    return faults


def _unfinished(files: RunFiles, ends: dict[int, int], last_evaluation: float | None) -> str:
    """Why the records of a completed run do not reach its end; empty if they do."""
    if last_evaluation is None:
        return "state=COMPLETED, but there is no evaluation"
    for rank in sorted({*range(files.folder.cell().world_size), *ends}):
        if rank not in ends:
            return f"state=COMPLETED, but rank {rank} has no windows"
        if rank >= files.folder.cell().world_size or ends[rank] != last_evaluation:
            return f"rank {rank}'s windows end at step {ends[rank]}, the run's at {last_evaluation:g}"
    return ""


def segment_columns(segments: pd.DataFrame) -> pd.DataFrame:
    """Per run: `segments`, `away_seconds` between them, on no clock, and whether all are `bitwise`."""
    of_rank_0 = segments[segments["rank"] == 0].groupby("run")
    return pd.DataFrame(
        {
            "segments": of_rank_0["segment"].nunique(),
            "away_seconds": of_rank_0["away_seconds"].sum(),
            "bitwise": of_rank_0["bitwise"].all(),
        }
    )
