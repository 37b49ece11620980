"""Which world size a figure of one world size shows, and what its caption calls it."""

from __future__ import annotations

import pandas as pd

from analysis.figures.drawing import ranks_label


def with_own_cpus(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of world sizes that had a CPU for each rank in every run; all rows if there are none."""
    shared = frame.groupby("world_size")["oversubscribed"].transform("any").astype("bool")
    return frame[~shared] if not shared.all() else frame


def largest(frame: pd.DataFrame) -> int:
    """The largest world size that had a CPU for each rank; without such, the largest of all.

    Where ranks share a CPU their times are not judged, so that they would be a poor example of the study.
    """
    return int(with_own_cpus(frame)["world_size"].max())


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
