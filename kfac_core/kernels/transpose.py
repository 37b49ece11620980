"""Transposed copies near memory bandwidth."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kfac_core.kernels.scratch import is_plain

_IN_CACHE = 1 << 18  # elements; a part and its copy fit


def transposed(matrices: Tensor) -> Tensor:
    """A contiguous copy of `matrices.mT`; `matrices` are `[..., rows, columns]`.

    On a CPU torch's own copy works element by element, and its tiled path is a scalar loop. A channel shuffle
    of channels-last data is the same transposition in vector registers, several times faster.
    """
    rows, columns = matrices.shape[-2:]
    if not (matrices.is_cpu and is_plain(matrices) and matrices.numel()):
        return matrices.mT.contiguous()
    pixels = matrices.reshape(1, 1, -1, rows * columns)  # one pixel per matrix, its elements as channels
    shuffled = functional.channel_shuffle(pixels.permute(0, 3, 1, 2), rows)
    return shuffled.permute(0, 2, 3, 1).reshape(*matrices.shape[:-2], columns, rows)


def copy_pixels(images: Tensor, out: Tensor) -> None:
    """Copy `images` [B, C, height, width] to `out` [B, height, width, C], of any strides."""
    if not images.is_cpu or not images.is_contiguous():
        out.copy_(images.permute(0, 2, 3, 1))
        return
    together = max(1, _IN_CACHE // max(1, images[0].numel()))
    for part, place in zip(images.split(together), out.split(together), strict=True):
        place.copy_(transposed(part.flatten(2)).view(place.shape))
