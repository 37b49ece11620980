"""What captions and legends share: intervals, misses, the world size that is shown, missing cells."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd
from matplotlib.lines import Line2D

from analysis.figures.drawing import GREY, ranks_label
from analysis.metrics import BASE, time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import NO_RATIO, Interval

SHARED_CPUS = "* More ranks than CPUs"
WAITED = f"{SHARED_CPUS}: times include ranks waiting for each other's turn."
"""Under figures of times, which sharing a CPU changes."""
STARRED = f"{SHARED_CPUS}."
"""Under figures that name world sizes but show no times."""
MISSED = "missed the target"


def whiskers(intervals: Iterable[Interval], of: str = "") -> str:
    """How the whiskers were computed, and which points have none, and why.

    Args:
        intervals: of the drawn points.
        of: the quantity, in a figure where one has whiskers and another has none.
    """
    drawn: set[str] = set()
    others: set[str] = set()
    few: set[int] = set()
    all_drawn, endless = True, False
    for interval in intervals:
        method = interval.method
        if interval.low is not None and NO_RATIO not in method:
            drawn.add(method if "93.75 %" in method else f"95 % {method}")
            endless |= interval.high is not None and math.isinf(interval.high)
        elif "no interval" in method:
            few.add(interval.n)
            all_drawn &= method.startswith("n=")  # a level, whose runs are dots; a ratio has one marker
        elif method != BASE:
            others.add(method)
    what = f" of {of}" if of else ""
    parts = [f"Whiskers{what}: {'; '.join(sorted(drawn))}."] if drawn else []
    parts += ["An arrow: misses leave the upper limit unknown."] if endless else []
    if few:
        n = f"n = {' or '.join(map(str, sorted(few)))}"
        shown = "; every run is drawn" if all_drawn else ""
        parts.append(
            f"No whiskers where {n}: too few runs{shown}."
            if drawn
            else f"No intervals{what}: too few runs ({n}){shown}."
        )
    parts += [f"{other[0].upper()}{other[1:]}." for other in sorted(others)]
    return " ".join(parts)


def remarks(study: Study, frame: pd.DataFrame, among: pd.Series | None = None, star: str = WAITED) -> str:
    """Cells without data, a missing first-order arm, and ranks that shared a CPU.

    Args:
        study: all cells.
        frame: the rows that are drawn.
        among: mask over `study.cells`: the cells that the figure is about; all by default.
        star: what to say if ranks shared a CPU; empty where the figure names no world size.
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
    if star and frame["oversubscribed"].any():
        notes.append(star)
    return " ".join(notes)


def with_reached(study: Study, numbers: pd.DataFrame) -> pd.DataFrame:
    """`numbers` with `reached`: whether its run reached the target.

    The study's rule decides; of a run that it does not score, such as one that failed, any evaluation does.
    """
    rows = study.evaluations.astype({"run": "str"}).merge(
        study.cells[["run", "target_metric", "target_value", "target_direction"]], on="run"
    )
    rows = rows[rows["metric"] == rows["target_metric"]]
    above = rows["value"] >= rows["target_value"]
    below = rows["value"] <= rows["target_value"]
    there = above.where(rows["target_direction"] == "higher", below)
    reached = dict(there.groupby(rows["run"]).any())
    scored = time_to_accuracy(study)
    reached |= dict(zip(scored["run"], scored["reached"], strict=True))
    return numbers.assign(reached=[bool(reached.get(run, False)) for run in numbers["run"]])


def missed_key(label: str = MISSED) -> Line2D:
    """A legend entry: a hollow marker in no arm's colour."""
    return Line2D([], [], color=GREY, marker="o", markerfacecolor="white", markersize=4, linestyle="none",
                  label=label)  # fmt: skip


def missed_keys(numbers: pd.DataFrame) -> list[Line2D]:
    """The entry, if any of these runs missed."""
    return [] if numbers["reached"].all() else [missed_key()]


def missed_words(numbers: pd.DataFrame) -> str:
    """Caption: how many of the drawn runs missed, and that they are hollow."""
    runs = numbers.drop_duplicates("run")
    missed = int((~runs["reached"]).sum())
    return f"Hollow: {missed} of {len(runs)} runs, which {MISSED}." if missed else ""


def largest(frame: pd.DataFrame) -> int:
    """The largest world size that had a CPU for each rank; without such, the largest of all.

    Where ranks share a CPU their times are not judged, so that they would be a poor example of the study.
    """
    shared = frame.groupby("world_size")["oversubscribed"].any()
    own = shared[~shared] if not shared.all() else shared
    return int(own.index.max())


def largest_words(frame: pd.DataFrame, size: int, what: str) -> str:
    """`2 ranks, the largest world size evaluated`, and whether larger ones lacked CPUs.

    Args:
        frame: rows of every world size.
        size: what `largest` gave.
        what: what the study did on it.
    """
    label = ranks_label(size, frame[frame["world_size"] == size])
    beyond = " with a CPU for each rank" if size < frame["world_size"].max() else ""
    return f"{label}, the largest world size {what}{beyond}"
