"""Which sums over pixels make up the Gram matrix of patches, and the order in which they cost least.

Block (tap, tap') of the matrix sums x[p] x[p + d]T with displacement d = tap' - tap, over the pixels p that
the tap visits and whose partner p + d lies inside the image. These pixels form a rectangle. For one
displacement the rectangles differ only in a few rows and columns at the image's edges, so all of them are
assembled from shared parts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_core.kernels.convolution.geometry import Padding

Span = tuple[int, int]
"""Rows or columns: first, and one past the last."""

Window = tuple[slice, slice]
"""A rectangle of pixels as an index: rows and columns."""


class PixelPairs(NamedTuple):
    """A rectangle of pixels p whose partners p + d lie inside the image; d is (vertical, horizontal)."""

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
class TapSumPlan:
    """How to compute all sums, each known by a number: first the products, then additions, then mirrors.

    Attributes:
        taps: number of taps of the kernel.
        of_taps: number of the sum of each pair of taps, in row-major order.
        wanted: how many sums belong to pairs of taps; they come first, the others are intermediate results.
        products: (number, pixels p, their partners).
        additions: (number, sums to add).
        mirrors: (number, sum of which this one is the transpose).
        numbers: number of every sum.
    """

    taps: int
    of_taps: list[int] = field(default_factory=list)
    wanted: int = 0
    products: list[tuple[int, Window, Window]] = field(default_factory=list)
    additions: list[tuple[int, list[int]]] = field(default_factory=list)
    mirrors: list[tuple[int, int]] = field(default_factory=list)
    numbers: dict[PixelPairs, int] = field(default_factory=dict)


@functools.lru_cache(maxsize=256)  # one entry per layer shape; planning takes longer than a small product
def plan_tap_sums(size: tuple[int, int], kernel: tuple[int, int], padding: Padding) -> TapSumPlan:
    """Plan the sums for images of `size` (height, width), which must be at least as large as the kernel."""
    left, right, top, bottom = padding
    rows, columns = _Axis(size[0], kernel[0], top, bottom), _Axis(size[1], kernel[1], left, right)
    taps = list(product(range(kernel[0]), range(kernel[1])))
    of_taps = [
        PixelPairs((y2 - y, x2 - x), rows.visited(y, y2 - y), columns.visited(x, x2 - x))
        for (y, x), (y2, x2) in product(taps, taps)
    ]
    found = TapSumPlan(
        len(taps), numbers={pairs: number for number, pairs in enumerate(dict.fromkeys(of_taps))}
    )
    found.of_taps = [found.numbers[pairs] for pairs in of_taps]
    found.wanted = len(found.numbers)
    solved: set[PixelPairs] = set()

    def number_of(pairs: PixelPairs) -> int:
        """Add the steps that compute this sum, after those of the sums that it needs."""
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


class TapSums:
    """Memory for every sum of a plan; the caller fills in the products.

    Attributes:
        sums: one `[C, C]` matrix per number.
    """

    def __init__(self, plan: TapSumPlan, images: Tensor) -> None:
        channels = images.shape[1]
        self._plan = plan
        self._wanted = images.new_empty(channels, plan.wanted, channels)
        intermediate = images.new_empty(len(plan.numbers) - plan.wanted, channels, channels)
        self.sums = [*self._wanted.unbind(1), *intermediate]

    def gram(self) -> Tensor:
        """Gram matrix `[n, n]` with n = C * taps, the channel slowest; all products must be filled in.

        One `index_select` writes every element once, instead of a copy per block and one to reorder channels.
        """
        for number, (first, *others) in self._plan.additions:
            total = self.sums[first]
            for other in others:
                total = torch.add(total, self.sums[other], out=self.sums[number])
        for number, original in self._plan.mirrors:
            self.sums[number].copy_(self.sums[original].mT)
        channels, taps = len(self._wanted), self._plan.taps
        of_taps = torch.tensor(self._plan.of_taps, device=self._wanted.device)
        columns = torch.arange(channels, device=self._wanted.device).view(1, -1, 1)  # [tap, C', tap']
        order = of_taps.view(taps, 1, taps) * channels + columns
        return torch.index_select(self._wanted.flatten(1), 1, order.flatten()).view(channels * taps, -1)


@dataclass(frozen=True)
class _Axis:
    """One direction of the image: `size` pixels, padded by `before` and `after`, under a kernel of `taps`."""

    size: int
    taps: int
    before: int
    after: int

    def visited(self, tap: int, shift: int) -> Span:
        """Pixels that `tap` visits over all windows and that have a partner `shift` pixels further."""
        first = tap - self.before
        places = self.before + self.size + self.after - self.taps + 1
        start = max(0, -shift, first)
        return start, max(start, min(self.size, self.size - shift, first + places))

    def parts(self, span: Span, shift: int) -> list[Span]:
        """`span`, split wherever the set of visiting taps changes."""
        taps = range(max(0, -shift), self.taps - max(0, shift))
        ends = {end for tap in taps for end in self.visited(tap, shift)} | set(span)
        cuts = sorted(end for end in ends if span[0] <= end <= span[1])
        return list(itertools.pairwise(cuts))
