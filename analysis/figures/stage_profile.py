"""What one update costs, stage by stage: factors and second-order data, computing and moving (SC20)."""

from __future__ import annotations

import math

import pandas as pd

from analysis.comparisons import points
from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import IDENTITY, in_order, kfac_cells
from analysis.records.study import Study
from analysis.statistics.intervals import level
from analysis.steps import rank_phase_costs

STAGES = {
    "factor_compute": ("factor computation", "factor_update_steps"),
    "factor_comm": ("factor communication", "factor_update_steps"),
    "inverse_compute": ("inverse computation", "inverse_update_steps"),
    "inverse_comm": ("inverse communication", "inverse_update_steps"),
}


def draw(study: Study) -> Drawing:
    """A panel per stage; seconds per update event, so that intervals do not hide the work."""
    costs = rank_phase_costs(study)
    costs = costs.loc[costs.groupby(["run", "phase"], observed=True)["seconds_per_step"].idxmax()]
    intervals = ["factor_update_steps", "inverse_update_steps"]
    numbers = study.cells[[*IDENTITY, *intervals]].merge(costs[costs["phase"].isin(STAGES)], on="run")
    numbers = numbers.dropna(subset=intervals)  # scheduled intervals have no one number of steps
    if numbers.empty:
        raise NothingToDraw("no K-FAC run with fixed intervals has recorded a window of steps")
    steps = [float(row[STAGES[row["phase"]][1]]) for _, row in numbers.iterrows()]
    numbers["seconds_per_update"] = numbers["seconds_per_step"] * pd.Series(steps, index=numbers.index)
    numbers = in_order(study, numbers.reset_index(drop=True))
    looks = drawing.arm_styles(study, numbers["arm"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 4.2, columns=2, rows=2)
    shifts = drawing.dodge(list(looks))
    found, rows = [], []
    for axis, (phase, (title, _)) in zip(axes, STAGES.items(), strict=True):
        axis.set_title(title, fontsize=8)
        for arm, size, group in points(numbers[numbers["phase"] == phase]):
            x = math.log2(size) + shifts[arm]
            dots = group["seconds_per_update"] * 1e3
            axis.plot([x] * len(dots), dots, looks[arm].marker, color=looks[arm].colour, markersize=3,
                      alpha=0.6, mew=0)  # fmt: skip
            if (dots > 0).all():
                interval = level(dots.tolist())
                drawing.whisker(axis, x, interval, looks[arm].colour)
                found.append(interval)
                rows.append((arm, size, phase, interval.estimate, interval.low, interval.high))
        drawing.world_size_axis(axis, numbers)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("time per update (ms)")
    drawing.legend_below(figure, drawing.handles(looks), columns=min(len(looks), 4))
    columns = ["arm", "world_size", "phase", "median_ms", "low_ms", "high_ms"]
    merged = numbers.merge(pd.DataFrame(rows, columns=columns), on=columns[:3], how="left")
    alone = numbers[(numbers["world_size"] == 1) & numbers["phase"].str.endswith("_comm")]
    caption = drawing.sentence(
        "Time of one update of the factors and of the second-order data, on the rank that takes longest in",
        "that stage: seconds per step, amortised over whole inverse periods, times the steps between two",
        "updates (F of factors, E of inverses). Communication includes waiting for late ranks.",
        "On one rank nothing is sent: what is drawn is the stage's work on that rank, such as packing."
        if (alone["seconds_per_update"] > 0).any()
        else "",
        f"Every run is a dot ({drawing.counts(numbers)}).",
        captions.whiskers(found),
        captions.remarks(study, numbers, kfac_cells(study)),
    )
    return Drawing(figure, merged, caption)
