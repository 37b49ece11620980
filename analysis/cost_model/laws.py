"""How the cost of an exchange grows with the number of ranks: rounds, and bytes on the wire.

An exchange of so many parts and bytes takes

    parts * latency * rounds(P) + bytes on the busiest wire * seconds per byte

Bandwidth follows from the algorithms (Thakur, Rabenseifner, Gropp 2005, IJHPCA 19(1)): a ring all-reduce
sends 2 (P - 1) / P of its buffer over every wire. Latency is the uncertain part: one constant, the depth of a
tree and the length of a ring are the low, the central and the high answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from analysis.cost_model.work import Exchange

Growth = Literal["low", "central", "high"]

ROUNDS: Mapping[Growth, Callable[[int], float]] = MappingProxyType(
    {"low": lambda _: 1.0, "central": math.log2, "high": lambda ranks: ranks - 1.0}
)


def wire_bytes(algorithm: str, exchange: Exchange) -> float:
    """Bytes that the busiest rank puts on its wire."""
    ranks, total = len(exchange.group), exchange.total_bytes
    if exchange.operation == "all_reduce":
        return 2 * (ranks - 1) / ranks * total
    if algorithm == "nccl":
        return float(total)  # a pipeline: every wire carries every part once
    if exchange.operation == "reduce_parts":
        # Gloo reduces by a ring, after which a part's pieces go to its owner
        return (ranks - 1) / ranks * total * (1 + 1 / ranks)
    # Gloo broadcasts along a binomial tree: an owner sends its part once for every level
    return max(math.ceil(math.log2(ranks)) * max(exchange.sizes), (ranks - 1) / ranks * total)


ALGORITHMS = ("gloo", "nccl")
