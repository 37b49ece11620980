"""Growth of the cost of an exchange with the number of ranks: rounds, and bytes on the wire.

An exchange takes

    parts * latency * rounds(P) + bytes on the busiest wire * seconds per byte

Bandwidth follows from the algorithms: a ring all-reduce sends 2 (P - 1) / P of its buffer over every wire
(Thakur, Rabenseifner, Gropp 2005, IJHPCA 19(1)). Latency is uncertain: a constant is the lower bound, the
length of a ring the upper bound, and the depth of a tree the central value. Over Gloo the number of rounds is
known: its all-reduce is a ring, and parts go directly from rank to rank (`kfac_core.collectives.direct`).
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
    """Number of consecutive messages until a part has arrived."""
    if algorithm == "gloo" and growth == "central":
        return ranks - 1.0 if operation == "all_reduce" else 1.0
    return _ROUNDS[growth](ranks)


def wire_bytes(algorithm: str, exchange: Exchange) -> float:
    """Bytes that the busiest rank sends or receives."""
    ranks, total = len(exchange.group), exchange.total_bytes
    if exchange.operation == "all_reduce":
        return 2 * (ranks - 1) / ranks * total
    if algorithm == "nccl":
        return float(total)  # pipelined: every link carries every part once
    # Direct: an owner sends its part to (or receives it from) all others, and vice versa all other parts
    return float(max((ranks - 1) * max(exchange.sizes), total - min(exchange.sizes)))


ALGORITHMS = ("gloo", "nccl")
