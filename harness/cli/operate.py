"""Commands that act on runs: submit, run, status, logs, cancel, retry."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import completion
from harness.cli.blocks import run_in_blocks
from harness.cli.cell_selection import selected_cells, stored_cell
from harness.cli.error_messages import USAGE, print_error
from harness.cli.options import (
    RUNS,
    AsJson,
    Budget,
    DryRun,
    FileInstead,
    LastSite,
    Overrides,
    Oversubscribe,
    Runs,
    SweepName,
    Where,
    Yes,
)  # fmt: skip
from harness.cli.status_view import print_log, print_statuses
from harness.cli.submissions import (
    count,
    print_preview,
    print_retry_preview,
    print_submission,
    site_for,
    start,
    start_again,
)
from harness.cli.sweep_statuses import cells_of_all, follow_sweeps, statuses_of
from harness.errors import StoreError, UserError
from harness.runs.arms import differences
from harness.runs.commands import runs_option
from harness.study.submit import cancel as cancel_cells

if TYPE_CHECKING:
    from harness.cell import Cell
    from harness.study.status import CellStatus


def submit(
    sweep: SweepName = None, file: FileInstead = None, site: LastSite = None, runs: Runs = RUNS,
    where: Where = None, set_: Overrides = None, as_json: AsJson = False, budget: Budget = None,
    dry_run: DryRun = False, yes: Yes = False, oversubscribe: Oversubscribe = None,
) -> None:  # fmt: skip
    """Start every cell that has no attempt yet, in the background; safe to repeat.

    The name of a sweep stands for its stored cells, so that an interrupted submission can be finished.
    """
    cells = _cells(sweep, file, set_, where, runs)
    profile = site_for(cells, site, runs, oversubscribe)
    if dry_run:
        print_preview(cells, profile, runs, budget)
        return
    submission = start(cells, profile, runs, budget, yes=yes)
    if as_json:
        groups = ("new", "already_done", "in_flight", "failed_before")
        ids = {name: [cell.id for cell in getattr(submission, name)] for name in groups}
        typer.echo(json.dumps(ids, indent=1))
        return
    print_submission(submission, profile, site, runs)


def run(
    sweep: SweepName = None, file: FileInstead = None, site: LastSite = None, runs: Runs = RUNS,
    where: Where = None, set_: Overrides = None, budget: Budget = None, dry_run: DryRun = False,
    yes: Yes = False, oversubscribe: Oversubscribe = None,
    blocks: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run one cell at a time, by blocks, and archive each there."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="With --blocks: begin none that would end later. Default: 110."),
    ] = None,
) -> None:  # fmt: skip
    """Submit, and show progress until all cells have ended; Ctrl-C stops only the display.

    With --blocks, repeat the command, here or on another machine, until all blocks have archives.
    """
    cells = _cells(sweep, file, set_, where, runs)
    profile = site_for(cells, site, runs, oversubscribe)
    if blocks is not None:
        if budget is not None:
            raise UserError(f"--budget={budget:g} has no effect with --blocks, which runs cell by cell")
        run_in_blocks(cells, blocks, 110 if minutes is None else minutes, profile, runs, dry_run=dry_run)
        return
    if minutes is not None:
        raise UserError(f"--minutes={minutes:g} has no effect without --blocks")
    if dry_run:
        print_preview(cells, profile, runs, budget)
        return
    print_submission(start(cells, profile, runs, budget, yes=yes), profile, site, runs)
    follow_sweeps([cells], runs)


def status(
    sweep: SweepName = None, file: FileInstead = None, runs: Runs = RUNS, where: Where = None,
    set_: Overrides = None, as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show progress until all cells have ended.")] = False,
) -> None:  # fmt: skip
    """Show the state of every cell and the causes of failures, of one sweep or of all.

    A sweep that cannot be read is an error, after the others are shown; the exit code is then 2.
    """
    errors: list[str] = []
    named = bool(sweep or file or set_)
    sweeps = [_cells(sweep, file, set_, where, runs)] if named else cells_of_all(where or (), runs, errors)
    watched = watch and any(sweeps)
    if watched:
        follow_sweeps(sweeps, runs)
        sweeps = []
    by_sweep: list[list[CellStatus]] = [[] for _ in sweeps]
    if any(sweeps):
        by_sweep = statuses_of(sweeps, runs, None if named else errors)
    if as_json and not watched:
        rows = []
        for statuses in by_sweep:
            differs = differences([one.cell for one in statuses])
            rows += [{**one.to_dict(), "differs": differs[one.cell.id]} for one in statuses]
        typer.echo(json.dumps(rows, indent=1))
    else:
        for statuses in by_sweep:
            print_statuses(statuses, runs)
        if not (by_sweep or errors or watched):
            words = ["kronscale", "submit", "-f", "jobs/sweeps/demo.yaml", *runs_option(runs)]
            typer.echo(f"no runs in {runs}; to start some: {shlex.join(words)}")
    for error in errors:
        print_error(error)
    if errors:
        raise typer.Exit(USAGE)


def logs(
    cell: Annotated[
        str,
        typer.Argument(
            metavar="CELL",
            help="Beginning of the cell's id, or of sweep/cell.",
            show_default=False,
            autocompletion=completion.stored_cells,
        ),
    ],
    rank: Annotated[
        int | None, typer.Option(min=0, help="Rank. Default: the rank that failed first, or 0.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the attempt has ended.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Print the standard output and error of a rank of a cell's newest attempt."""
    print_log(stored_cell(cell, runs), rank, follow=follow)


def cancel(
    sweep: SweepName = None, file: FileInstead = None, runs: Runs = RUNS, where: Where = None,
    set_: Overrides = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Save a checkpoint first, from which a retry resumes.")
    ] = False,
) -> None:  # fmt: skip
    """End pending and running cells, and return when they have ended."""
    cells = _cells(sweep, file, set_, where, runs)
    ended = cancel_cells(cells, runs, checkpoint=checkpoint) if cells else []
    typer.echo(f"{count(ended)} cancelled" if ended else "nothing to cancel: no cell is pending or running")


def retry(
    sweep: SweepName = None, file: FileInstead = None, site: LastSite = None, runs: Runs = RUNS,
    where: Where = None, set_: Overrides = None, budget: Budget = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from the beginning, not from a checkpoint.")
    ] = False,
    change_site: Annotated[
        bool,
        typer.Option(
            "--change-site", help="Continue runs at another site or kind of node; reports mark them."
        ),
    ] = False,
    disturbed: Annotated[
        bool,
        typer.Option(
            "--disturbed",
            help="Repeat whole blocks in which the report finds a disturbed run, completed cells too, "
            "from the beginning.",
        ),
    ] = False,
    dry_run: DryRun = False, yes: Yes = False, oversubscribe: Oversubscribe = None,
) -> None:  # fmt: skip
    """Start cells again that ended without completing, in the background, from their newest checkpoint."""
    cells = _cells(sweep, file, set_, where, runs)
    if not cells:  # of a file or a filter there is one; here each is of another version
        raise StoreError(
            f"no cell of {sweep} can be started again by this version of Kronscale; retry with the version "
            f"that wrote them, or submit the sweep's file to run its cells anew"
        )
    profile = site_for(cells, site, runs, oversubscribe)
    if disturbed:
        from harness.cli.disturbed import disturbed_cells  # noqa: PLC0415  loads pandas

        cells = disturbed_cells(cells, runs)
        if not cells:
            typer.echo("nothing to repeat: the report finds no disturbed block")
            return
    how = {"fresh": fresh, "change_site": change_site, "repeat": disturbed}
    if dry_run:
        print_retry_preview(cells, profile, runs, budget, **how)
        return
    start_again(cells, profile, runs, budget, yes=yes, **how)


def _cells(
    sweep: str | None,
    file: Path | None,
    overrides: list[str] | None,
    where: list[str] | None,
    runs: Path,
) -> list[Cell]:
    return selected_cells(sweep, file, overrides or (), where or (), runs)
