"""Load balance of the inverse workers: the slowest and the fastest as the world grows (SC20)."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from analysis.comparisons import points
from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import IDENTITY, in_order, kfac_cells
from analysis.placements import inverse_loads
from analysis.published import provenance, published
from analysis.records.study import Study
from analysis.statistics.intervals import median
from analysis.steps import rank_phase_costs

PHASE = "inverse_compute"
WORKERS = {"slowest": "v", "fastest": "^"}
"""The marker of each worker; some arms' markers, such as a cross, have no hollow twin."""


def draw(study: Study) -> Drawing:
    """Left: speed-ups of own workers over one rank. Right: bounds derived from the papers' networks."""
    numbers = worker_speedups(study)
    table = published("eigen_speedup")
    looks = drawing.arm_styles(study, numbers["arm"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.9, columns=1 if table.empty else 2)
    shifts = drawing.dodge(list(looks))
    half = 0.2 / max(len(looks), 2)
    for arm, size, group in points(numbers):
        x, look = math.log2(size) + shifts[arm], looks[arm]
        for kind, marker in WORKERS.items():
            dots = group[group["worker"] == kind]["speedup"]
            fill = look.colour if kind == "slowest" else "white"
            axes[0].plot([x] * len(dots), dots, marker, color=look.colour, markerfacecolor=fill,
                         markersize=4, alpha=0.8)  # fmt: skip
        predicted = group["predicted_speedup"].dropna()
        if len(predicted):
            axes[0].plot([x - half, x + half], [predicted.min()] * 2, color=look.colour, linewidth=1.6)
    sizes = sorted(numbers["world_size"].unique())
    ideal = len(sizes) > 1
    if ideal:
        axes[0].plot([math.log2(size) for size in sizes], sizes, ":", color=drawing.GREY, linewidth=1)
    drawing.world_size_axis(axes[0], numbers)
    axes[0].set_ylabel("speed-up over one rank (log2)")
    _powers_of_two(axes[0])
    if not table.empty:
        _derived(axes[1], table)
    arms = [Patch(facecolor=look.colour, label=arm) for arm, look in looks.items()]
    drawing.legend_below(
        figure, [*arms, *_keys(bars=bool(numbers["predicted_speedup"].notna().any()), ideal=ideal)], columns=3
    )
    return Drawing(figure, numbers, _caption(study, numbers, table))


def worker_speedups(study: Study) -> pd.DataFrame:
    """Two rows per run on several ranks: the `slowest` and `fastest` worker that has a factor to invert.

    `speedup` is the median of the same arm on one rank over that worker's seconds per step;
    `predicted_speedup`, for the slowest, follows from n^3 of the factors placed on the heaviest rank.
    """
    costs = rank_phase_costs(study)
    costs = costs[costs["phase"] == PHASE]
    loads = inverse_loads(study)
    frame = study.cells[IDENTITY].merge(costs, on="run").merge(loads, on=["run", "rank"], how="left")
    frame = frame[(frame["seconds_per_step"] > 0) & (frame["load"].isna() | (frame["load"] > 0))]
    base = (
        frame[frame["world_size"] == 1].groupby("arm")["seconds_per_step"].apply(lambda s: median(s.tolist()))
    )
    frame = frame[frame["arm"].isin(base.index) & (frame["world_size"] > 1)]
    if frame.empty:
        raise NothingToDraw("no K-FAC arm on one rank and on several")
    frame["speedup"] = frame["arm"].map(base) / frame["seconds_per_step"]
    ends = frame.groupby("run")["speedup"].agg(["idxmin", "idxmax"])
    slowest = frame.loc[ends["idxmin"]].assign(worker="slowest")
    fastest = frame.loc[ends["idxmax"]].assign(worker="fastest")
    heaviest = frame.groupby("run")["load"].max()
    slowest["predicted_speedup"] = slowest["total_load"] / slowest["run"].map(heaviest)
    return in_order(study, pd.concat([slowest, fastest], ignore_index=True))


def _powers_of_two(axis: Axes) -> None:
    """A log axis from a power of two to another, with a tick at each and at least three."""
    axis.set_yscale("log", base=2)
    low, high = (math.log2(value) for value in axis.dataLim.intervaly)
    first, last = math.floor(low), math.ceil(high)
    while last - first < 2:
        first, last = (first - 1, last) if low - first < last - high else (first, last + 1)
    axis.set_yticks([2.0**power for power in range(first, last + 1)])
    axis.set_ylim(2.0**first / 1.1, 2.0**last * 1.1)  # a marker at an end is whole
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _derived(axis: Any, table: pd.DataFrame) -> None:
    for place, (model, rows) in enumerate(table.groupby("model", sort=False)):
        x = [math.log2(size) for size in rows["world_size"]]
        style = ("o", "s", "^", "D")[place % 4]
        axis.plot(
            x,
            rows["greedy_cubic_per_factor"],
            style,
            color=drawing.GREY,
            markerfacecolor="white",
            markersize=4,
        )
        axis.annotate(str(model), (x[-1], rows["greedy_cubic_per_factor"].iloc[-1]), xytext=(4, 3),
                      textcoords="offset points", fontsize=6, color=drawing.GREY)  # fmt: skip
    sizes = sorted(table["world_size"].unique())
    axis.set_xticks([math.log2(size) for size in sizes], [str(size) for size in sizes])
    axis.set_xlim(math.log2(sizes[0]) - 0.4, math.log2(sizes[-1]) + 1.6)
    axis.set_ylim(0, float(table["greedy_cubic_per_factor"].max()) * 1.2)
    axis.set_xlabel("GPUs (log2)")
    axis.set_ylabel("largest possible speed-up")
    axis.set_title("derived: papers' networks", fontsize=8)


def _keys(*, bars: bool, ideal: bool) -> list[Line2D]:
    look: dict[str, Any] = {"color": drawing.GREY, "linestyle": "none", "markersize": 4}
    keys = [
        Line2D([], [], marker=WORKERS["slowest"], label="slowest worker", **look),
        Line2D([], [], marker=WORKERS["fastest"], markerfacecolor="white", label="fastest worker", **look),
    ]
    if bars:
        keys.append(Line2D([], [], color=drawing.GREY, linewidth=1.6, label="by n³ of the placement"))
    if ideal:
        keys.append(Line2D([], [], color=drawing.GREY, linestyle=":", linewidth=1, label="ideal"))
    return keys


def _caption(study: Study, numbers: pd.DataFrame, table: pd.DataFrame) -> str:
    return drawing.sentence(
        "Speed-up of computing second-order data over the same arm on one rank, of the rank that takes",
        "longest (filled) and of the one that takes least (hollow), among those that have a factor to",
        f"invert; seconds per step, amortised. Two markers per run ({drawing.counts(numbers)}), arms from",
        "left to right as in the legend. Short bars are arithmetic, not measurements: the n³ of all factors",
        "over that of the heaviest rank. Runs may exceed them: decompositions do not cost exactly n³.",
        "Right: the same for the papers' networks, each factor, largest first, on the least loaded rank"
        f" ({provenance(table)})."
        if not table.empty
        else "",
        captions.remarks(study, numbers, kfac_cells(study) & (study.cells["world_size"] > 1)),
    )
