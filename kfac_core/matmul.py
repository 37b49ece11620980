"""Matrix products in float32, by oneDNN where it is faster than torch's BLAS.

torch's BLAS on x86 is MKL, which uses its code paths for old processors on AMD's. oneDNN, which torch uses
for convolutions, generates code for the processor that it runs on.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

# ------------------------------------------------------------
# Scratch memory for use within one function, reused between calls.


_PLAIN = (Tensor, Parameter)


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Tensor] = {}


_buffers = _Buffers()


def scratch(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory of `shape` in the dtype and on the device of `like`, until the next call.

    On a CPU one buffer per thread and dtype is kept and grows to the largest request: newly allocated
    megabytes cost a page fault every 4 KiB, more than the copy that fills them. On a GPU torch's caching
    allocator keeps freed memory.
    """
    if not like.is_cpu or not is_plain(like):
        return like.new_empty(shape)
    elements = math.prod(shape)
    held = _buffers.by_dtype.get(like.dtype)
    if held is None or held.numel() < elements:
        with torch.inference_mode(False):  # else later training steps could not write to it
            held = _buffers.by_dtype[like.dtype] = like.new_empty(elements)
    return held[:elements].view(shape)


def is_plain(like: Tensor) -> bool:
    """Whether tensors made like this one may be cached: not for a subclass, as in an emulated world."""
    return type(like) in _PLAIN


# ------------------------------------------------------------
# Transposed copies near memory bandwidth.


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


_MIN_MULTIPLICATIONS = (
    1 << 21
)  # multiplications of a product, above which oneDNN's overhead per call pays off


@functools.cache
def is_amd() -> bool:
    """Whether this processor is one of AMD's; False where torch does not report it."""
    capabilities: Callable[[], Mapping[str, Any]] = getattr(
        torch.cpu, "get_capabilities", dict
    )  # not in every torch
    return str(capabilities().get("cpu_name", "")).startswith("AMD")


@functools.cache
def _linear() -> Callable[..., Tensor] | None:
    """A function from `x`, `w` to `x @ w.mT` by oneDNN, as compiled models call it, where it is faster."""
    if not (is_amd() and torch.backends.mkldnn.is_available()):
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def prefers_onednn(*operands: Tensor) -> bool:
    """Whether oneDNN multiplies large matrices of this kind faster than BLAS."""
    if _linear() is None:
        return False
    return all(each.is_cpu and each.dtype == torch.float32 and is_plain(each) for each in operands)


@contextmanager
def tf32_products(like: Tensor, *, allowed: bool) -> Iterator[None]:
    """Products of float32 on a GPU use its TF32 units only if `allowed`, whatever torch is set to."""
    if not like.is_cuda:
        yield
        return
    settings = torch.backends.cuda.matmul
    name: str = "allow_tf32"
    wanted: object = allowed
    if hasattr(settings, "fp32_precision"):  # torch 2.9; the older name cannot be read once this one was set
        name, wanted = "fp32_precision", "tf32" if allowed else "ieee"
    before = getattr(settings, name)
    if before != wanted:
        setattr(settings, name, wanted)
    try:
        yield
    finally:
        if before != wanted:
            setattr(settings, name, before)


def multiply(one: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
    """`one` [m, k] times `other` [k, n], or a batch of both; fastest if `other.mT` is contiguous."""
    if one.ndim > 2:
        return torch.bmm(one, other, out=out)
    linear = _linear()
    if (
        linear is None
        or one.numel() * other.shape[1] < _MIN_MULTIPLICATIONS
        or not prefers_onednn(one, other)
    ):
        return torch.mm(one, other, out=out)
    product = linear(_contiguous_rows(one), _rows_or_columns(other).mT, None, "none", [], "")
    return product if out is None else out.copy_(product)


def _contiguous_rows(rows: Tensor) -> Tensor:
    return transposed(rows.mT) if rows.mT.is_contiguous() else rows.contiguous()


def _rows_or_columns(matrix: Tensor) -> Tensor:
    """A matrix with contiguous rows or columns: for other strides oneDNN has only a slow generic loop."""
    if matrix.is_contiguous() or matrix.mT.is_contiguous():
        return matrix
    return matrix.mT.contiguous().mT if matrix.stride(0) == 1 else matrix.contiguous()
