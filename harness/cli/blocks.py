"""`kronscale blocks`: runs a sweep block by block, on one machine after another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import RUNS, Runs, SiteName, SweepFile, Where

if TYPE_CHECKING:
    from harness.cell import Cell


def blocks(
    file: SweepFile,
    into: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the archives, one for each block.")],
    minutes: Annotated[
        float, typer.Option(min=0, help="Begin no block that would not end within so many minutes.")
    ] = 110,
    site: SiteName = "local",
    runs: Runs = RUNS,
    where: Where = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the blocks; run nothing.")] = False,
) -> None:
    """Run the blocks of a sweep that have no archive yet, one cell at a time, and archive each.

    A block has every arm once: the cells of a world size and seed and, where the sweep tunes, trial. It never
    spans two machines: one that another machine left incomplete is set aside and run again. Repeat the
    command, here or elsewhere, until all blocks have archives; a block is expected to take as long as the
    longest one of this call.
    """
    import time  # noqa: PLC0415  see plan

    from harness.runs.store import sweep_folder  # noqa: PLC0415
    from harness.study.blocks import blocks_of, open_blocks, run_blocks, this_machine  # noqa: PLC0415
    from harness.study.filters import select  # noqa: PLC0415
    from harness.study.sweep import read_sweep  # noqa: PLC0415

    cells = select(read_sweep(file).cells, *(where or ()))
    every = blocks_of(cells)
    left = open_blocks(every, into)
    typer.echo(f"{cells[0].sweep}: {len(every)} blocks, {len(every) - len(left)} archived in {into}")
    for block in left if dry_run else ():
        typer.echo(f"{block.name}: {len(block.cells)} cells")
    if dry_run:
        return
    folder = sweep_folder(cells[0].sweep, runs)

    def run_cell(cell: Cell) -> None:
        _run_cell(cell, site, runs)

    ended = 0
    for block in run_blocks(left, folder, into, minutes, run_cell, time.monotonic, this_machine()):
        ended += 1
        typer.echo(f"{block.name}: {len(block.cells)} cells archived in {block.archive(into)}")
    if ended < len(left):
        typer.echo(f"{len(left) - ended} blocks are left; repeat the command, here or on another machine")


def _run_cell(cell: Cell, site: str, runs: Path) -> None:
    """Start the cell, again if it failed, and return when it has ended."""
    from harness.cli.output import console  # noqa: PLC0415  see plan
    from harness.launchers.site_profile import read_site  # noqa: PLC0415
    from harness.runs.store import sweep_folder  # noqa: PLC0415
    from harness.study.launcher_reports import LauncherReports  # noqa: PLC0415
    from harness.study.progress import follow  # noqa: PLC0415
    from harness.study.status import read_statuses  # noqa: PLC0415
    from harness.study.submit import retry, submit  # noqa: PLC0415

    profile = read_site(site)
    if submit([cell], profile, runs).failed_before:
        retry([cell], profile, runs)
    folder = sweep_folder(cell.sweep, runs)
    reports = LauncherReports()
    follow(lambda: read_statuses(folder, [cell], reports), console())
