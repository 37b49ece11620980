"""Hours of training of cells that nobody has run, predicted from a calibration: for plan and reproduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.cost_model.calibration import Calibration
    from analysis.cost_model.hours import PredictedHours
    from harness.cell import Cell


def machine_named(name: str) -> Calibration:
    """A calibration by its name in `results/calibrations`, or by path.

    Raises:
        UserError: there is none, or it is damaged.
    """
    from analysis.cost_model.calibration_file import read_calibration  # noqa: PLC0415  only with --calibration
    from analysis.cost_model.errors import CostModelError  # noqa: PLC0415

    try:
        return read_calibration(name)
    except CostModelError as error:
        raise UserError(f"--calibration: {error}") from None


def hours_of(cells: Sequence[Cell], machine: Calibration) -> PredictedHours:
    """Predicted hours of training of all cells."""
    from analysis.cost_model.hours import predicted_hours  # noqa: PLC0415  see machine_named
    from harness.workloads import WORKLOADS  # noqa: PLC0415

    def examples(cell: Cell) -> int:
        return WORKLOADS[cell.workload.name].examples(cell.workload.options)

    return predicted_hours(cells, machine, examples)
