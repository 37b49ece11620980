"""How much of communication is moving bytes, and how much is waiting for late ranks."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.figures.phase_styles import EDGE, LOOKS
from analysis.metrics import IDENTITY, arm_order, in_order
from analysis.records.study import Study
from analysis.steps import waits

COLUMNS = 4
PARTS = ("transfer_seconds_per_step", "wait_seconds_per_step")


def draw(study: Study) -> Drawing:
    """A panel per arm, two bars per world size: moving and waiting, stacked by phase."""
    several = study.cells[study.cells["world_size"] > 1]
    numbers = several[IDENTITY].merge(waits(study), on="run")
    if numbers.empty or not (numbers[list(PARTS)] > 0).any().any():
        raise NothingToDraw("no run on several ranks has recorded communication")
    numbers = in_order(study, numbers)
    arms = [arm for arm in arm_order(study) if arm in set(numbers["arm"])]
    figure, axes = drawing.panel_grid(arms, COLUMNS, 2.1, 0.9, sharey=True, ylabel="time per step (ms)")
    for arm, axis in zip(arms, axes, strict=True):
        _bars(axis, numbers[numbers["arm"] == arm])
    used = numbers.groupby("phase")[list(PARTS)].sum().sum(axis=1)
    entries = [
        Patch(facecolor=colour, label=phase.replace("_", " "), **EDGE)
        for phase, (colour, _) in LOOKS.items()
        if used.get(phase, 0) > 0
    ]
    entries.append(Patch(facecolor="white", hatch="////", label="waiting", **EDGE))
    drawing.legend_below(figure, entries, columns=5)
    caption = drawing.sentence(
        "Communication per step: left bars move bytes, right bars (hatched) wait; mean over ranks.",
        _how(numbers),
        f"Means over runs ({drawing.counts(numbers)}).",
        captions.remarks(study, numbers, study.cells["world_size"] > 1),
    )
    return Drawing(figure, numbers, caption)


def _how(numbers: pd.DataFrame) -> str:
    """Caption: whether waiting was measured or bounded."""
    measured = "Ranks met before every collective: waiting is what that took."
    bounds = (
        "In each window of steps the rank that spends least in a phase gives its transfer, an upper bound; "
        "what ranks spend beyond it, on average, is waiting, a lower bound. `split_wait` in the site "
        "measures both."
    )
    if numbers["measured"].all():
        return measured
    if not numbers["measured"].any():
        return bounds
    runs = numbers[numbers["measured"]]["run"].nunique()
    return f"{runs} of {numbers['run'].nunique()} runs were measured. {measured} The others: {bounds}"


def _bars(axis: Axes, numbers: pd.DataFrame) -> None:
    sizes = sorted(numbers["world_size"].unique())
    means = numbers.groupby(["world_size", "phase"])[list(PARTS)].mean()
    for place, size in enumerate(sizes):
        for part, shift, hatch in zip(PARTS, (-0.2, 0.2), ("", "////"), strict=True):
            bottom = 0.0
            for phase, (colour, _) in LOOKS.items():
                height = float(means[part].get((size, phase), 0.0)) * 1e3
                if height > 0:
                    axis.bar(place + shift, height, 0.36, bottom, color=colour, hatch=hatch, **EDGE)
                    bottom += height
    drawing.world_size_bars(axis, numbers)
