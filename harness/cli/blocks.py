"""`kronscale run --blocks`: runs a sweep block by block, on one machine after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from harness.cli.output import console
from harness.runs.store import sweep_folder
from harness.study.blocks import blocks_of, open_blocks, run_blocks, this_machine
from harness.study.progress import follow
from harness.study.status import LauncherReports, read_statuses
from harness.study.submit import retry, submit

if TYPE_CHECKING:
    from harness.cell import Cell
    from harness.launchers.site_profile import Site


def run_in_blocks(
    cells: Sequence[Cell], into: Path, minutes: float, site: Site, runs: Path, *, dry_run: bool
) -> None:
    """Run the blocks of one sweep that have no archive yet, one cell at a time, and archive each.

    A block has every arm once: the cells of a world size and seed and, where the sweep tunes, trial. It never
    spans two machines: one that another machine left incomplete is set aside and run again.

    Args:
        cells: of the sweep.
        into: folder of the archives, one for each block.
        minutes: begin no block that would not end within so many; it is expected to take as long as the
            longest one of this call.
        site: where its cells run.
        runs: folder of stored runs.
        dry_run: list the blocks that are left; run nothing.
    """
    every = blocks_of(cells)
    left = open_blocks(every, into)
    typer.echo(f"{cells[0].sweep}: {len(every) - len(left)} of {len(every)} blocks archived in {into}")
    for block in left if dry_run else ():
        typer.echo(f"{block.name}: {len(block.cells)} cells")
    if dry_run:
        return
    folder, run_cell, ended = sweep_folder(cells[0].sweep, runs), partial(_run_cell, site=site, runs=runs), 0
    for block in run_blocks(left, folder, into, minutes, run_cell, time.monotonic, this_machine()):
        ended += 1
        typer.echo(f"{block.name}: {len(block.cells)} cells archived in {block.archive(into)}")
    if ended < len(left):
        typer.echo(f"blocks left: {len(left) - ended}; repeat the command, here or on another machine")


def _run_cell(cell: Cell, site: Site, runs: Path) -> None:
    """Start the cell, again if it failed, and return when it has ended."""
    if submit([cell], site, runs).failed_before:
        retry([cell], site, runs)
    folder = sweep_folder(cell.sweep, runs)
    reports = LauncherReports()
    follow(lambda: read_statuses(folder, [cell], reports), console())
