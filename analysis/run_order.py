"""When the runs of two arms took place: whether drift could pass for a difference between them."""

from __future__ import annotations

import pandas as pd


def one_after_another(first: pd.DataFrame, second: pd.DataFrame) -> bool:
    """Whether every run of one arm ended before its counterparts of the other started.

    Counterparts are the runs of the same block or, if no block is shared, all runs. Then the order and the
    arms cannot be told apart: whatever gets slower with time, over the study or within a block, makes the
    later arm slower. Runs at the same time, or in random order, are not affected.

    Args:
        first: runs of one arm: `block`, `started_at`, `ended_at` (Unix seconds).
        second: of the other.
    """
    times = ["block", "started_at", "ended_at"]
    shared = set(first["block"]) & set(second["block"]) - {""}
    if shared:
        both = first[times].merge(second[times], on="block")
    else:
        both = first[times].merge(second[times], how="cross")
    before = both["ended_at_x"] <= both["started_at_y"]
    after = both["ended_at_y"] <= both["started_at_x"]
    return bool(len(both)) and bool(before.all() or after.all())
