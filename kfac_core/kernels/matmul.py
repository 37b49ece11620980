"""Matrix products in float32 where BLAS leaves half of the processor idle.

torch's BLAS on x86 is MKL, which takes its paths for old processors on AMD's: 95 GFLOP/s on one core of an
EPYC (Zen 5), whatever the shape. oneDNN, which torch has for its convolutions, compiles for the processor
that it finds: 175 to 215 from 128 columns on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kfac_core.kernels.scratch import is_plain
from kfac_core.kernels.transpose import transposed

_WORTH = 1 << 21  # multiplications of a product, from which on oneDNN's 20 us a call are made up for


@functools.cache
def is_amd() -> bool:
    """Whether this processor is one of AMD's; False where torch cannot tell."""
    ask: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)  # not in every torch
    return str(ask().get("cpu_name", "")).startswith("AMD")


@functools.cache
def _linear() -> Callable[..., Tensor] | None:
    """`x`, `w` to `x @ w.mT` by oneDNN where that is ahead of BLAS; it is what compiled models call."""
    if not (is_amd() and torch.backends.mkldnn.is_available()):
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def is_compiled(*operands: Tensor) -> bool:
    """Whether oneDNN multiplies matrices of this kind faster than BLAS, if they are large enough."""
    if _linear() is None:
        return False
    return all(each.is_cpu and each.dtype == torch.float32 and is_plain(each) for each in operands)


def multiply(one: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
    """`one` [m, k] times `other` [k, n], or a batch of both; fastest where `other.mT` is contiguous."""
    if one.ndim > 2:
        return torch.bmm(one, other, out=out)
    linear = _linear()
    if linear is None or one.numel() * other.shape[1] < _WORTH or not is_compiled(one, other):
        return torch.mm(one, other, out=out)
    product = linear(_one_after_another(one), _rows_or_columns(other).mT, None, "none", [], "")
    return product if out is None else out.copy_(product)


def _one_after_another(rows: Tensor) -> Tensor:
    return transposed(rows.mT) if rows.mT.is_contiguous() else rows.contiguous()


def _rows_or_columns(matrix: Tensor) -> Tensor:
    """With either of them contiguous: for anything between oneDNN has only a loop, 100 times slower."""
    if matrix.is_contiguous() or matrix.mT.is_contiguous():
        return matrix
    return matrix.mT.contiguous().mT if matrix.stride(0) == 1 else matrix.contiguous()
