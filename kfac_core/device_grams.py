"""Gram matrices on a GPU: at most one strided copy and one product each.

A GPU is limited by launches and by memory traffic, not by multiplications: the patches of a convolution are
copied once, in bounded pieces, and multiplied by one GEMM over all images. `torch.addbmm`, which a CPU runs
as one product, is a GEMM an image there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from kfac_core.convolution import Geometry
from kfac_core.matmul import tf32_products

_PIECE_ELEMENTS = 1 << 26  # of rows copied at once: 256 MiB of float32

_SUMS_WIDER = TorchVersion(torch.__version__) >= "2.8"  # `mm` and `bmm` have `out_dtype`

GramPrecision = Literal["ieee", "tf32", "bfloat16"]


@dataclass(frozen=True)
class DeviceGrams:
    """Sums of outer products of rows, patches and pixels, for one precision.

    Attributes:
        dtype: of the sums, at least float32.
        precision: `ieee` multiplies in `dtype`; `tf32` rounds operands to 11 bits inside the product, on
            GPUs that can; `bfloat16` rounds them to 8 bits before it, so that half-precision activations
            need no copy in float32. Sums are of `dtype` always. The gram of 4,096 by 64 normal numbers has a
            relative error (of norms) of 1e-7 in float32, 3e-4 with bfloat16; TF32 rounds 8 times finer.
    """

    dtype: torch.dtype
    precision: GramPrecision = "tf32"

    def of_rows(self, rows: Tensor, *, with_ones: bool = False) -> Tensor:
        """The sum of row rowT over `rows` [count, n], optionally with a one appended: `[1, n, n]`."""
        count, n = rows.shape
        size = max(1, _PIECE_ELEMENTS // max(1, n))
        total = None
        for piece in rows.split(size) if count > size else (rows,):
            operand = piece
            if with_ones or piece.dtype != self._operand(piece):
                buffer = rows.new_empty(1, len(piece), n + with_ones, dtype=self._operand(piece))
                operand = _filled(buffer, piece.unsqueeze(0), with_ones=with_ones)[0]
            total = self._add(total, operand.mT, operand)
        assert total is not None  # noqa: S101  an empty tensor is one piece
        return total.unsqueeze(0)

    def of_patches(self, images: Tensor, geometry: Geometry, *, with_ones: bool = False) -> Tensor:
        """The sum over all windows of patch patchT, `[groups, n, n]`, as `convolution.patches.patch_gram`.

        Patches lie as columns where pixels are contiguous and as rows where channels are, so that the copy
        reads and writes neighbours together.
        """
        height, width = geometry.output_size(images)
        elements = images.shape[1] * geometry.kernel[0] * geometry.kernel[1] * height * width
        pieces = -(-len(images) * elements // _PIECE_ELEMENTS)
        total = None
        for piece in images.tensor_split(max(1, min(pieces, len(images)))):
            windows = _windows(geometry.pad(piece), geometry, (height, width))
            n, pixels = windows.shape[1:4].numel(), windows.shape[4:].numel()
            if _is_channels_last(images):
                buffer = images.new_empty(len(windows), pixels, n + with_ones, dtype=self._operand(images))
                rows = _filled(buffer, windows.permute(0, 4, 5, 6, 1, 2, 3), with_ones=with_ones)
                columns = rows.mT
            else:
                buffer = images.new_empty(len(windows), n + with_ones, pixels, dtype=self._operand(images))
                columns = _filled(buffer.mT, windows.permute(0, 4, 5, 6, 1, 2, 3), with_ones=with_ones).mT
            total = self._add(total, columns, columns.mT)
        assert total is not None  # noqa: S101  at least one piece
        return total

    def of_pixels(self, images: Tensor, groups: int) -> Tensor:
        """The sum over all pixels of channels channelsT, `[groups, n, n]`, of `[B, C, height, width]`.

        Where channels are contiguous nothing is copied. Else, if they are fewer than an image's pixels, a
        product an image, in one batched GEMM, takes less traffic than bringing the pixels of all images
        together.
        """
        batch, channels, height, width = images.shape
        pixels, n = height * width, channels // groups
        if groups == 1 and _is_channels_last(images):
            return self.of_rows(images.permute(0, 2, 3, 1).reshape(-1, channels))
        whole = images.dtype == self._operand(images) and images.is_contiguous()
        if whole and n <= pixels and batch * channels * n <= _PIECE_ELEMENTS:
            stacked = images.view(batch * groups, n, pixels)
            product = self._multiply(stacked, stacked.mT)
            return product.view(batch, groups, n, n).sum(0) if batch > 1 else product
        return self.of_patches(images, Geometry((1, 1), groups=groups))

    def _operand(self, tensor: Tensor) -> torch.dtype:
        """The dtype in which a tensor is multiplied."""
        if self.precision == "bfloat16" and self.dtype == torch.float32:
            return torch.bfloat16
        return self.dtype

    def _add(self, total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
        """`total + left @ right`, to `total` if there is one."""
        product = self._multiply(left, right)
        return product if total is None else total.add_(product)

    def _multiply(self, left: Tensor, right: Tensor) -> Tensor:
        one = left.ndim == 3 and len(left) == 1
        if one:
            left, right = left[0], right[0]
        with tf32_products(left, allowed=self.precision == "tf32"):
            if left.dtype == self.dtype:
                product = torch.matmul(left, right)
            elif left.is_cuda and _SUMS_WIDER:
                multiply = torch.mm if left.ndim == 2 else torch.bmm
                product = multiply(left, right, out_dtype=self.dtype)
            else:  # the same numbers, more traffic: products of bfloat16 are exact in float32
                product = torch.matmul(left.to(self.dtype), right.to(self.dtype))
        return product.unsqueeze(0) if one else product


def _filled(buffer: Tensor, rows: Tensor, *, with_ones: bool) -> Tensor:
    """`buffer` [groups, count, n + ones] with `rows`, `[groups, count, n]` or as windows."""
    width = buffer.shape[2]
    n = width - with_ones
    sizes = rows.shape[1:]
    split = 1 if rows.ndim == 3 else 3  # windows: image, row, column, then channel and taps
    target = buffer[..., :n].unflatten(2, sizes[split:]).unflatten(1, sizes[:split])
    target.copy_(rows)
    if with_ones:
        buffer[..., n].fill_(1.0)
    return buffer


def _windows(padded: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """Every window, a view `[groups, C, taps down, taps across, B, height, width]`."""
    channels = padded.shape[1] // geometry.groups
    batch, channel, row, column = padded.stride()
    return padded.as_strided(
        (geometry.groups, channels, *geometry.kernel, len(padded), *size),
        (
            channel * channels, channel, row * geometry.dilation[0], column * geometry.dilation[1],
            batch, row * geometry.stride[0], column * geometry.stride[1],
        ),
        padded.storage_offset(),
    )  # fmt: skip


def _is_channels_last(images: Tensor) -> bool:
    return not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
