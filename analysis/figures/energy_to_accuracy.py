"""Energy to accuracy: joules of all GPUs until a run's target, and their mean power."""

from __future__ import annotations

import math

import pandas as pd

from analysis.comparisons import points
from analysis.energy import energy_to_target, why_none
from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.records.study import Study
from analysis.statistics.intervals import Interval, level

PANELS = {"joules": ("energy to target (kJ)", 1e-3), "watts": ("mean power (W)", 1.0)}


def draw(study: Study) -> Drawing:
    """Left the energy, right the power, by arm and world size."""
    runs = energy_to_target(study)
    if runs.empty:
        raise NothingToDraw(f"no run has counted its GPUs' energy: {why_none(study)}")
    looks = drawing.arm_styles(study, runs["arm"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=2)
    shifts = drawing.dodge(list(looks))
    found, rows = [], []
    for axis, (name, (label, scale)) in zip(axes, PANELS.items(), strict=True):
        for arm, size, group in points(runs):
            x, values = math.log2(size) + shifts[arm], group[name] * scale
            dots = values[values < math.inf]
            axis.plot([x] * len(dots), dots, looks[arm].marker, color=looks[arm].colour, markersize=3,
                      alpha=0.6, mew=0)  # fmt: skip
            interval = level(values.tolist())
            if interval.estimate < math.inf:
                drawing.whisker(axis, x, interval, looks[arm].colour)
                found.append(interval)
                rows.append((arm, size, name, *_plain(interval.scaled(1 / scale))))
        drawing.world_size_axis(axis, runs)
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
    drawing.legend_below(figure, drawing.handles(looks), columns=min(len(looks), 4))
    shown = pd.DataFrame(rows, columns=["arm", "world_size", "what", "median", "low", "high"])
    wide = shown.pivot(index=["arm", "world_size"], columns="what")
    wide.columns = [f"{column[1]}_{column[0]}" for column in wide.columns]
    wide = wide.reset_index()
    caption = drawing.sentence(
        "Energy of all GPUs of a run, through NVML, over the windows that began before it reached its target",
        f"({study.scoring.about}), and their mean power over the whole run. Idle power is inside. Every run",
        f"is a dot ({drawing.counts(runs)}); a run that missed has no finite energy to target and no dot.",
        captions.whiskers(found),
        captions.remarks(study, runs, star=captions.STARRED),
    )
    return Drawing(figure, runs.merge(wide, on=["arm", "world_size"], how="left"), caption)


def _plain(interval: Interval) -> tuple[float, float | None, float | None]:
    return interval.estimate, interval.low, interval.high
