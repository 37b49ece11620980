"""Epochs saved against the cost of an epoch: above the break-even line an arm reaches the target sooner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.comparisons import Comparison
from analysis.figures import captions, drawing
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.records.study import Study
from analysis.results import Results, results
from analysis.statistics.intervals import Interval

SPEEDUPS = (0.5, 2.0)
"""Dotted lines: half and twice as fast to the target as the first-order arm."""

_TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
_ROOM = 1.15
"""Factor between the outermost points and the edges."""


@dataclass(frozen=True)
class Point:
    """One arm on one world size against its first-order arm.

    Attributes:
        cost: seconds of an epoch over the first-order arm's.
        fewer_epochs: the first-order arm's epochs to the target over its own.
        comparison: where both come from.
    """

    arm: str
    cost: Interval
    fewer_epochs: Interval
    comparison: Comparison


def draw(study: Study) -> Drawing:
    """A panel per world size, a point per arm that is compared with a first-order arm."""
    shown = results(study)
    scored, points = shown.scored, list(_points(shown))
    _refuse_nothing(points)
    looks = drawing.arm_styles(study, [point.arm for point in points])
    sizes = sorted({point.comparison.world_size for point in points})
    titles = [drawing.ranks_label(size, scored[scored["world_size"] == size]) for size in sizes]
    width = drawing.ONE_COLUMN if len(sizes) == 1 else drawing.TWO_COLUMNS
    figure, axes = drawing.panel_grid(titles, 3, 2.5, 0.9, width)
    limits = _limits(points, "cost"), _limits(points, "fewer_epochs")
    for size, axis in zip(sizes, axes, strict=True):
        _panel(axis, [point for point in points if point.comparison.world_size == size], looks, *limits)
    drawing.legend_below(figure, _handles(points, looks), columns=min(len(looks), 4))
    numbers = scored.merge(_table(points), on=["arm", "world_size"])
    about = f"{study.scoring.about}; {drawing.counts(numbers)}"
    star = captions.WAITED if numbers["oversubscribed"].any() else ""
    caption = drawing.sentence(_caption(points, about), captions.remarks(study, scored, star=star))
    return Drawing(figure, numbers, caption)


def _points(shown: Results) -> Iterator[Point]:
    """Comparisons with two finite ratios."""
    for (arm, _), one in shown.comparisons.items():
        if one.fewer_epochs.is_ratio and one.cheaper_epochs.is_ratio:
            yield Point(arm, _reciprocal(one.cheaper_epochs), one.fewer_epochs, one)


def _reciprocal(interval: Interval) -> Interval:
    low, high = (
        None if limit is None or limit <= 0 else 1 / limit for limit in (interval.high, interval.low)
    )
    return Interval(1 / interval.estimate, low, high, interval.n, interval.method)


def _refuse_nothing(points: list[Point]) -> None:
    if not points:
        raise NothingToDraw(
            "no arm with a first-order arm whose epochs and seconds can be compared with its own"
        )


def _limits(points: list[Point], column: Literal["cost", "fewer_epochs"]) -> tuple[float, float]:
    """Ends of an axis: around every estimate, and 1."""
    estimates = [getattr(point, column).estimate for point in points]
    return min(1.0, *estimates) / _ROOM, max(1.0, *estimates) * _ROOM


def _panel(
    axis: Axes,
    points: list[Point],
    looks: Mapping[str, ArmStyle],
    x: tuple[float, float],
    y: tuple[float, float],
) -> None:
    _lines(axis, min(x[0], y[0]), max(x[1], y[1]))
    for point in points:
        look = looks[point.arm]
        _whiskers(axis, point, look.colour)
        axis.plot(
            point.cost.estimate, point.fewer_epochs.estimate, look.marker, color=look.colour, markersize=5,
            markerfacecolor=look.colour if _is_decided(point) else "none",
        )  # fmt: skip
    _axes(axis, x, y)


def _is_decided(point: Point) -> bool:
    return point.comparison.verdict in ("faster", "slower")


def _handles(points: list[Point], looks: Mapping[str, ArmStyle]) -> list[Line2D]:
    """Legend entries, hollow if no point of the group is filled."""
    entries = drawing.handles(looks)
    for entry, group in zip(entries, looks, strict=True):
        if not any(_is_decided(point) for point in points if point.arm == group):
            entry.set_markerfacecolor("none")
    return entries


def _lines(axis: Axes, low: float, high: float) -> None:
    """The line of equal time, and those of half and twice the speed."""
    ends = [low, high]
    axis.fill_between(ends, [low, low], ends, color="#eeeeee", linewidth=0, zorder=0)
    axis.plot(ends, ends, color=drawing.GREY, linewidth=1)
    for speedup in SPEEDUPS:
        axis.plot(ends, [end * speedup for end in ends], ":", color=drawing.GREY, linewidth=0.7)
    for words, place, alignment in (("sooner", (0.03, 0.97), "left"), ("later", (0.97, 0.03), "right")):
        axis.text(
            *place, words, transform=axis.transAxes, fontsize=7, color=drawing.GREY, ha=alignment,
            va="top" if words == "sooner" else "bottom",
        )  # fmt: skip


def _whiskers(axis: Axes, point: Point, colour: str) -> None:
    """Both intervals as lines; one without an upper end is an arrow to the edge."""
    x, y = point.cost.estimate, point.fewer_epochs.estimate
    for interval, at in (
        (point.cost, lambda value: (value, y)), (point.fewer_epochs, lambda value: (x, value)),
    ):  # fmt: skip
        low, high = interval.low, interval.high
        if low is None or high is None:
            continue
        if math.isfinite(high):
            axis.plot(*zip(at(low), at(high), strict=True), color=colour, linewidth=0.7, alpha=0.7)
            continue
        to_the_right = interval is point.cost
        axis.annotate(
            "", xy=(1, y) if to_the_right else (x, 1), xytext=at(low), textcoords="data",
            xycoords=("axes fraction", "data") if to_the_right else ("data", "axes fraction"),
            arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


def _axes(axis: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    for one, set_scale, set_limits, limits in (
        (axis.xaxis, axis.set_xscale, axis.set_xlim, x),
        (axis.yaxis, axis.set_yscale, axis.set_ylim, y),
    ):
        set_scale("log")
        set_limits(*limits)
        one.set_major_locator(LogLocator(subs=_TICKS))
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        one.set_minor_formatter(NullFormatter())
    axis.grid(True, axis="x", color="#dddddd", linewidth=0.5)
    axis.set_xlabel("cost of an epoch (times more)")
    axis.set_ylabel("epochs to target (times fewer)")


def _table(points: Iterable[Point]) -> pd.DataFrame:
    columns = [
        "arm", "world_size", "baseline", "epoch_cost", "epoch_cost_low", "epoch_cost_high", "fewer_epochs",
        "fewer_epochs_low", "fewer_epochs_high", "speedup", "speedup_low", "speedup_high", "verdict",
    ]  # fmt: skip
    rows = []
    for point in points:
        one = point.comparison
        limits = [
            number
            for each in (point.cost, point.fewer_epochs, one.speedup)
            for number in (each.estimate, each.low, each.high)
        ]
        rows.append((one.arm, one.world_size, one.baseline, *limits, one.verdict))
    return pd.DataFrame(rows, columns=columns)


def _caption(points: Iterable[Point], about: str) -> str:
    return drawing.sentence(
        "Epochs to the target that an arm saves against what its epoch costs, both over the first-order arm",
        f"on the same number of ranks ({about}). On the line both take the same time, above it the arm takes",
        "less; dotted: half and twice as fast. Filled: decided after Holm's correction; hollow: not decided.",
        captions.whiskers(each for point in points for each in (point.cost, point.fewer_epochs)),
        "Arms whose median run missed the target have no point.",
    )
