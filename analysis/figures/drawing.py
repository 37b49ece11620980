"""What all figures share: the result of drawing, and how arms and world sizes look.

Colours are Okabe and Ito's (2008), which colour-blind readers can distinguish. Each comes with a marker, a
line style or a hatch, so that figures also work in black and white.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import matplotlib as mpl
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from analysis.metrics import arm_order
from analysis.records.study import Study
from analysis.statistics.intervals import Interval

ONE_COLUMN, TWO_COLUMNS = 3.5, 7.16
"""Widths in inches of one and two columns of the IEEE's journals."""

STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "hatch.linewidth": 0.5, "pdf.fonttype": 42, "svg.hashsalt": "kronscale",
    "figure.dpi": 100, "savefig.dpi": 200, "text.usetex": False,
}  # fmt: skip


def in_style() -> AbstractContextManager[None]:
    """Matplotlib's defaults and `STYLE`, whatever a user's matplotlibrc says."""
    return style.context(["default", STYLE])


_LETTER_INCHES, _HANDLE_INCHES = 0.06, 0.35  # of a legend in this style

GREY = "#666666"
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")  # one more than colours, so 56 styles differ
_LINES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")


# Dates and program versions in the metadata would change the bytes of an unchanged figure.
_NO_METADATA: dict[str, dict[str, None]] = {
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "png": {"Software": None},
}


class Drawing(NamedTuple):
    """A figure, the plotted numbers with the runs that they come from, and a caption."""

    figure: Figure
    numbers: pd.DataFrame
    caption: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figure to `path` (.pdf with TrueType fonts, or .png), and its numbers beside it as .csv.

        Raises:
            ValueError: the path ends otherwise.
        """
        target, engine = Path(path), self.figure.get_layout_engine()
        if target.suffix not in (".pdf", ".png"):
            raise ValueError(f"{target} must end in .pdf or .png")
        target.write_bytes(self.image("pdf" if target.suffix == ".pdf" else "png"))
        self.figure.set_layout_engine(engine)  # laid out anew if its size changes
        self.numbers.to_csv(target.with_suffix(".csv"), index=False, lineterminator="\n")

    def image(self, kind: Literal["pdf", "png"]) -> bytes:
        """One format, byte-identical whenever it is drawn from the same records."""
        buffer = io.BytesIO()
        with in_style():
            _lay_out(self.figure)
            self.figure.savefig(buffer, format=kind, metadata=_NO_METADATA[kind])
        return buffer.getvalue()


def save(drawing: Drawing, folder: Path, name: str) -> list[Path]:
    """Write `<name>.pdf`, `.png` and `.csv` (the plotted numbers) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "pdf": drawing.image("pdf"),
        "png": drawing.image("png"),
        "csv": drawing.numbers.to_csv(index=False, lineterminator="\n").encode(),
    }
    paths = [folder / f"{name}.{kind}" for kind in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    return paths


def _lay_out(figure: Figure) -> None:
    """Place panels, titles and legends once for all formats; `savefig` would do so twice for each.

    Which ticks a panel has depends on its size, and its size on their labels, hence two passes. Widths of
    text depend on the resolution, by several per cent at a low one, so they are measured at the files'.
    """
    engine = figure.get_layout_engine()
    if engine is None:
        return
    screen = figure.dpi
    figure.dpi = mpl.rcParams["savefig.dpi"]
    for _ in range(2):
        engine.execute(figure)
    figure.dpi = screen
    figure.set_layout_engine(None)


class NothingToDraw(Exception):  # noqa: N818  a result about the study, not a program error
    """The study lacks data that the figure needs; the message names it."""


class Draw(Protocol):
    """Draws one figure.

    Raises:
        NothingToDraw: the study lacks data that the figure needs.
    """

    def __call__(self, study: Study) -> Drawing:
        """Draw `study`; the same study gives the same figure."""
        ...


@dataclass(frozen=True)
class ArmStyle:
    """Colour, marker and line of an arm, the same in every figure of a study."""

    colour: str
    marker: str
    line: Literal["-", "--", "-.", ":"]


def arm_styles(study: Study, drawn: Collection[str]) -> dict[str, ArmStyle]:
    """The styles of the arms in `drawn`, in display order; an arm has the same style in every figure."""
    wanted = set(drawn)
    return {arm: style for arm, style in styles(arm_order(study)).items() if arm in wanted}


def styles(names: Iterable[str]) -> dict[str, ArmStyle]:
    """A style for every name, in this order."""
    return {
        name: ArmStyle(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], _LINES[i % len(_LINES)])
        for i, name in enumerate(dict.fromkeys(names))
    }


def handles(looks: Mapping[str, ArmStyle], lines: bool = False, size: float = 4) -> list[Line2D]:
    """Legend entries: a marker each, with the line style if the figure draws lines."""
    return [
        Line2D([], [], color=look.colour, marker=look.marker, markersize=size,
               linestyle=look.line if lines else "none", label=name)
        for name, look in looks.items()
    ]  # fmt: skip


def panels(
    width: float, height: float, columns: int, rows: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of equal panels, sizes in inches, with space for a legend below."""
    with in_style():
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        for axis in axes.flat:
            axis.grid(True, axis="y", color="#dddddd", linewidth=0.5)
    return figure, list(axes.flat)


def panel_grid(
    titles: Sequence[str], most: int, height: float, margin: float, width: float = TWO_COLUMNS, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A titled panel per entry, at most `most` side by side.

    Args:
        titles: of the panels.
        most: panels in a row.
        height: of a row of panels, in inches.
        margin: height of what is not panels, in inches.
        width: of the figure, in inches.
        options: `ylabel` of the first panel in each row; everything else goes to `subplots`.

    Returns:
        The figure and the panels, without the empty ones at the end.
    """
    rows = -(-len(titles) // most)
    columns = -(-len(titles) // rows)  # five panels are three and two, not four and one
    ylabel = options.pop("ylabel", "")
    figure, axes = panels(width, height * rows + margin, columns, rows, **options)
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title, fontsize=8)
    for axis in axes[len(titles) :]:
        axis.set_axis_off()
    for axis in axes[::columns]:
        axis.set_ylabel(ylabel)
    return figure, axes[: len(titles)]


def legend_below(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    """A legend under the panels, with fewer columns if `columns` do not fit.

    A tuple of handles is one entry, side by side, labelled as its first.
    """
    labels = [str((one[0] if isinstance(one, tuple) else one).get_label()) for one in handles]
    with in_style():
        entry = _HANDLE_INCHES + _LETTER_INCHES * max(map(len, labels), default=0)
        columns = max(1, min(columns, int(figure.get_figwidth() / entry)))
        figure.legend(
            list(handles), labels, loc="outside lower center", ncols=columns, frameon=False,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        )  # fmt: skip


def world_size_axis(axis: Axes, frame: pd.DataFrame) -> None:
    """Mark world sizes on an axis in log2 units; `*` where any run had more ranks than CPUs."""
    labels = world_size_labels(frame)
    sizes = list(labels)
    axis.set_xticks([math.log2(size) for size in sizes])
    axis.set_xticklabels(list(labels.values()))
    axis.set_xlabel("ranks (log2)")
    axis.set_xlim(math.log2(sizes[0]) - 0.5, math.log2(sizes[-1]) + 0.5)


def world_size_bars(axis: Axes, frame: pd.DataFrame) -> None:
    """Mark world sizes on an axis of bars at 0, 1, ...; `*` as in `world_size_axis`."""
    labels = world_size_labels(frame)
    axis.set_xticks(range(len(labels)), list(labels.values()))
    axis.set_xlim(-0.6, len(labels) - 0.4)
    axis.set_xlabel("ranks")


def world_size_labels(frame: pd.DataFrame) -> dict[int, str]:
    """`1`, `2`, `4*` by world size: the star where any run had more ranks than CPUs."""
    oversubscribed = frame.groupby("world_size")["oversubscribed"].any()
    return {int(size): f"{size}*" if oversubscribed[size] else str(size) for size in oversubscribed.index}


def ranks_label(size: int, runs: pd.DataFrame) -> str:
    """`1 rank`, `4* ranks`: the star if any of `runs` had more ranks than CPUs."""
    star = "*" if runs["oversubscribed"].any() else ""
    return f"{size}{star} rank" + ("s" if size > 1 else "")


def dodge(arms: Sequence[str], width: float = 0.5) -> dict[str, float]:
    """Horizontal shifts in log2 units that separate the points of different arms."""
    step = width / max(len(arms), 2)
    return {arm: (i - (len(arms) - 1) / 2) * step for i, arm in enumerate(arms)}


def whisker(axis: Axes, x: float, interval: Interval, colour: str) -> None:
    """Draw the estimate as a bar and its interval, if it has one, as a whisker; an arrow if it has no end."""
    if math.isfinite(interval.estimate):
        axis.plot([x - 0.06, x + 0.06], [interval.estimate] * 2, color=colour, linewidth=1.2)
    if interval.low is None or interval.high is None or not math.isfinite(interval.low):
        return
    if math.isfinite(interval.high):
        axis.plot([x, x], [interval.low, interval.high], color=colour, linewidth=0.7, alpha=0.8)
    else:
        axis.plot([x], [interval.low], "_", color=colour, markersize=4)  # and within the axis' limits
        axis.annotate(
            "", xy=(x, 1), xycoords=("data", "axes fraction"), xytext=(x, interval.low), textcoords="data",
            arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


def counts(frame: pd.DataFrame, by: Sequence[str] = ("arm", "world_size")) -> str:
    """`n = 3 runs per point`, or the range if points differ."""
    n = frame.groupby(list(by))["run"].nunique()
    low, high = int(n.min()), int(n.max())
    runs = "run" if high == 1 else "runs"
    return f"n = {low} {runs} per point" if low == high else f"n = {low} to {high} {runs} per point"


def ranks(size: int) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{size} rank" if size == 1 else f"{size} ranks"


def number(value: float) -> str:
    """At most four digits, without an exponent if possible: 0.003, 128, 16384."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def sentence(*parts: str) -> str:
    """Join the parts of a caption that are not empty."""
    return " ".join(part for part in parts if part)
