"""When the runs of two arms took place: whether drift could pass for a difference between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

Columns = pd.DataFrame | Mapping[str, Sequence[Any]]
"""Runs by column: a frame, or a list a column."""

Times = tuple[str, float, float]  # block, start, end


def one_after_another(first: Columns, second: Columns) -> bool:
    """Whether every run of one arm ended before its counterparts of the other started.

    Counterparts are the runs of the same block or, if no block is shared, all runs. Then the order and the
    arms cannot be told apart: whatever gets slower with time, over the study or within a block, makes the
    later arm slower. Runs at the same time, or in random order, are not affected.

    Args:
        first: runs of one arm: `block`, `started_at`, `ended_at` (Unix seconds).
        second: of the other.
    """
    shared = set(first["block"]) & set(second["block"]) - {""}
    if not shared:
        pairs = [(one, other) for one in _times(first) for other in _times(second)]
    else:
        by_block: dict[str, list[Times]] = defaultdict(list)
        for other in _times(second):
            by_block[other[0]].append(other)
        pairs = [(one, other) for one in _times(first) if one[0] in shared for other in by_block[one[0]]]
    before = all(one[2] <= other[1] for one, other in pairs)
    after = all(other[2] <= one[1] for one, other in pairs)
    return bool(pairs) and (before or after)


def _times(runs: Columns) -> list[Times]:
    return list(zip(runs["block"], runs["started_at"], runs["ended_at"], strict=True))
