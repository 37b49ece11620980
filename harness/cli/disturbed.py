"""Which cells the report finds disturbed, for `kronscale retry --disturbed`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.conditions import cells_to_repeat
from analysis.records.loading import load
from harness.cell import Cell
from harness.runs.store import sweep_folder


def disturbed_cells(cells: Sequence[Cell], runs: Path) -> list[Cell]:
    """Those of the cells of one sweep that are in a block in which the report finds a disturbed run."""
    found = cells_to_repeat(load(sweep_folder(cells[0].sweep, runs).path))
    return [cell for cell in cells if cell.id in found]
