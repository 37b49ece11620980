"""Reads the statuses of one sweep or of all, once or until all cells have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from harness.cli.cell_selection import stored_cells, stored_sweep_names
from harness.cli.error_messages import INTERRUPTED, message_of
from harness.cli.output import console
from harness.cli.status_view import print_statuses
from harness.errors import UserError
from harness.runs.commands import command, runs_option
from harness.runs.store import sweep_folder
from harness.study.filters import select
from harness.study.progress import follow
from harness.study.status import LauncherReports, corrected, stored_statuses

if TYPE_CHECKING:
    from harness.cell import Cell
    from harness.study.status import CellStatus


def cells_of_all(where: Sequence[str], runs: Path, errors: list[str]) -> list[list[Cell]]:
    """The matching cells of every stored sweep; adds a message for every one that cannot be read."""
    cells: dict[str, list[Cell]] = {}
    for name in stored_sweep_names(runs):
        with _noted(errors, name):
            cells[name] = stored_cells(name, runs)
    chosen = set(map(id, select([cell for found in cells.values() for cell in found], *where)))
    selected = ([cell for cell in found if id(cell) in chosen] for found in cells.values())
    return [found for found in selected if found]


def statuses_of(
    sweeps: Sequence[Sequence[Cell]],
    runs: Path,
    errors: list[str] | None = None,
    reports: LauncherReports | None = None,
) -> list[list[CellStatus]]:
    """The statuses of cells, sweep by sweep; launchers are asked once about all of them.

    Args:
        sweeps: cells of each.
        runs: folder of stored runs.
        errors: gets a message for every sweep that cannot be read; if None, the first is raised.
        reports: see `read_statuses`.
    """
    stored = []
    for cells in sweeps:
        with _noted(errors, cells[0].sweep):
            stored.append(stored_statuses(sweep_folder(cells[0].sweep, runs), cells))
    try:
        return corrected(stored, reports)
    except (UserError, OSError):
        if errors is None:
            raise
    found = []
    for statuses in stored:  # one by one, to find out whose files cannot be read
        with _noted(errors, statuses[0].cell.sweep):
            found += corrected([statuses], reports)
    return found


def follow_sweeps(sweeps: Sequence[Sequence[Cell]], runs: Path) -> None:
    """Show progress until no cell is pending or running here, then all states."""
    reports = LauncherReports()
    try:
        follow(lambda: list(chain.from_iterable(statuses_of(sweeps, runs, reports=reports))), console())
    except KeyboardInterrupt:
        typer.echo("detached: the runs continue")
        folders = [sweep_folder(cells[0].sweep, runs).path for cells in sweeps]
        if len(folders) == 1:
            typer.echo(f"to show them: {command('status', folders[0])}")
        else:
            typer.echo(f"to show them: {' '.join(['kronscale', 'status', *runs_option(runs)])}")
        for folder in folders:
            typer.echo(f"to end them: {command('cancel', folder)}")
        raise typer.Exit(INTERRUPTED) from None
    last = statuses_of(sweeps, runs, reports=reports)
    for statuses in last:
        print_statuses(statuses, runs)
    if any(one.state != "COMPLETED" for one in chain.from_iterable(last)):
        raise typer.Exit(1)


@contextmanager
def _noted(errors: list[str] | None, sweep: str) -> Iterator[None]:
    """Note an error about one sweep instead of ending the command."""
    try:
        yield
    except (UserError, OSError) as error:
        if errors is None:
            raise
        errors.append(f"sweep {sweep} cannot be read: {message_of(error)}")
