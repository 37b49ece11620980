"""What all figures agree on: what drawing one gives, and how arms, phases and world sizes look.

Colours are Okabe and Ito's (2008), told apart by the colour-blind; a marker, line style or hatch goes with
each, so that a figure survives a black-and-white printer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.metrics import BASE, arm_order
from analysis.statistics.intervals import Interval
from analysis.study import Study

ONE_COLUMN, TWO_COLUMNS = 3.5, 7.16
"""Widths in inches of one and two columns of the IEEE's journals."""

STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "hatch.linewidth": 0.5, "pdf.fonttype": 42, "svg.hashsalt": "kronscale",
    "figure.dpi": 100, "savefig.dpi": 200, "text.usetex": False,
}  # fmt: skip

_LETTER_INCHES, _HANDLE_INCHES = 0.06, 0.35  # of a legend in this style

GREY = "#666666"
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")  # one more than colours: no two of 56 looks are the same
_LINES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")


class Drawing(NamedTuple):
    """A figure, the numbers plotted in it with the runs they come from, and its caption."""

    figure: Figure
    numbers: pd.DataFrame
    caption: str


class NothingToDraw(Exception):  # noqa: N818  an answer about the study, not an error of the program
    """The study lacks what the figure shows; the message says what."""


class Draw(Protocol):
    """Draws one figure.

    Raises:
        NothingToDraw: the study lacks what the figure shows.
    """

    def __call__(self, study: Study) -> Drawing:
        """Draw `study`; the same study gives the same figure."""
        ...


@dataclass(frozen=True)
class ArmStyle:
    """How an arm looks in every figure of a study."""

    colour: str
    marker: str
    line: Literal["-", "--", "-.", ":"]


def arm_styles(study: Study) -> dict[str, ArmStyle]:
    """A look for every arm, in the order in which they are shown."""
    return styles(arm_order(study))


def styles(names: Iterable[str]) -> dict[str, ArmStyle]:
    """A look for every name, in this order."""
    return {
        name: ArmStyle(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], _LINES[i % len(_LINES)])
        for i, name in enumerate(dict.fromkeys(names))
    }


def handles(looks: Mapping[str, ArmStyle], lines: bool = False) -> list[Line2D]:
    """Entries of a legend, a marker each, with the line's style where lines are drawn."""
    return [
        Line2D([], [], color=look.colour, marker=look.marker, markersize=4,
               linestyle=look.line if lines else "none", label=name)
        for name, look in looks.items()
    ]  # fmt: skip


def panels(
    width: float, height: float, columns: int, rows: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of equal panels, sizes in inches, with room kept below for a legend."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        for axis in axes.flat:
            axis.grid(True, axis="y", color="#dddddd", linewidth=0.5)
    return figure, list(axes.flat)


def legend_below(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    """A legend under the panels, where it hides no data; in fewer columns where so many would not fit."""
    with mpl.rc_context(STYLE):
        entry = _HANDLE_INCHES + _LETTER_INCHES * max(
            (len(str(one.get_label())) for one in handles), default=0
        )
        columns = max(1, min(columns, int(figure.get_figwidth() / entry)))
        figure.legend(handles=list(handles), loc="outside lower center", ncols=columns, frameon=False)


def world_size_axis(axis: Axes, frame: pd.DataFrame) -> None:
    """Mark world sizes on an axis in log2 units; `*` where any run had more ranks than CPUs."""
    crowded = frame.groupby("world_size")["oversubscribed"].any()
    sizes = [int(size) for size in crowded.index]
    axis.set_xticks([math.log2(size) for size in sizes])
    axis.set_xticklabels([f"{size}*" if crowded[size] else str(size) for size in sizes])
    axis.set_xlabel("ranks (log2)")
    axis.set_xlim(math.log2(sizes[0]) - 0.5, math.log2(sizes[-1]) + 0.5)


def dodge(arms: Sequence[str], width: float = 0.5) -> dict[str, float]:
    """Sideways shifts in log2 units that keep the points of different arms apart."""
    step = width / max(len(arms), 2)
    return {arm: (i - (len(arms) - 1) / 2) * step for i, arm in enumerate(arms)}


def whisker(axis: Axes, x: float, interval: Interval, colour: str) -> None:
    """The estimate as a bar and the interval, where there is one, as a whisker."""
    if math.isfinite(interval.estimate):
        axis.plot([x - 0.06, x + 0.06], [interval.estimate] * 2, color=colour, linewidth=1.2)
    if interval.low is not None and interval.high is not None and math.isfinite(interval.high):
        axis.plot([x, x], [interval.low, interval.high], color=colour, linewidth=0.7, alpha=0.8)


def counts(frame: pd.DataFrame, by: Sequence[str] = ("arm", "world_size")) -> str:
    """`n = 3 runs per point`, or the range where points differ."""
    n = frame.groupby(list(by))["run"].nunique()
    low, high = int(n.min()), int(n.max())
    runs = "run" if high == 1 else "runs"
    return f"n = {low} {runs} per point" if low == high else f"n = {low} to {high} {runs} per point"


def whiskers(intervals: Iterable[Interval]) -> str:
    """What the whiskers of a figure are, and why a point may lack one."""
    drawn: set[str] = set()
    lacking: set[str] = set()
    for interval in intervals:
        (lacking if interval.low is None else drawn).add(interval.method)
    lacking -= {BASE}
    given = f"Whiskers: 95 % {'; '.join(sorted(drawn))}." if drawn else "No whiskers."
    return given + (f" None where: {'; '.join(sorted(lacking))}." if lacking else "")


def remarks(study: Study, frame: pd.DataFrame, among: pd.Series | None = None) -> str:
    """What a reader must know about the runs behind a figure: gaps, and ranks that shared a CPU.

    Args:
        study: all cells.
        frame: what is drawn.
        among: which rows of `study.cells` the figure is about; all by default.
    """
    notes = []
    if study.cells["strategy"].notna().all():
        notes.append("This study has no first-order arm, such as SGD, to compare with.")
    cells = study.cells if among is None else study.cells[among]
    undrawn = cells[~cells["run"].isin(frame["run"])]
    if len(undrawn):
        states = undrawn["state"].value_counts().sort_index()
        listed = ", ".join(f"{count} {state}" for state, count in states.items())
        notes.append(f"{len(undrawn)} of {len(cells)} cells have no data here ({listed}).")
    if frame["oversubscribed"].any():
        notes.append("* More ranks than CPUs: times include ranks waiting for each other's turn.")
    return " ".join(notes)


def number(value: float) -> str:
    """Four figures at most, without an exponent where it can be helped: 0.003, 128, 16384."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def sentence(*parts: str) -> str:
    """A caption from its parts, leaving out empty ones."""
    return " ".join(part for part in parts if part)
