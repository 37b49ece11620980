"""A law of two terms with coefficients that are not negative, fitted to measured seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Terms = tuple[float, float]
Row = tuple[float, float, float]
"""Both terms, and the seconds that they took."""

_DISTINCT = 1e-3  # of the determinant: below it, the two terms grew together and cannot be told apart


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


def fit_law(rows: Sequence[Row], prefer: Literal[0, 1] = 1) -> Law | None:
    """Least squares of the relative error; None without a row that has seconds and a term.

    Args:
        rows: measurements.
        prefer: the term that takes all seconds if the rows cannot tell the two apart. Both extremes are then
            alternatives.
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
        return Law(alone[prefer], (alone[1 - prefer],))
    a, b = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if a >= 0 and b >= 0:
        return Law((a, b))
    return Law(min(alone, key=lambda one: sum((_dot(one, row) - 1) ** 2 for row in relative)))


def _dot(one: Terms, other: Terms) -> float:
    return one[0] * other[0] + one[1] * other[1]
