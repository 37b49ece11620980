"""Runs that were stopped and resumed: which of their records count, and how they are marked.

A segment begins with a record that says at which step it goes on. What earlier segments wrote about later
steps was done again and does not count, so no step and no evaluation is in a table twice.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

COLUMNS = {
    "run": "str", "rank": "int64", "segment": "int64", "first_step": "int64", "away_seconds": "float64",
    "bitwise": "bool",
}  # fmt: skip


def standing(rows: pd.DataFrame, last_step: pd.Series, segments: pd.DataFrame) -> pd.Series:
    """Whether each row still counts: no later segment of its run began before the row's last step.

    Args:
        rows: with `run` and `segment`.
        last_step: steps taken when the row was written, one a row.
        segments: as in `COLUMNS`; a run without any was written in one piece.
    """
    starts = segments.groupby(["run", "segment"])["first_step"].min().sort_index(ascending=False)
    later = starts.groupby("run").cummin().groupby("run").shift(1)  # the least start of those after it
    if later.notna().sum() == 0:
        return pd.Series(data=True, index=rows.index)
    keys = pd.MultiIndex.from_arrays([rows["run"].astype("str"), rows["segment"]])
    limit = pd.Series(later.reindex(keys).to_numpy(), index=rows.index).fillna(np.inf)
    return last_step <= limit


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


def resumed_note(cells: pd.DataFrame) -> str:
    """A sentence for reports; empty where no run was resumed."""
    resumed = cells[cells["segments"] > 1]
    if resumed.empty:
        return ""
    note = (
        f"{len(resumed)} of {len(cells)} runs were stopped and resumed: their clocks add up over their "
        f"segments and leave out what lay between, at most {resumed['away_seconds'].max():.4g} s a run; the "
        "table of runs marks them."
    )
    moved = int((~resumed["bitwise"].astype("bool")).sum())
    return note if not moved else f"{note} {moved} went on in a world of another size, not bit for bit."
