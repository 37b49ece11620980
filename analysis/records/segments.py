"""Resumed runs: which of their records count (`harness.runs.effective_records`), and how tables mark them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pandas as pd

from harness.runs.effective_records import last_step, segment_limits

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
