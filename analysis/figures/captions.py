"""Sentences that captions share: intervals and their lack, missing cells, ranks that shared a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from analysis.metrics import BASE
from analysis.records.study import Study
from analysis.statistics.intervals import Interval

SHARED_CPUS = "* More ranks than CPUs"
WAITED = f"{SHARED_CPUS}: times include ranks waiting for each other's turn."
"""Under figures of times, which sharing a CPU changes."""
STARRED = f"{SHARED_CPUS}."
"""Under figures that name world sizes but show no times."""


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
        if interval.low is not None:
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
