"""A law of two terms, fitted to measured seconds; and how the terms of an exchange grow with the ranks.

An exchange takes

    parts * rounds(P) * seconds a message + bytes on the busiest wire * seconds a byte

Bandwidth follows from the algorithms: a ring all-reduce sends 2 (P - 1) / P of its buffer over every wire
(Thakur, Rabenseifner, Gropp 2005, IJHPCA 19(1)). Latency is uncertain: a constant is the lower bound, the
length of a ring the upper bound, and the depth of a tree the central value. Over Gloo the number of rounds is
known: its all-reduce is a ring, and parts go directly from rank to rank (`TorchCommunicator`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from analysis.prediction.work import Exchange, Operation

Terms = tuple[float, float]
Row = tuple[float, float, float]
"""Both terms, and the seconds that they took."""

Growth = Literal["low", "central", "high"]

_DISTINCT = 1e-3  # of the determinant: below it, the two terms grew together and cannot be told apart
_ROUNDS: Mapping[Growth, Callable[[int], float]] = MappingProxyType(
    {"low": lambda _: 1.0, "central": math.log2, "high": lambda ranks: ranks - 1.0}
)


@dataclass(frozen=True)
class Seconds:
    """A prediction with its interval."""

    low: float
    central: float
    high: float

    @classmethod
    def sum(cls, parts: Iterable[Seconds]) -> Seconds:
        """Sums of the bounds and of the central values."""
        listed = list(parts)
        return cls(*(math.fsum(getattr(one, side) for one in listed) for side in ("low", "central", "high")))

    def __mul__(self, factor: float) -> Seconds:
        """All three times a factor."""
        return Seconds(factor * self.low, factor * self.central, factor * self.high)


@dataclass(frozen=True)
class Law:
    """Seconds = coefficients · terms.

    Attributes:
        alternatives: coefficients that explain the measurements equally well; they agree where the terms are
            those of the measurements, and part elsewhere.
    """

    coefficients: Terms
    alternatives: tuple[Terms, ...] = ()

    def at(self, terms: Terms) -> float:
        """Seconds."""
        return _dot(self.coefficients, terms)

    def bounds(self, terms: Terms) -> tuple[float, float]:
        """The least and the most that the measurements allow."""
        found = [_dot(one, terms) for one in (self.coefficients, *self.alternatives)]
        return min(found), max(found)

    def __mul__(self, factor: float) -> Law:
        """All coefficients times a factor."""
        scaled = [(factor * a, factor * b) for a, b in (self.coefficients, *self.alternatives)]
        return Law(scaled[0], tuple(scaled[1:]))


def fit_law(rows: Sequence[Row]) -> Law | None:
    """Least squares of the relative error; None without a row that has seconds and a term.

    The second term takes all seconds if the rows cannot tell the two apart. The first is then an alternative.
    """
    relative = [(x / t, y / t) for x, y, t in rows if t > 0 and (x > 0 or y > 0)]
    if not relative:
        return None
    xx, xy, yy = (sum(r[i] * r[j] for r in relative) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(r[i] for r in relative) for i in (0, 1))
    alone = [(x / xx if xx else 0.0, 0.0), (0.0, y / yy if yy else 0.0)]
    if not xx or not yy:
        return Law(alone[0] if xx else alone[1])
    determinant = xx * yy - xy * xy
    if determinant <= _DISTINCT * xx * yy:
        return Law(alone[1], (alone[0],))
    a, b = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if a >= 0 and b >= 0:
        return Law((a, b))
    return Law(min(alone, key=lambda one: sum((_dot(one, row) - 1) ** 2 for row in relative)))


def rounds(algorithm: str, operation: Operation, ranks: int, growth: Growth = "central") -> float:
    """Number of consecutive messages until a part has arrived."""
    if algorithm == "gloo" and growth == "central":
        return ranks - 1.0 if operation == "all_reduce" else 1.0
    return _ROUNDS[growth](ranks)


def wire_bytes(algorithm: str, exchange: Exchange) -> float:
    """Bytes that the busiest rank sends or receives."""
    ranks, total = len(exchange.group), sum(exchange.sizes)
    if exchange.operation == "all_reduce":
        return 2 * (ranks - 1) / ranks * total
    if algorithm == "nccl":
        return float(total)  # pipelined: every link carries every part once
    # Direct: an owner sends its part to (or receives it from) all others, and vice versa all other parts
    return float(max((ranks - 1) * max(exchange.sizes), total - min(exchange.sizes)))


def _dot(one: Terms, other: Terms) -> float:
    return one[0] * other[0] + one[1] * other[1]
