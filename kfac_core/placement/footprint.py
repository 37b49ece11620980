"""Bytes of K-FAC state that a rank holds, and FLOPs of preconditioning: arithmetic on shapes (no torch)."""

from __future__ import annotations

from collections.abc import Sequence

from kfac_core.config import ITEM_BYTES, KFACConfig
from kfac_core.placement.placement import FactorShape, LayerShape, Placement


def state_bytes(
    placement: Placement, shapes: Sequence[LayerShape], config: KFACConfig, rank: int, item_bytes: int = 4
) -> dict[str, int]:
    """Bytes by kind on `rank`; see `KFAC.memory`.

    `item_bytes` is that of the working precision, which `factor_dtype` and `inverse_dtype` override.
    """
    factor_bytes = ITEM_BYTES[config.factor_dtype] if config.factor_dtype else item_bytes
    inverse_bytes = ITEM_BYTES[config.inverse_dtype] if config.inverse_dtype else item_bytes
    jobs = placement.factor_jobs(shapes)
    return {
        "factors": factor_bytes * sum(job.shape.elements for job in jobs if rank in job.inverse_workers),
        "second_order": inverse_bytes
        * sum(data_elements(config, job.shape) for job in jobs if rank in job.gradient_workers),
        "gradients": 2 * item_bytes * sum(shape.gradient_elements for shape in shapes),
        "statistics": item_bytes
        * sum(
            job.shape.elements if rank in job.unpacked_on else job.shape.packed_elements
            for job in jobs
            if rank in job.factor_workers
        ),
    }


def precondition_flops(config: KFACConfig, layer: LayerShape) -> int:
    """FLOPs of one layer's products: two with inverses, four into the eigenbases and back."""
    changes_of_basis = 2 if config.solver == "eigen" else 1
    kept = kept_columns(config, layer.a) + kept_columns(config, layer.g)
    return 2 * changes_of_basis * layer.gradient_elements * kept


def data_elements(config: KFACConfig, factor: FactorShape) -> int:
    """Elements of second-order data: eigenvectors and eigenvalues, or an inverse."""
    kept = kept_columns(config, factor)
    if config.solver != "eigen":
        return factor.elements
    return factor.blocks * (kept * factor.dim + kept + (kept < factor.dim))  # and the mean of those left out


def kept_columns(config: KFACConfig, factor: FactorShape) -> int:
    """Columns of a factor's second-order data: its dimension, or fewer under `eigen_rank`."""
    return factor.dim if config.eigen_rank is None else min(factor.dim, config.eigen_rank)


def data_layout(config: KFACConfig) -> str:
    """What second-order data means; saved data of another layout has to be solved anew."""
    return config.solver if config.eigen_rank is None else f"{config.solver} of rank {config.eigen_rank}"
