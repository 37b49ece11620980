"""Prints the status of a sweep and the logs of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.text import Text

from harness.cli.output import console, print_line, print_lines, state_text
from harness.errors import UserError
from harness.launchers.slurm import job_log
from harness.runs.arms import differences
from harness.runs.commands import command
from harness.runs.store import Attempt, CellFolder, SweepFolder, sweep_folder
from harness.study.progress import duration, metric, steps
from harness.study.status import CellStatus, count_states, is_stalled, read_statuses

_FOLLOW_SECONDS = 0.2
_QUERY_SECONDS = 30.0  # a cluster's controller serves all of its users
_MAX_ROWS = 40  # one screen; --json has all cells


def print_statuses(statuses: Sequence[CellStatus], runs: Path) -> None:
    """Print the number of cells by state, then failed, unfinished and completed cells up to a screen."""
    screen = console()
    if not statuses:
        screen.print("no cells")
        return
    name = statuses[0].cell.sweep
    print_line(screen, f"{name}: ", counts_text(statuses))
    rows = sorted(statuses, key=lambda one: (one.state == "COMPLETED", one.state in ("PENDING", "STAGED")))
    differs = differences([one.cell for one in statuses])
    differs_column = ["differs"] if any(differs.values()) else []
    headings = ("state", "cell", *differs_column, "step", "phase", "metric", "elapsed", "cause")
    lines: list[list[str | Text]] = []
    for one in rows[:_MAX_ROWS]:
        difference = [differs[one.cell.id] for _ in differs_column]
        progress = (*difference, steps(one), one.phase or "", metric(one), duration(one.elapsed_seconds))
        lines.append([state_text(one.state), one.cell.id, *progress, " ".join(one.cause.split())])
    print_lines(screen, headings, lines)
    if len(rows) > _MAX_ROWS:
        screen.print(f"... and {len(rows) - _MAX_ROWS} more; --where selects cells, --json prints all")
    if is_stalled(sweep_folder(name, runs), statuses):
        again = command("submit", sweep_folder(name, runs).path)
        print_line(screen, f"the queue of the pending cells was killed; to restart it: {again}")


def counts_text(statuses: Sequence[CellStatus]) -> Text:
    """Such as `38 COMPLETED, 2 RUNNING`, in the states' colours."""
    counted = ((str(count), " ", state_text(state)) for state, count in count_states(statuses).items())
    return Text(", ").join(Text.assemble(*parts) for parts in counted)


def print_log(folder: CellFolder, rank: int | None, *, follow: bool) -> None:
    """Print one rank's log.

    Args:
        folder: of the cell; its newest attempt is used.
        rank: None for the rank that failed first, or 0.
        follow: whether to print new lines until the attempt has ended.

    Raises:
        UserError: there is no such log.
    """
    (status,) = read_statuses(SweepFolder(folder.path.parent), [folder.cell()])
    attempt = status.attempt
    if attempt is None:
        raise UserError(f"{folder.id} has no logs: it was never launched")
    number = rank if rank is not None else (status.rank or 0) if status.final else 0
    if number >= status.cell.world_size:
        raise UserError(f"rank={number}: {folder.id} has ranks 0 to {status.cell.world_size - 1}")
    log = attempt.log(number)
    if not log.exists() and (status.final or not follow):
        if rank is not None or (of_job := job_log(attempt)) is None:
            raise UserError(f"{log} does not exist: the attempt is {status.state} {status.cause}")
        typer.echo(f"no rank has started; its job has printed, in {of_job}:", err=True)
        log = of_job
    read = _print_from(log, 0)
    if not read and status.final:
        typer.echo(f"{log} is empty: rank {number} wrote nothing", err=True)
    ended, queried_at = status.final, time.monotonic()
    while follow and not ended:
        time.sleep(_FOLLOW_SECONDS)
        read = _print_from(log, read)
        ended = attempt.outcome() is not None
        if not ended and time.monotonic() - queried_at > _QUERY_SECONDS:
            ended, queried_at = _is_lost(attempt), time.monotonic()
    if log.exists():
        _print_from(log, read)
    else:
        print_log(folder, rank, follow=False)


def _is_lost(attempt: Attempt) -> bool:
    """Whether its launcher, which may query Slurm, reports that an attempt without an outcome has ended."""
    folder = attempt.cell_folder
    (status,) = read_statuses(SweepFolder(folder.path.parent), [folder.cell()])
    return status.final or status.attempt != attempt


def _print_from(log: Path, offset: int) -> int:
    if not log.exists():
        return offset
    with log.open("rb") as file:
        file.seek(offset)
        text = file.read()
    typer.echo(text.decode(errors="replace"), nl=False)
    return offset + len(text)
