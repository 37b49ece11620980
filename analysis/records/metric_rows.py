"""Every metric of every evaluation as rows; records hold those of one evaluation in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

METRIC_COLUMNS = {
    "run": "str", "step": "float64", "epoch": "float64", "train_seconds": "float64", "metric": "str",
    "value": "float64", "is_target": "bool",
}  # fmt: skip


def metric_rows(evaluations: pd.DataFrame, measured: pd.Series) -> pd.DataFrame:
    """One row per evaluation and metric; of an evaluation older than schema 6, its target's metric alone.

    Args:
        evaluations: those that count; their index is that of `measured`.
        measured: each evaluation's metrics, as recorded.
    """
    rows: list[tuple[Any, ...]] = []
    for place, one in zip(evaluations.index, evaluations.itertuples(index=False), strict=True):
        every: Mapping[str, float] = measured[place] or {one.metric: one.value}
        at = (str(one.run), one.step, one.epoch, one.train_seconds)
        rows += [(*at, name, value, name == one.metric) for name, value in every.items()]
    return pd.DataFrame(rows, columns=list(METRIC_COLUMNS)).astype(METRIC_COLUMNS)
