"""Step time, speed-up and parallel efficiency over world sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.figures import captions, drawing
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.metrics import scaling, scaling_levels
from analysis.records.study import Study

PANELS = {
    "seconds_per_step": "time per step (ms)",
    "speedup": "speed-up over own base",
    "efficiency": "efficiency (%)",
}
FACTORS = {"seconds_per_step": 1e3, "speedup": 1.0, "efficiency": 100.0}


def draw(study: Study) -> Drawing:
    """Every arm against its own base, with ideal scaling as thin dotted lines from there."""
    runs = scaling(study)
    if runs.empty:
        raise NothingToDraw("no rank has recorded a window of steps")
    levels = scaling_levels(study)
    styles = drawing.arm_styles(study, runs["arm"])
    shifts = drawing.dodge(list(styles), width=0.2)
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=3)
    for arm, style in styles.items():
        own, dots = levels[levels["arm"] == arm], runs[runs["arm"] == arm]
        for axis, column in zip(axes, PANELS, strict=True):
            _line(axis, own, column, style, shifts[arm])
        x = [math.log2(size) + shifts[arm] for size in dots["world_size"]]
        axes[0].plot(
            x, dots["seconds_per_step"] * 1e3, style.marker, color=style.colour, markersize=3, alpha=0.6
        )
    _ideal(axes, levels, styles)
    for axis, label in zip(axes, PANELS.values(), strict=True):
        drawing.world_size_axis(axis, runs)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    ideal = Line2D([], [], color=drawing.GREY, linestyle=":", linewidth=0.8, label="ideal")
    drawing.legend_below(
        figure, [*drawing.handles(styles, lines=True), ideal], columns=min(len(styles) + 1, 4)
    )
    numbers = runs.merge(_flat(levels), on=["arm", "world_size"])
    return Drawing(figure, numbers, _caption(study, runs, levels))


def _line(axis: Axes, own: pd.DataFrame, column: str, style: ArmStyle, shift: float) -> None:
    x = [math.log2(size) + shift for size in own["world_size"]]
    factor = FACTORS[column]
    axis.plot(
        x, [i.estimate * factor for i in own[column]], color=style.colour, linestyle=style.line, linewidth=1
    )
    for place, interval in zip(x, own[column], strict=True):
        if column != "seconds_per_step":
            axis.plot(place, interval.estimate * factor, style.marker, color=style.colour, markersize=4)
        if interval.low is not None and interval.high is not None:
            axis.plot(
                [place] * 2,
                [interval.low * factor, interval.high * factor],
                color=style.colour,
                linewidth=0.7,
            )


def _ideal(axes: list[Axes], levels: pd.DataFrame, styles: Mapping[str, ArmStyle]) -> None:
    """From each base to the largest world: grey where all arms share the line, else in the arm's colour."""
    sizes = sorted(levels["world_size"].unique())
    smallest = min(levels["base_world_size"])
    look: dict[str, Any] = {"linestyle": ":", "linewidth": 0.8}
    axes[2].axhline(100, color=drawing.GREY, **look)
    axes[1].plot(
        [math.log2(size) for size in sizes], [size / smallest for size in sizes], color=drawing.GREY, **look
    )
    for row in _bases(levels):
        base, colour = row.base_world_size, styles[row.arm].colour
        beyond = [size for size in sizes if size >= base]
        x = [math.log2(size) for size in beyond]
        times = [row.base_seconds_per_step * 1e3 * (base / size if row.scaling == "strong" else 1.0)
                 for size in beyond]  # fmt: skip
        axes[0].plot(x, times, color=colour, **look)
        if base > smallest:
            axes[1].plot(x, [size / base for size in beyond], color=colour, **look)


def _bases(levels: pd.DataFrame) -> Iterator[Any]:
    return levels.drop_duplicates("arm").itertuples(index=False)


def _flat(levels: pd.DataFrame) -> pd.DataFrame:
    flat = levels[["arm", "world_size", "base_world_size", "base_seconds_per_step"]].copy()
    for column in PANELS:
        for part in ("estimate", "low", "high", "method"):
            flat[f"{column}_{part}"] = [getattr(interval, part) for interval in levels[column]]
    return flat


def _caption(study: Study, runs: pd.DataFrame, levels: pd.DataFrame) -> str:
    bases = "; ".join(
        f"{row.arm} {row.base_seconds_per_step * 1e3:.3g} ms per step on "
        + drawing.ranks_label(row.base_world_size, runs[runs["world_size"] == row.base_world_size])
        for row in _bases(levels)
    )
    kinds = " and ".join(sorted(set(levels["scaling"])))
    return drawing.sentence(
        f"{kinds.capitalize()} scaling. Step time is the slowest rank's, amortised over inverse periods.",
        f"Bases of the speed-ups: {bases}. Speed-up is the ratio of samples per second; efficiency divides",
        f"it by the ratio of ranks. Dots are runs ({drawing.counts(runs)}).",
        "Dotted: ideal scaling, in an arm's colour where it starts from that arm's base.",
        captions.whiskers(levels["seconds_per_step"], "the time per step"),
        captions.whiskers([*levels["speedup"], *levels["efficiency"]], "speed-up and efficiency"),
        "Only one world size was run, so there is no scaling to see."
        if runs["world_size"].nunique() == 1
        else "",
        captions.remarks(study, runs),
    )
