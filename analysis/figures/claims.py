"""Time saved over SGD: own runs beside what the papers' abstracts claim."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.comparisons import Comparison
from analysis.figures import captions, drawing
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.published import provenance, published
from analysis.records.study import Study
from analysis.results import results

UNIT = "percent less time"

PAPERS = "the papers' ranges"
GREY_BAR: Any = {"color": drawing.GREY, "linewidth": 3, "alpha": 0.6, "solid_capstyle": "butt"}
TEXT_INCHES = 0.16
"""Height of a line of text below the panel."""

LEAST = -400.0
"""Percent saved at the left edge: five times as slow. What lies beyond is drawn there, as an arrow."""


def draw(study: Study) -> Drawing:
    """A row per arm and world size, then a row per published range; what has no ratio is text below."""
    shown = results(study)
    scored, found = shown.scored, shown.comparisons
    if not found:
        raise NothingToDraw("no arm with a first-order arm to be compared with")
    table = published("headline")
    table = table[table["unit"] == UNIT] if not table.empty else table
    drawn = {key: one for key, one in found.items() if one.speedup.is_ratio}
    without = {key: _why_none(one, scored) for key, one in found.items() if key not in drawn}
    if not drawn and table.empty:
        raise NothingToDraw("no arm whose median run, and its first-order arm's, reached the target")
    looks = drawing.arm_styles(study, [arm for arm, _ in drawn])
    figure, axis = _panel(0.19 * len(drawn) + 0.3 * len(table) + 1.4, len(without))
    labels: list[str] = []
    beyond = False
    for (arm, size), one in drawn.items():
        beyond |= _row(axis, -len(labels), one, looks[arm])
        labels.append(_label(arm, size, scored))
    claims: Iterator[Any] = table.itertuples(index=False)
    for row in claims:
        y = -len(labels)
        axis.plot([row.low, row.high], [y, y], label=PAPERS, **GREY_BAR)
        axis.plot([row.low, row.high], [y, y], "|", color=drawing.GREY, markersize=6)
        labels.append("\n".join(textwrap.wrap(f"{row.paper}: {row.claim}", 60)))
    axis.axvline(0, color=drawing.GREY, linewidth=0.7)
    axis.set_yticks([-place for place in range(len(labels))], labels, fontsize=6)
    axis.set_ylim(-len(labels) + 0.4, 0.6)
    axis.set_xlabel("time saved against the first-order arm (%)")
    axis.grid(True, axis="x", color="#dddddd", linewidth=0.5)
    texts = [f"{_label(arm, size, scored)}: no ratio, {why}" for (arm, size), why in without.items()]
    _texts(figure, texts)
    papers = [Line2D([], [], label=PAPERS, **GREY_BAR)] if len(table) else []
    drawing.legend_below(figure, [*drawing.handles(looks), *papers], columns=4)
    numbers = scored.merge(_table(found), on=["arm", "world_size"])
    caption = drawing.sentence(
        "Time to the target saved over the first-order arm on the same number of ranks",
        f"({study.scoring.about}): 1 - 1/speed-up ({drawing.counts(numbers)}).",
        captions.whiskers(one.speedup for one in drawn.values()),
        "Listed below the panel: arms without a ratio, and why." if without else "",
        f"Grey bars: the ranges that the papers state for their own models and machines, {provenance(table)};"
        " they are not targets of this study."
        if len(table)
        else "",
        f"An arrow at the left: less than {LEAST:g} %." if beyond else "",
        captions.remarks(study, scored),
    )
    return Drawing(figure, numbers, caption)


def _panel(height: float, texts: int) -> tuple[Figure, Axes]:
    """The panel and, if there are lines of text, a second one without axes below it."""
    if not texts:
        figure, (axis,) = drawing.panels(drawing.TWO_COLUMNS, height, columns=1)
        return figure, axis
    below = TEXT_INCHES * texts
    figure, (axis, lower) = drawing.panels(
        drawing.TWO_COLUMNS, height + below, columns=1, rows=2, height_ratios=[height - 1.0, below]
    )
    lower.set_axis_off()
    return figure, axis


def _texts(figure: Figure, texts: list[str]) -> None:
    for line, text in enumerate(texts):
        lower = figure.axes[1]
        lower.text(
            0, 1 - (line + 0.5) / len(texts), text, fontsize=6.5, va="center", transform=lower.transAxes
        )


def _row(axis: Axes, y: float, one: Comparison, look: ArmStyle) -> bool:
    """Draw a comparison that has a ratio; whether any of it lies beyond the left edge."""
    saved = _saved(one.speedup.estimate)
    low, high = _limits(one)
    axis.plot(max(saved, LEAST), y, look.marker if saved >= LEAST else "<", color=look.colour, markersize=4.5)
    if low is None or high is None:
        return saved < LEAST
    axis.plot([max(low, LEAST), max(high, LEAST)], [y, y], color=look.colour, linewidth=0.9)
    if low < LEAST:
        axis.plot(LEAST, y, "<", color=look.colour, markersize=4.5, markerfacecolor="white")
    if math.isinf(one.speedup.high or 0):
        axis.plot(high, y, ">", color=look.colour, markersize=4.5, markerfacecolor="white")
    return min(saved, low) < LEAST


def _label(arm: str, size: int, scored: pd.DataFrame) -> str:
    return f"{arm}, {drawing.ranks_label(size, scored[scored['world_size'] == size])}"


def _why_none(one: Comparison, scored: pd.DataFrame) -> str:
    """`sgd missed in 4 of 4 runs`: the sides whose median run missed, or any run if no median did."""
    sides = {
        name: scored[(scored["arm"] == name) & (scored["world_size"] == one.world_size)]["reached"]
        for name in (one.baseline, one.arm)
    }
    missed = {name: f"{name} missed in {(~runs).sum()} of {len(runs)} runs"
              for name, runs in sides.items() if not runs.all()}  # fmt: skip
    medians = [words for name, words in missed.items() if sides[name].mean() <= 0.5]
    return " and ".join(medians or missed.values()) or one.speedup.method


def _table(found: Mapping[tuple[str, int], Comparison]) -> pd.DataFrame:
    """A row per comparison, those without a ratio included."""
    columns = ["arm", "world_size", "baseline", "percent_saved", "low", "high", "method", "holm_p", "verdict"]
    rows = [
        (arm, size, one.baseline, _saved(one.speedup.estimate) if one.speedup.is_ratio else math.nan,
         *_limits(one), one.speedup.method, one.holm_p, one.verdict)
        for (arm, size), one in found.items()
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def _limits(one: Comparison) -> tuple[float | None, float | None]:
    low, high = (None if limit is None else _saved(limit) for limit in (one.speedup.low, one.speedup.high))
    return low, high


def _saved(speedup: float) -> float:
    """1.25 times as fast is 20 % less time."""
    return 100 * (1 - 1 / speedup) if speedup > 0 else -math.inf
