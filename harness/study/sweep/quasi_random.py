"""Quasi-random points of a search space: Sobol's sequence with a digital shift, the same on every machine.

Ids of cells depend on these points, so they must not change with the version of a library: all arithmetic is
on whole numbers, and the shift comes from SHA-256. `scipy.stats.qmc.Sobol` gives the same sequence without
the shift.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

_BITS = 32

# Degree, coefficients and first direction numbers of every dimension after the first: Joe and Kuo (2008),
# "Constructing Sobol sequences with better two-dimensional projections", table new-joe-kuo-6.21201.
_JOE_KUO = (
    (1, 0, (1,)),
    (2, 1, (1, 3)),
    (3, 1, (1, 3, 1)),
    (3, 2, (1, 1, 1)),
    (4, 1, (1, 1, 3, 3)),
    (4, 4, (1, 3, 5, 13)),
    (5, 2, (1, 1, 5, 5, 17)),
    (5, 4, (1, 1, 5, 5, 5)),
    (5, 7, (1, 1, 7, 11, 19)),
    (5, 11, (1, 1, 5, 1, 1)),
    (5, 13, (1, 1, 1, 3, 11)),
    (5, 14, (1, 3, 5, 5, 31)),
    (6, 1, (1, 3, 3, 9, 7, 49)),
    (6, 13, (1, 1, 1, 15, 21, 21)),
    (6, 16, (1, 3, 1, 13, 27, 49)),
)
MOST_DIMENSIONS = len(_JOE_KUO) + 1


def sobol(dimensions: int, seed: int) -> Iterator[tuple[float, ...]]:
    """Points in the open unit cube, without end.

    Args:
        dimensions: at most `MOST_DIMENSIONS`.
        seed: of the shift; -1 for none, the sequence itself.
    """
    directions = [_directions(dimension) for dimension in range(dimensions)]
    point = [_shift(seed, dimension) for dimension in range(dimensions)]
    index = 0
    while True:
        yield tuple((value + 0.5) / 2**_BITS for value in point)
        zeros = (~index & (index + 1)).bit_length() - 1  # Gray code (Antonov & Saleev 1979): one change
        point = [value ^ column[zeros] for value, column in zip(point, directions, strict=True)]
        index += 1


def _shift(seed: int, dimension: int) -> int:
    if seed < 0:
        return 0
    digest = hashlib.sha256(f"kronscale {seed} {dimension}".encode()).digest()
    return int.from_bytes(digest[: _BITS // 8], "big")


def _directions(dimension: int) -> list[int]:
    """The direction numbers of one dimension, as whole numbers of `_BITS` bits."""
    if dimension == 0:
        return [1 << (_BITS - 1 - bit) for bit in range(_BITS)]
    degree, coefficients, first = _JOE_KUO[dimension - 1]
    numbers = [value << (_BITS - 1 - bit) for bit, value in enumerate(first)]
    for bit in range(degree, _BITS):
        value = numbers[bit - degree] ^ (numbers[bit - degree] >> degree)
        for place in range(1, degree):
            if coefficients >> (degree - 1 - place) & 1:
                value ^= numbers[bit - place]
        numbers.append(value)
    return numbers
