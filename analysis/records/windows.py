"""Aggregates the rows of `Study.phases` by window and by rank, in passes over plain arrays.

The rows of a window are neighbours, so no grouping by key is needed; that is several times as fast for
millions of rows.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pandas as pd

from analysis.records.window_lines import OTHER

WINDOW = ["run", "rank", "first_step"]
SUMMED = ("seconds", "calls", "sent_bytes", "wait_seconds")


class Windows:
    """Rows of phases, aggregated.

    Args:
        phases: as in `Study.phases`; the rows of a window must be neighbours.
    """

    def __init__(self, phases: pd.DataFrame) -> None:
        self._phases = phases
        changed = np.ones(len(phases), dtype=bool)
        if len(phases):
            runs, ranks, steps = (_codes(phases[name]) for name in WINDOW)
            changed[1:] = (runs[1:] != runs[:-1]) | (ranks[1:] != ranks[:-1]) | (steps[1:] != steps[:-1])
        self._starts = np.flatnonzero(changed)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per rank and window: `steps`, `samples`, `wall_seconds`, `instrument_seconds`.

        Also `claimed_seconds`, the sum over all phases and `other`; `other_seconds`; and `counts`: whether
        costs are computed from the window (see `analysis.steps`).
        """
        phases = self._phases
        names = [*WINDOW, "steps", "samples", "wall_seconds", "instrument_seconds"]
        frame = phases[names].iloc[self._starts].reset_index(drop=True)
        seconds = phases["seconds"].to_numpy()
        others = np.where(phases["phase"] == OTHER, seconds, 0.0)
        for name, values in (("claimed_seconds", seconds), ("other_seconds", others)):
            frame[name] = np.add.reduceat(values, self._starts) if len(frame) else []
        whole = frame["steps"] == frame.groupby("run", observed=True)["steps"].transform("max")
        counts = whole & (frame["first_step"] > 0)
        has_some = counts.groupby(frame["run"], observed=True).transform("any").astype("bool")
        frame["counts"] = counts | ~has_some
        return frame

    @cached_property
    def counting(self) -> np.ndarray:
        """Mask over the rows of phases: those of windows that count."""
        lengths = np.diff(np.append(self._starts, len(self._phases)))
        return np.repeat(self.frame["counts"].to_numpy(dtype=bool), lengths)

    @cached_property
    def sums(self) -> pd.DataFrame:
        """One row per run, rank and phase: sums over the windows that count, NaN where not measured."""
        phases = self._phases
        rows = self.counting
        keys = phases[["run", "rank", "phase"]]
        runs, ranks, names = (_codes(keys[name])[rows].astype("int64") for name in keys)
        n_ranks, n_names = (int(codes.max(initial=0)) + 1 for codes in (ranks, names))
        key = (runs * n_ranks + ranks) * n_names + names
        present = np.bincount(key)
        cells = np.flatnonzero(present)
        first = np.zeros(len(present), dtype="int64")
        first[key[::-1]] = np.flatnonzero(rows)[::-1]  # the first row of each group
        table = keys.iloc[first[cells]].reset_index(drop=True)
        for name in SUMMED:
            table[name] = np.bincount(key, phases[name].to_numpy(dtype=float)[rows])[cells]
        return table


def _codes(column: pd.Series) -> np.ndarray:
    """Integer codes: equal values have equal codes."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return np.asarray(column.cat.codes)
    if pd.api.types.is_integer_dtype(column.dtype):
        return column.to_numpy()
    return np.asarray(pd.factorize(column)[0])
