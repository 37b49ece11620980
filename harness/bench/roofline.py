"""Rooflines: the least time of each phase, by its operations and the product rate or its bytes and copy rate.

The operations are those of the best direct method, so that a phase cannot look good by doing too much:
displacements and symmetry for the patches of a dense convolution, symmetry for every other gram. What
transforms save (`kfac_core.kernels.convolution.spectrum`) is not subtracted, so a fraction may exceed 1. The
roofline of a decomposition is LAPACK's own time on the same matrices, one after another. That of a
communication phase is one copy of what a rank does not have, as the ranks of a benchmark share a host.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from harness.bench.rates import Rates
from kfac_core import KFAC
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.placement.footprint import data_elements
from kfac_core.timing.phases import Phase

_ITEM_BYTES = 4


@dataclass(frozen=True)
class Call:
    """One layer's call in a forward pass: elements of its input and positions B * S of its output."""

    module: nn.Module
    input_elements: int
    rows: int


def rooflines(kfac: KFAC, rank: int, calls: Mapping[str, Call], rates: Rates) -> dict[str, float]:
    """Seconds by K-FAC phase of a step that does all work, on this rank."""
    layers, shapes = kfac.placement.layers, kfac.shapes
    captured = [shape for shape in shapes if rank in layers[shape.name].factor_workers]
    applied = [shape for shape in shapes if rank in layers[shape.name].gradient_workers]
    solved = [job.shape for job in kfac.placement.factor_jobs(shapes) if rank in job.inverse_workers]
    factor_bytes = _ITEM_BYTES * sum(shape.elements for shape in solved)
    gradient_bytes = _ITEM_BYTES * sum(shape.gradient_elements for shape in shapes)
    seconds = {
        Phase.FACTOR_COMPUTE: sum(factor_seconds(shape, calls[shape.name], rates) for shape in captured)
        + 2 * factor_bytes / rates.copy_bytes,
        Phase.INVERSE_COMPUTE: sum(_lapack_seconds(shape, kfac.config.solver) for shape in solved),
        Phase.PRECONDITION: sum(_product_flops(kfac, shape) for shape in applied) / rates.flops
        + 2 * gradient_bytes / rates.copy_bytes,
        Phase.SCALE: 6 * gradient_bytes / rates.copy_bytes,  # dot product, scaling and copy
        **{phase: 2 * size / rates.copy_bytes for phase, size in received_bytes(kfac, rank).items()},
    }
    return {phase.value: value for phase, value in seconds.items()}


def received_bytes(kfac: KFAC, rank: int) -> dict[Phase, int]:
    """Bytes that this rank receives in a step that does all work, without the few of counts and traces."""
    jobs = kfac.placement.factor_jobs(kfac.shapes)
    layers = [(shape, kfac.placement.layers[shape.name]) for shape in kfac.shapes]
    elements = {
        Phase.FACTOR_COMM: sum(
            job.shape.packed_elements * len(set(job.factor_workers) - {rank})
            for job in jobs
            if rank in job.inverse_workers
        ),
        Phase.INVERSE_COMM: sum(
            data_elements(kfac.config, job.shape)
            for job in jobs
            if rank in job.gradient_workers and rank not in job.inverse_workers
        ),
        Phase.PRECONDITION_COMM: sum(
            shape.gradient_elements for shape, layer in layers if rank not in layer.gradient_workers
        ),
    }
    return {phase: _ITEM_BYTES * count for phase, count in elements.items()}


def layer_rooflines(kfac: KFAC, calls: Mapping[str, Call], rates: Rates) -> dict[str, dict[str, float]]:
    """Seconds by layer of both its grams, and of its two products of matrices (four with eigenvectors)."""
    return {
        shape.name: {
            Phase.FACTOR_COMPUTE.value: factor_seconds(shape, calls[shape.name], rates),
            Phase.PRECONDITION.value: _least_seconds(
                _product_flops(kfac, shape),
                shape.a.elements + shape.g.elements + 2 * shape.gradient_elements,
                rates,
            ),
        }
        for shape in kfac.shapes
    }


def factor_seconds(shape: LayerShape, call: Call, rates: Rates) -> float:
    """Seconds of both grams of one layer: of each, the larger of its arithmetic and of reading its input."""
    a = _gram_flops(call) if isinstance(call.module, nn.Conv2d) else _symmetric_flops(shape.a, call.rows)
    g = _symmetric_flops(shape.g, call.rows)
    output_elements = shape.g.dim * shape.g.blocks * call.rows
    return _least_seconds(a, call.input_elements, rates) + _least_seconds(g, output_elements, rates)


def _least_seconds(flops: float, elements: int, rates: Rates) -> float:
    return max(flops / rates.flops, _ITEM_BYTES * elements / rates.copy_bytes)


def _gram_flops(call: Call) -> float:
    """Least operations of a convolution's A factor: by displacement for stride 1, else by patches."""
    conv = call.module
    assert isinstance(conv, nn.Conv2d)  # noqa: S101  checked by the caller
    height, width = conv.kernel_size
    channels = conv.in_channels // conv.groups
    patch = FactorShape(channels * height * width, conv.groups)
    if conv.stride != (1, 1) or conv.dilation != (1, 1):
        return _symmetric_flops(patch, call.rows)
    displacements = (2 * height - 1) * (2 * width - 1)  # 2 C^2 a pixel each, and half by symmetry
    pixels = min(call.rows, call.input_elements // conv.in_channels)
    return float(displacements * channels**2 * conv.groups * pixels)


def _symmetric_flops(factor: FactorShape, rows: int) -> float:
    return float(factor.blocks * factor.dim * (factor.dim + 1) * rows)


def _product_flops(kfac: KFAC, shape: LayerShape) -> float:
    changes_of_basis = 2 if kfac.config.solver == "eigen" else 1
    return changes_of_basis * 2.0 * shape.a.blocks * shape.g.dim * shape.a.dim * (shape.g.dim + shape.a.dim)


@cache
def _lapack_seconds(factor: FactorShape, solver: str) -> float:
    rows = torch.randn(factor.blocks, factor.dim // 2 + 1, factor.dim)
    well_conditioned = rows.mT @ rows / factor.dim + 0.01 * torch.eye(factor.dim)
    began = time.perf_counter()
    if solver == "eigen":
        torch.linalg.eigh(well_conditioned)
    else:
        torch.cholesky_inverse(torch.linalg.cholesky(well_conditioned))
    return time.perf_counter() - began
