"""The placement of a run, from its layers.json, as frames of loads and factor sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.records.study import Study


def ranks(bounds: Sequence[int]) -> range:
    """The ranks of a `[start, stop, step]` in layers.json."""
    start, stop, step = (int(value) for value in bounds)
    return range(start, stop, step)


def inverse_loads(study: Study) -> pd.DataFrame:
    """One row per run and rank: `load`, the sum of n³ over its factors, and the model's `total_load`."""
    worlds = dict(zip(study.cells["run"], study.cells["world_size"], strict=True))
    rows = []
    for run, layers in study.layers.groupby("run"):
        loads = [0.0] * worlds[str(run)]
        total = 0.0
        for layer in layers.itertuples(index=False):
            for factor in ("a", "g"):
                cost = getattr(layer, f"{factor}_blocks") * float(getattr(layer, f"{factor}_dim")) ** 3
                total += cost
                for rank in ranks(getattr(layer, f"{factor}_inverse_workers")):
                    loads[rank] += cost
        rows += [(str(run), rank, load, total) for rank, load in enumerate(loads)]
    frame = pd.DataFrame(rows, columns=["run", "rank", "load", "total_load"])
    return frame.astype({"run": "str", "rank": "int64", "load": "float64", "total_load": "float64"})


def factor_sizes(study: Study) -> pd.DataFrame:
    """One row per run, layer and factor: `factor` (A or G), `dim`, `blocks`."""
    parts = [
        study.layers[["run", "name", f"{kind}_dim", f"{kind}_blocks"]]
        .rename(columns={f"{kind}_dim": "dim", f"{kind}_blocks": "blocks"})
        .assign(factor=kind.upper())
        for kind in ("a", "g")
    ]
    frame = pd.concat(parts, ignore_index=True)
    return frame.astype({"run": "str", "dim": "float64", "blocks": "float64"})
