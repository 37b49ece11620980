"""Where the time of a step goes: seconds per step by phase, for every arm and world size."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.figures.phase_styles import EDGE, phase_look, phase_patch
from analysis.metrics import IDENTITY, arm_order, in_order, scaling
from analysis.records.study import Study
from analysis.records.window_lines import PHASE_ORDER
from analysis.steps import phase_costs

COLUMNS = 4


def draw(study: Study) -> Drawing:
    """One panel per arm, one stack per world size; every run's whole step a dot."""
    costs = phase_costs(study)
    if costs.empty:
        raise NothingToDraw("no rank has recorded a window of steps")
    numbers = in_order(study, study.cells[IDENTITY].merge(costs, on="run"))
    totals = scaling(study)
    arms = [arm for arm in arm_order(study) if arm in set(numbers["arm"])]
    figure, axes = drawing.panel_grid(arms, COLUMNS, 2.1, 0.9, sharey=True, ylabel="time per step (ms)")
    for arm, axis in zip(arms, axes, strict=True):
        _stacks(axis, numbers[numbers["arm"] == arm], totals[totals["arm"] == arm])
    used = numbers.groupby("phase")["seconds_per_step"].sum()
    phases = [phase for phase in _ordered(numbers) if used[phase] > 0]
    drawing.legend_below(figure, [phase_patch(phase) for phase in phases], columns=5)
    return Drawing(figure, numbers, _caption(study, numbers))


def _stacks(axis: Axes, costs: pd.DataFrame, totals: pd.DataFrame) -> None:
    n = costs.groupby("world_size")["run"].nunique()
    sums = costs.groupby(["world_size", "phase"])["seconds_per_step"].sum()
    for place, size in enumerate(n.index):
        bottom = 0.0
        for phase in _ordered(costs):
            height = float(sums.get((size, phase), 0.0)) / int(n[size]) * 1e3
            if height > 0:
                colour, hatch = phase_look(phase)
                axis.bar(place, height, 0.62, bottom, color=colour, hatch=hatch, **EDGE)
                bottom += height
        runs = totals[totals["world_size"] == size]["seconds_per_step"] * 1e3
        axis.plot([place + 0.4] * len(runs), runs, ".", color="black", markersize=3)
    drawing.world_size_bars(axis, costs)


def _ordered(costs: pd.DataFrame) -> list[str]:
    present = list(costs["phase"].drop_duplicates())
    return [p for p in PHASE_ORDER if p in present] + sorted(p for p in present if p not in PHASE_ORDER)


def _caption(study: Study, numbers: pd.DataFrame) -> str:
    return drawing.sentence(
        "Exclusive seconds per step on the slowest rank of each run, amortised over whole inverse periods;",
        f"stacks are means over runs ({drawing.counts(numbers)}), because means of parts add up to the mean",
        "of the whole.",
        "Striped phases are communication and include waiting for other ranks; data (dotted) loads batches;",
        "other (crossed) is what no phase claims. Dots: each run's time per step.",
        captions.remarks(study, numbers),
    )
