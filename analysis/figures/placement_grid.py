"""Placement as a grid of ranks by layers, with inverse workers, gradient workers and receivers (KAISA)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import IDENTITY, arm_order, kfac_cells
from analysis.placements import ranks
from analysis.records.study import Study

RECEIVER, WORKER = "#EEEEEE", "#56B4E9"
LABELLED = 24
"""Largest number of layers that are labelled with their names."""


def draw(study: Study) -> Drawing:
    """A panel per arm, at the study's largest world size."""
    cells = study.cells[study.cells["run"].isin(study.layers["run"].astype("str"))]
    if cells.empty:
        raise NothingToDraw("no K-FAC run has described its placement")
    cells = cells[cells["world_size"] == cells["world_size"].max()]
    chosen = cells.sort_values("seed").drop_duplicates("arm").set_index("arm")
    arms = [arm for arm in arm_order(study) if arm in chosen.index]
    figure, axes = drawing.panel_grid(arms, 4, 1.9, 0.7)
    parts = []
    for arm, axis in zip(arms, axes, strict=True):
        layers = study.layers[study.layers["run"] == chosen.loc[arm, "run"]]
        _grid(axis, layers, int(chosen.loc[arm, "world_size"]))
        axis.set_title(arm, fontsize=7)
        identity = chosen.reset_index()[IDENTITY]
        parts.append(identity[identity["arm"] == arm].merge(layers.astype({"run": "str"}), on="run"))
    drawing.legend_below(figure, _keys(), columns=4)
    size = int(cells["world_size"].max())
    caption = drawing.sentence(
        f"Placement on {drawing.ranks_label(size, cells)}, the largest world of the study, as one run per",
        "arm described it (n = 1; it is the same in every run of an arm). Columns are layers in the model's",
        "order, rows are ranks.",
        captions.remarks(
            study, cells, kfac_cells(study) & (study.cells["world_size"] == size), captions.STARRED
        ),
    )
    return Drawing(figure, pd.concat(parts, ignore_index=True), caption)


def _grid(axis: Axes, layers: pd.DataFrame, world_size: int) -> None:
    working = np.zeros((world_size, len(layers)))
    for column, layer in enumerate(layers.itertuples(index=False)):
        working[list(ranks(layer.gradient_workers)), column] = 1  # type: ignore[arg-type]  # a list from Parquet
        for role, shift, marker in (("a", -0.2, "^"), ("g", 0.2, "o")):
            for rank in ranks(getattr(layer, f"{role}_inverse_workers")):
                axis.plot(column + shift, rank, marker, color="black", markersize=3.5)
    axis.imshow(working, cmap=ListedColormap([RECEIVER, WORKER]), vmin=0, vmax=1, aspect="auto")
    few = len(layers) <= LABELLED
    axis.set_xticks(range(len(layers)), list(layers["name"]) if few else [""] * len(layers))
    axis.set_yticks(range(world_size) if world_size <= 16 else range(0, world_size, world_size // 8))
    axis.set_xticks(np.arange(-0.5, len(layers)), minor=True)
    axis.set_yticks(np.arange(-0.5, world_size), minor=True)
    axis.grid(False)
    axis.grid(True, which="minor", color="white", linewidth=1)
    axis.tick_params(which="minor", length=0)
    axis.set_xlabel("layer")
    axis.set_ylabel("rank")


def _keys() -> list[Patch | Line2D]:
    return [
        Patch(facecolor=WORKER, label="gradient worker"),
        Patch(facecolor=RECEIVER, edgecolor=drawing.GREY, linewidth=0.4, label="gradient receiver"),
        Line2D([], [], color="black", marker="^", linestyle="none", markersize=4, label="inverts A"),
        Line2D([], [], color="black", marker="o", linestyle="none", markersize=4, label="inverts G"),
    ]
