"""Which sums over an image's pixels make up a patch gram, and how to find them with least work.

Entry (tap, tap') of a patch gram sums x[p] x[p + d]T with d = tap' - tap over the pixels p that the tap
visits and whose partner p + d lies in the image: a rectangle. Of one displacement d these rectangles differ
by a few rows and columns at the image's edges, so they are put together from parts that they share.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from kfac_core.kernels.convolution.geometry import Margins

Span = tuple[int, int]
"""Rows or columns, from the first to before the second."""

Window = tuple[slice, slice]
"""A rectangle of pixels as an index: rows and columns."""


class PixelPairs(NamedTuple):
    """A rectangle of pixels p whose partners p + d are in the image too; d is (vertical, horizontal)."""

    displacement: tuple[int, int]
    rows: Span
    columns: Span

    @property
    def window(self) -> Window:
        """The pixels p."""
        return slice(*self.rows), slice(*self.columns)

    def seen_from_partner(self) -> PixelPairs:
        """The pixels p + d with displacement -d, whose sum is this one's transpose."""
        dy, dx = self.displacement
        (top, bottom), (left, right) = self.rows, self.columns
        return PixelPairs((-dy, -dx), (top + dy, bottom + dy), (left + dx, right + dx))


@dataclass
class Recipe:
    """How to find sums over pairs of pixels, by number: all products, then additions and mirrors in order.

    Attributes:
        taps: of the kernel.
        of_taps: for each tap and each tap' (rows first) the number of their sum.
        wanted: how many sums belong to pairs of taps; they have the first numbers, the others only help.
        products: number, the pixels p and their partners.
        additions: number, the sums to add.
        mirrors: number, the sum that this is the transpose of.
        numbers: of every sum, wanted or not.
    """

    taps: int
    of_taps: list[int] = field(default_factory=list)
    wanted: int = 0
    products: list[tuple[int, Window, Window]] = field(default_factory=list)
    additions: list[tuple[int, list[int]]] = field(default_factory=list)
    mirrors: list[tuple[int, int]] = field(default_factory=list)
    numbers: dict[PixelPairs, int] = field(default_factory=dict)


@functools.lru_cache(maxsize=256)  # it takes 0.8 ms for a 3 x 3 kernel
def recipe(size: tuple[int, int], kernel: tuple[int, int], margins: Margins) -> Recipe:
    """For the patch gram of images of this size (height, width), at least as large as the kernel."""
    left, right, top, bottom = margins
    rows, columns = _Axis(size[0], kernel[0], top, bottom), _Axis(size[1], kernel[1], left, right)
    taps = list(product(range(kernel[0]), range(kernel[1])))
    of_taps = [
        PixelPairs((y2 - y, x2 - x), rows.visited(y, y2 - y), columns.visited(x, x2 - x))
        for (y, x), (y2, x2) in product(taps, taps)
    ]
    found = Recipe(len(taps), numbers={pairs: number for number, pairs in enumerate(dict.fromkeys(of_taps))})
    found.of_taps = [found.numbers[pairs] for pairs in of_taps]
    found.wanted = len(found.numbers)
    solved: set[PixelPairs] = set()

    def number_of(pairs: PixelPairs) -> int:
        """Adds the steps to this sum, after those to the sums that it needs."""
        number = found.numbers.setdefault(pairs, len(found.numbers))
        if pairs not in solved:
            solved.add(pairs)
            solve(number, pairs)
        return number

    def solve(number: int, pairs: PixelPairs) -> None:
        (dy, dx), partner = pairs.displacement, pairs.seen_from_partner()
        if (dy, dx) < (0, 0):
            found.mirrors.append((number, number_of(partner)))
        elif len(parts := rows.parts(pairs.rows, dy)) > 1:
            found.additions.append((number, [number_of(pairs._replace(rows=part)) for part in parts]))
        elif len(parts := columns.parts(pairs.columns, dx)) > 1:
            found.additions.append((number, [number_of(pairs._replace(columns=part)) for part in parts]))
        else:
            found.products.append((number, pairs.window, partner.window))

    for pairs in list(found.numbers):
        number_of(pairs)
    return found


@dataclass(frozen=True)
class _Axis:
    """One of the two directions: `size` pixels between margins, and so many taps."""

    size: int
    taps: int
    before: int
    after: int

    def visited(self, tap: int, shift: int) -> Span:
        """The pixels with a partner `shift` further that `tap` visits while the window moves all the way."""
        first = tap - self.before
        places = self.before + self.size + self.after - self.taps + 1
        start = max(0, -shift, first)
        return start, max(start, min(self.size, self.size - shift, first + places))

    def parts(self, span: Span, shift: int) -> list[Span]:
        """`span`, cut wherever a tap begins or ceases to visit."""
        taps = range(max(0, -shift), self.taps - max(0, shift))
        ends = {end for tap in taps for end in self.visited(tap, shift)} | set(span)
        cuts = sorted(end for end in ends if span[0] <= end <= span[1])
        return list(itertools.pairwise(cuts))
