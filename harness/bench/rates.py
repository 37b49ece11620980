"""The rates of this machine: products, copies, the link between ranks; measured where the benchmark runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from harness.calibrate import timed_once
from harness.training.world.single_copy import find_readable_peers
from kfac_core.collectives import connect
from kfac_core.kernels.matmul import multiply

_REPEATS = 5
_PRODUCTS = ((1024, 1024, 1024), (128, 65536, 128), (64, 65536, 64), (2048, 2048, 2048))
_COPIED_ELEMENTS = 1 << 24
_REDUCED_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Rates:
    """The best of several repetitions on one rank, all ranks measuring at the same time.

    Attributes:
        flops: of a float32 matrix product, 1/s; the best of square, tall and narrow shapes, by torch's BLAS
            or by the products that K-FAC uses.
        blas_flops: the same by torch's BLAS alone, which other packages use.
        copy_bytes: read and written by a copy of 64 MB, bytes/s.
        link_bytes: bytes of a 16 MB buffer over the time of its all-reduce by K-FAC's communicator, bytes/s;
            None in a world of one.
    """

    flops: float
    blas_flops: float
    copy_bytes: float
    link_bytes: float | None


def measure_rates() -> Rates:
    """Measure all rates; every rank must call it."""
    flops = blas_flops = 0.0
    for rows, inner, columns in _PRODUCTS:
        left, right = torch.randn(inner, rows), torch.randn(inner, columns)
        out = torch.empty(rows, columns)
        operations = 2.0 * rows * inner * columns
        blas_flops = max(blas_flops, operations / _least_seconds(partial(torch.mm, left.mT, right, out=out)))
        flops = max(flops, blas_flops, operations / _least_seconds(partial(multiply, left.mT, right, out)))
    source = torch.ones(_COPIED_ELEMENTS)
    target = torch.empty_like(source)
    copy_bytes = 8.0 * _COPIED_ELEMENTS / _least_seconds(lambda: target.copy_(source))
    link_bytes = None
    if dist.is_initialized():
        buffer, communicator = torch.zeros(_REDUCED_ELEMENTS), connect(find_peers=find_readable_peers)
        link_bytes = 4.0 * _REDUCED_ELEMENTS / _least_seconds(lambda: communicator.all_reduce(buffer))
    return Rates(flops, blas_flops, copy_bytes, link_bytes)


def _least_seconds(work: Callable[[], object]) -> float:
    work()
    return min(timed_once(work, torch.device("cpu")) for _ in range(_REPEATS))
