"""Exact distributions of the two rank statistics; needs neither numpy nor scipy."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate


@lru_cache
def mann_whitney(m: int, n: int) -> tuple[float, ...]:
    """P(U <= u) of equal arms, u = 0 .. mn (Hollander, Wolfe & Chicken, section 4.3).

    Arrangements by U are the coefficients of the Gaussian binomial [m+n choose m], built one factor
    (1 - q**(n+i)) / (1 - q**i) at a time.
    """
    counts = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for u in range(m * n, n + i - 1, -1):
            counts[u] -= counts[u - n - i]
        for u in range(i, m * n + 1):
            counts[u] += counts[u - i]
    return tuple(total / math.comb(m + n, m) for total in accumulate(counts))


@lru_cache
def signed_rank(n: int) -> tuple[float, ...]:
    """P(W <= w) of Wilcoxon's signed ranks, w = 0 .. n(n+1)/2: each rank has either sign with equal odds."""
    counts = [1]
    for rank in range(1, n + 1):
        shifted = [0] * rank + counts
        counts = [a + b for a, b in zip(counts + [0] * rank, shifted, strict=True)]
    return tuple(total / 2**n for total in accumulate(counts))
