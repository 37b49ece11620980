"""Wide columns to long frames: one row per cell that holds a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd


class Cells:
    """The cells of a wide table that are not NaN, a window's side by side.

    Attributes:
        values: of those cells, windows outermost.
        column: which column each of them is in.
    """

    def __init__(self, columns: Sequence[np.ndarray], windows: int) -> None:
        wide = np.column_stack(columns) if columns else np.empty((windows, 0))
        self._there = ~np.isnan(wide)
        self._each = self._there.sum(axis=1)
        self.values = wide[self._there]
        self.column = np.tile(np.arange(len(columns), dtype="int16"), windows)[self._there.ravel()]

    def pick(self, columns: Sequence[np.ndarray | None]) -> np.ndarray:
        """The values of other columns at the same cells; NaN where there is no such column."""
        wide = np.full(self._there.shape, np.nan)
        for place, values in enumerate(columns):
            if values is not None:
                wide[:, place] = values
        return wide[self._there]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """One value a window, repeated for each of its cells."""
        return np.repeat(values, self._each)


def long_frame(
    windows: pd.DataFrame, cells: Cells, key: str, names: Sequence[str], value: str
) -> pd.DataFrame:
    """One row per cell: its window's columns, the name of its own, and what is in it."""
    runs = windows["run"].cat
    columns: dict[str, Any] = {
        "run": pd.Categorical.from_codes(cells.spread(runs.codes.to_numpy()), categories=runs.categories)
    }
    for name in windows.columns[1:]:
        columns[name] = cells.spread(windows[name].to_numpy())
    columns[key] = pd.Categorical.from_codes(cells.column, categories=pd.Index(names))
    columns[value] = cells.values
    return pd.DataFrame(columns, copy=False)
