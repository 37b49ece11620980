"""Transposed copies at the speed of memory."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kfac_core.kernels.scratch import is_plain

_IN_CACHE = 1 << 18  # elements of a part, twice


def transposed(matrices: Tensor) -> Tensor:
    """A contiguous copy of `matrices.mT`; `matrices` are `[..., rows, columns]`.

    On a CPU torch's own copy goes element by element, and its one path in tiles is a scalar loop. Shuffling
    channels that lie innermost is the same transposition, in vector registers: 0.6 ms for a matrix of 1,024,
    where the copy takes 4.6 (columns a power of two apart), and 0.4 for 128 images of 16 channels and 32 x
    32 pixels, where it takes 1.5 (one thread of an AMD EPYC; reading and writing alone take 0.3 and 0.6).
    """
    rows, columns = matrices.shape[-2:]
    if not (matrices.is_cpu and is_plain(matrices) and matrices.numel()):
        return matrices.mT.contiguous()
    pixels = matrices.reshape(1, 1, -1, rows * columns)  # a matrix is a pixel, and its elements the channels
    shuffled = functional.channel_shuffle(pixels.permute(0, 3, 1, 2), rows)
    return shuffled.permute(0, 2, 3, 1).reshape(*matrices.shape[:-2], columns, rows)


def copy_pixels(images: Tensor, out: Tensor) -> None:
    """Copy `images` [B, C, height, width] to `out` [B, height, width, C], whatever its order in memory."""
    if not images.is_cpu or not images.is_contiguous():
        out.copy_(images.permute(0, 2, 3, 1))
        return
    together = max(1, _IN_CACHE // max(1, images[0].numel()))
    for part, place in zip(images.split(together), out.split(together), strict=True):
        place.copy_(transposed(part.flatten(2)).view(place.shape))
