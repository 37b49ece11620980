"""Subsets of a data set in which every class is represented (no torch)."""

from __future__ import annotations

from typing import Any

import numpy as np

Labels = np.ndarray[Any, np.dtype[np.int64]]


def balanced_subset(labels: Labels, count: int) -> Labels:
    """Indices, ascending, of `count` examples: the first of every class, the second of every class, ..."""
    by_class = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    rank_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    round_robin: Labels = by_class[np.lexsort((labels[by_class], rank_in_class))]
    return np.sort(round_robin[:count])
