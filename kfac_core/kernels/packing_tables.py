"""Index tables that pack small symmetric matrices in the same layout as `packing`.

Block by block, a small matrix takes a dozen operations that cost more than its bytes; with a table it takes
one `index_select`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kfac_core.kernels.scratch import is_plain, scratch

LARGEST = 320
"""The largest n with a table; larger tables take too much memory on every rank for what they save."""


@dataclass(frozen=True)
class Table:
    """The index table of one matrix size.

    Attributes:
        sources: index in the matrix of every packed element, `[n(n+1)/2]`.
        places: index in the packed triangle of every matrix element, `[n * n]`.
        diagonal: index in the packed triangle of the diagonal's elements, `[n]`.
    """

    sources: Tensor
    places: Tensor
    diagonal: Tensor

    def pack(self, matrices: Tensor, out: Tensor, scale: float) -> None:
        """Write one triangle of `scale * matrices` [blocks, n, n] to `out` [blocks, n(n+1)/2]."""
        flat = _flat(matrices.contiguous())
        torch.index_select(flat, -1, self.sources, out=out.squeeze(0)).mul_(scale)

    def copy(self, matrices: Tensor, out: Tensor) -> None:
        """`pack` without a scale."""
        torch.index_select(_flat(matrices.contiguous()), -1, self.sources, out=out.squeeze(0))

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write both triangles to `out` [blocks, n, n], contiguous."""
        torch.index_select(packed.squeeze(0), -1, self.places, out=_flat(out))

    def fold(self, packed: Tensor, scale: float, mean: Tensor, decay: float) -> None:
        """`mean = decay * mean + scale * matrix`, in place."""
        matrices = scratch(mean, *mean.shape)
        self.unpack(packed, matrices)
        mean.mul_(decay).add_(matrices, alpha=scale)

    def trace(self, packed: Tensor) -> Tensor:
        """Sum of the diagonals of all blocks."""
        return packed.index_select(-1, self.diagonal).sum()


def table(n: int, like: Tensor) -> Table:
    """The table for matrices of `n` rows on the device of `like`."""
    return _cached_table(n, like.device) if is_plain(like) else _make_table(n, like.device)


@cache
def _cached_table(n: int, device: torch.device) -> Table:
    with torch.inference_mode(False):  # else passes outside inference mode could not use it
        return _make_table(n, device)


def _make_table(n: int, device: torch.device) -> Table:
    half, lead, shift = n // 2, n - n // 2, 1 - n % 2
    indices = torch.arange(n, dtype=torch.int32, device=device)
    low, high = torch.minimum(indices[:, None], indices), torch.maximum(indices[:, None], indices)
    leading = (high + shift) * lead + low
    trailing = (low - lead) * lead + high - lead + 1 - shift
    across = (lead + shift) * lead + low * half + high - lead
    places = torch.where(high < lead, leading, torch.where(low >= lead, trailing, across))
    rows, columns = torch.triu_indices(n, n, device=device)
    sources = torch.empty(rows.shape, dtype=torch.int32, device=device)
    sources[places[rows, columns].long()] = (rows * n + columns).int()
    return Table(sources, places.flatten(), places.diagonal().contiguous())


def _flat(matrices: Tensor) -> Tensor:
    """`[blocks, n * n]`, or `[n * n]` for a single block, where `index_select` is faster."""
    return matrices.view(len(matrices), -1).squeeze(0)
