"""What tells a sweep's cells apart beside method, ranks and seed, which their ids spell out."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cell import Cell


def differences(cells: Sequence[Cell]) -> dict[str, str]:
    """By cell id, the fields that vary inside its method or between all cells: `damping=0.03`; or nothing."""
    from analysis.arms import fields_of, name_arms  # noqa: PLC0415  --help does not wait for it

    named = name_arms([fields_of(cell) for cell in cells])
    return {
        cell.id: arm.removeprefix(cell.method).strip() for cell, (arm, _) in zip(cells, named, strict=True)
    }
