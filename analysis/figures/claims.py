"""Time saved over SGD: own runs beside what the papers' abstracts claim."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import Any

import pandas as pd

from analysis.comparisons import comparisons
from analysis.figures import drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import time_to_accuracy
from analysis.published import provenance, published
from analysis.records.study import Study

UNIT = "percent less time"

LEAST = -400.0
"""Percent saved at the left edge: five times as slow. What lies beyond is drawn there, as an arrow."""


def draw(study: Study) -> Drawing:
    """A row per arm and world size, then a row per published range of the same unit."""
    scored = time_to_accuracy(study)
    found = comparisons(study, scored)
    if not found:
        raise NothingToDraw("no arm with a first-order arm to be compared with")
    table = published("headline")
    table = table[table["unit"] == UNIT] if not table.empty else table
    looks = drawing.arm_styles(study, [arm for arm, _ in found])
    figure, (axis,) = drawing.panels(
        drawing.TWO_COLUMNS, 0.19 * len(found) + 0.3 * len(table) + 1.4, columns=1
    )
    labels: list[str] = []
    rows = []
    beyond = False
    for (arm, size), one in found.items():
        y, look = -len(labels), looks[arm]
        saved = _saved(one.speedup.estimate)
        low, high = (
            None if limit is None else _saved(limit) for limit in (one.speedup.low, one.speedup.high)
        )
        if math.isfinite(saved):
            marker = look.marker if saved >= LEAST else "<"
            axis.plot(max(saved, LEAST), y, marker, color=look.colour, markersize=4.5)
            beyond |= saved < LEAST
        else:
            words = "  no ratio: the typical run of one side missed"
            axis.text(0, y, words, fontsize=6, va="center", color=look.colour)
        if low is not None and high is not None:
            axis.plot([max(low, LEAST), max(high, LEAST)], [y, y], color=look.colour, linewidth=0.9)
            if low < LEAST:
                axis.plot(LEAST, y, "<", color=look.colour, markersize=4.5, markerfacecolor="white")
                beyond = True
            if math.isinf(one.speedup.high or 0):
                axis.plot(high, y, ">", color=look.colour, markersize=4.5, markerfacecolor="white")
        labels.append(f"{arm}, {drawing.ranks_label(size, scored[scored['world_size'] == size])}")
        rows.append((arm, size, one.baseline, saved, low, high, one.speedup.method, one.holm_p, one.verdict))
    claims: Iterator[Any] = table.itertuples(index=False)
    for row in claims:
        y = -len(labels)
        axis.plot(
            [row.low, row.high], [y, y], color=drawing.GREY, linewidth=3, alpha=0.6, solid_capstyle="butt"
        )
        axis.plot([row.low, row.high], [y, y], "|", color=drawing.GREY, markersize=6)
        labels.append("\n".join(textwrap.wrap(f"{row.paper}: {row.claim}", 60)))
    axis.axvline(0, color=drawing.GREY, linewidth=0.7)
    axis.set_yticks([-place for place in range(len(labels))], labels, fontsize=6)
    axis.set_ylim(-len(labels) + 0.4, 0.6)
    axis.set_xlabel("time saved (%): to target over the first-order arm, or as named")
    axis.grid(True, axis="x", color="#dddddd", linewidth=0.5)
    drawing.legend_below(figure, drawing.handles(looks), columns=min(len(looks), 4))
    columns = ["arm", "world_size", "baseline", "percent_saved", "low", "high", "method", "holm_p", "verdict"]
    numbers = scored.merge(pd.DataFrame(rows, columns=columns), on=["arm", "world_size"])
    caption = drawing.sentence(
        "Time to the target saved over the first-order arm on the same number of ranks",
        f"({study.scoring.about}): 1 - 1/speed-up ({drawing.counts(numbers)}).",
        drawing.whiskers(one.speedup for one in found.values()),
        f"Grey bars: the ranges that the papers state for their own models and machines, {provenance(table)};"
        " they are not targets of this study."
        if len(table)
        else "",
        f"An arrow at the left: less than {LEAST:g} %." if beyond else "",
        drawing.remarks(study, scored),
    )
    return Drawing(figure, numbers, caption)


def _saved(speedup: float) -> float:
    """1.25 times as fast is 20 % less time."""
    return 100 * (1 - 1 / speedup) if speedup > 0 else -math.inf
