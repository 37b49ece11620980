"""Where the time of a step goes: seconds per step by phase, for every arm and world size."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis.figures.drawing import (
    TWO_COLUMNS,
    Drawing,
    NothingToDraw,
    counts,
    legend_below,
    panels,
    remarks,
    sentence,
)  # fmt: skip
from analysis.metrics import IDENTITY, arm_order, in_order, scaling
from analysis.record_files import PHASE_ORDER
from analysis.steps import phase_costs
from analysis.study import Study

LOOKS = {
    "data": ("#BBBBBB", "...."), "forward": ("#DDDDDD", ""), "backward": ("#999999", ""),
    "gradient_comm": ("#56B4E9", "////"), "factor_compute": ("#F0E442", ""),
    "factor_comm": ("#F0E442", "////"),
    "inverse_compute": ("#D55E00", ""), "inverse_comm": ("#D55E00", "////"), "precondition": ("#009E73", ""),
    "precondition_comm": ("#009E73", "////"), "scale": ("#CC79A7", ""), "update": ("#0072B2", ""),
    "other": ("#FFFFFF", "xxxx"),
}  # fmt: skip
"""Colour and hatch of a phase: computing is plain, and what moves bytes is hatched in its stage's colour."""

EDGE: Any = {"edgecolor": "#222222", "linewidth": 0.4}
COLUMNS = 4


def draw(study: Study) -> Drawing:
    """One panel per arm, one stack per world size; every run's whole step a dot."""
    costs = phase_costs(study)
    if costs.empty:
        raise NothingToDraw("no rank has recorded a window of steps")
    numbers = in_order(study, study.cells[IDENTITY].merge(costs, on="run"))
    totals = scaling(study)
    arms = [arm for arm in arm_order(study) if arm in set(numbers["arm"])]
    columns = min(len(arms), COLUMNS)
    rows = -(-len(arms) // columns)
    figure, axes = panels(TWO_COLUMNS, 2.1 * rows + 0.9, columns, rows, sharey=True)
    for arm, axis in zip(arms, axes, strict=False):
        axis.set_title(arm, fontsize=8)
        _stacks(axis, numbers[numbers["arm"] == arm], totals[totals["arm"] == arm])
    for axis in axes[len(arms) :]:
        axis.set_axis_off()
    for axis in axes[::columns]:
        axis.set_ylabel("time per step (ms)")
    used = numbers.groupby("phase")["seconds_per_step"].sum()
    phases = [phase for phase in _ordered(numbers) if used[phase] > 0]
    legend_below(figure, [_patch(phase) for phase in phases], columns=5)
    return Drawing(figure, numbers, _caption(study, numbers))


def _stacks(axis: Axes, costs: pd.DataFrame, totals: pd.DataFrame) -> None:
    n = costs.groupby("world_size")["run"].nunique()
    sums = costs.groupby(["world_size", "phase"])["seconds_per_step"].sum()
    crowded = totals.groupby("world_size")["oversubscribed"].any()
    for place, size in enumerate(n.index):
        bottom = 0.0
        for phase in _ordered(costs):
            height = float(sums.get((size, phase), 0.0)) / int(n[size]) * 1e3
            if height > 0:
                colour, hatch = LOOKS.get(phase, ("#FFFFFF", "++++"))
                axis.bar(place, height, 0.62, bottom, color=colour, hatch=hatch, **EDGE)
                bottom += height
        runs = totals[totals["world_size"] == size]["seconds_per_step"] * 1e3
        axis.plot([place + 0.4] * len(runs), runs, ".", color="black", markersize=3)
    axis.set_xticks(range(len(n)), [f"{size}*" if crowded[size] else str(size) for size in n.index])
    axis.set_xlim(-0.6, len(n) - 0.4)
    axis.set_xlabel("ranks")


def _ordered(costs: pd.DataFrame) -> list[str]:
    present = list(costs["phase"].drop_duplicates())
    return [p for p in PHASE_ORDER if p in present] + sorted(p for p in present if p not in PHASE_ORDER)


def _patch(phase: str) -> Patch:
    colour, hatch = LOOKS.get(phase, ("#FFFFFF", "++++"))
    return Patch(
        facecolor=colour, hatch=hatch, edgecolor="#222222", linewidth=0.4, label=phase.replace("_", " ")
    )


def _caption(study: Study, numbers: pd.DataFrame) -> str:
    return sentence(
        "Exclusive seconds per step on the slowest rank of each run, amortised over whole inverse",
        f"periods; stacks are means over runs ({counts(numbers)}), because means of parts add up to the",
        "mean of the whole.",
        'Hatched phases move bytes and include waiting for other ranks; "other" is what no phase',
        "claims. Dots: each run's time per step.",
        remarks(study, numbers),
    )
