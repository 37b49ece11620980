"""How the cost of an exchange grows with the number of ranks: rounds, and bytes on the wire.

An exchange of so many parts and bytes takes

    parts * latency * rounds(P) + bytes on the busiest wire * seconds per byte

Bandwidth follows from the algorithms: a ring all-reduce sends 2 (P - 1) / P of its buffer over every wire
(Thakur, Rabenseifner, Gropp 2005, IJHPCA 19(1)). Latency is the uncertain part: one constant and the length
of a ring are the low and the high answer. The central one is the depth of a tree, but over Gloo it is known:
its all-reduce is a ring, and parts go straight from rank to rank (`kfac_core.collectives.direct`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from analysis.cost_model.work import Exchange, Operation

Growth = Literal["low", "central", "high"]

_ROUNDS: Mapping[Growth, Callable[[int], float]] = MappingProxyType(
    {"low": lambda _: 1.0, "central": math.log2, "high": lambda ranks: ranks - 1.0}
)


def rounds(algorithm: str, operation: Operation, ranks: int, growth: Growth = "central") -> float:
    """How many messages follow each other before a part has arrived."""
    if algorithm == "gloo" and growth == "central":
        return ranks - 1.0 if operation == "all_reduce" else 1.0
    return _ROUNDS[growth](ranks)


def wire_bytes(algorithm: str, exchange: Exchange) -> float:
    """Bytes that the busiest rank puts on its wire, or takes from it."""
    ranks, total = len(exchange.group), exchange.total_bytes
    if exchange.operation == "all_reduce":
        return 2 * (ranks - 1) / ranks * total
    if algorithm == "nccl":
        return float(total)  # a pipeline: every wire carries every part once
    # Straight: an owner sends its part to all others, or takes it from them; and the other way round the rest
    return float(max((ranks - 1) * max(exchange.sizes), total - min(exchange.sizes)))


ALGORITHMS = ("gloo", "nccl")
