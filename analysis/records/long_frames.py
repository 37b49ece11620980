"""Turns wide columns into long frames: one row per table cell that holds a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd


class Cells:
    """The table cells that are not NaN, with those of a window next to each other.

    Attributes:
        values: of those cells, window by window.
        column: index of each cell's column.
    """

    def __init__(self, columns: Sequence[np.ndarray], windows: int) -> None:
        wide = np.column_stack(columns) if columns else np.empty((windows, 0))
        self._present = ~np.isnan(wide)
        self._cells_per_window = self._present.sum(axis=1)
        self.values = wide[self._present]
        self.column = np.tile(np.arange(len(columns), dtype="int16"), windows)[self._present.ravel()]

    def pick(self, columns: Sequence[np.ndarray | None]) -> np.ndarray:
        """The values of other columns at the same cells; NaN for a column that is None."""
        wide = np.full(self._present.shape, np.nan)
        for place, values in enumerate(columns):
            if values is not None:
                wide[:, place] = values
        return wide[self._present]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Repeat the value of each window for each of its cells."""
        return np.repeat(values, self._cells_per_window)


def long_frame(
    windows: pd.DataFrame, cells: Cells, key: str, names: Sequence[str], value: str
) -> pd.DataFrame:
    """One row per cell: the columns of its window, the name of its own column, and its value."""
    runs = windows["run"].cat
    columns: dict[str, Any] = {
        "run": pd.Categorical.from_codes(cells.spread(runs.codes.to_numpy()), categories=runs.categories)
    }
    for name in windows.columns[1:]:
        columns[name] = cells.spread(windows[name].to_numpy())
    columns[key] = pd.Categorical.from_codes(cells.column, categories=pd.Index(names))
    columns[value] = cells.values
    return pd.DataFrame(columns, copy=False)
