"""How a study stands, printed for people: counts first, failures with their cause, and ranks' logs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.table import Table

from harness.cli.output import console
from harness.errors import UserError
from harness.runs.arms import differences
from harness.runs.store import Attempt, CellFolder, SweepFolder, sweep_folder
from harness.study.progress import duration, metric, state_counts, steps
from harness.study.status import CellStatus, is_stalled, read_statuses

_FOLLOW_SECONDS = 0.2
_ASK_SECONDS = 30.0  # a cluster's controller answers everyone on it
_MOST_ROWS = 40  # a screenful; --json has them all


def print_statuses(statuses: Sequence[CellStatus], runs: Path) -> None:
    """Print the counts by state, then unfinished and failed cells, then completed ones as far as they fit."""
    screen = console()
    if not statuses:
        screen.print("no cells")
        return
    name = statuses[0].cell.sweep
    screen.print(f"{name}: {state_counts(statuses)}", markup=False)
    telling = sorted(statuses, key=lambda one: (one.state == "COMPLETED", one.state in ("PENDING", "STAGED")))
    table = Table(box=None, pad_edge=False)
    differs = differences([one.cell for one in statuses])
    apart = ["differs"] if any(differs.values()) else []
    for heading in ("state", "cell", *apart, "step", "phase", "metric", "elapsed", "cause"):
        table.add_column(heading, overflow="fold", ratio=1 if heading == "cause" else None)
    for one in telling[:_MOST_ROWS]:
        words = [differs[one.cell.id] for _ in apart]
        place = (one.state, one.cell.id, *words, steps(one), one.phase or "", metric(one))
        table.add_row(*place, duration(one.elapsed_seconds), one.cause)
    screen.print(table, markup=False)
    if len(telling) > _MOST_ROWS:
        screen.print(f"... and {len(telling) - _MOST_ROWS} more; --where narrows, --json lists all")
    if is_stalled(sweep_folder(name, runs), statuses):
        screen.print("nobody works on the pending cells any more; kronscale submit sees to it")


def print_log(folder: CellFolder, rank: int | None, *, follow: bool) -> None:
    """Print one rank's log.

    Args:
        folder: the cell; its newest attempt counts.
        rank: None for the rank that caused a failure, or 0.
        follow: whether to go on until the attempt has ended.

    Raises:
        UserError: there is no such log.
    """
    (status,) = read_statuses(SweepFolder(folder.path.parent), [folder.cell()])
    attempt = status.attempt
    if attempt is None:
        raise UserError(f"{folder.id} was never launched: it has no logs")
    chosen = rank if rank is not None else (status.rank or 0) if status.final else 0
    if chosen >= status.cell.world_size:
        raise UserError(f"rank={chosen}: {folder.id} has ranks 0 to {status.cell.world_size - 1}")
    log = attempt.log(chosen)
    if not log.exists() and not follow:
        raise UserError(f"{log} does not exist: the attempt is {status.state} {status.cause}")
    read = _print_from(log, 0)
    if not read and status.final:
        typer.echo(f"{log} is empty: rank {chosen} wrote nothing", err=True)
    over, asked = status.final, time.monotonic()
    while follow and not over:
        time.sleep(_FOLLOW_SECONDS)
        read = _print_from(log, read)
        over = attempt.outcome() is not None
        if not over and time.monotonic() - asked > _ASK_SECONDS:
            over, asked = _is_lost(attempt), time.monotonic()
    _print_from(log, read)


def _is_lost(attempt: Attempt) -> bool:
    """Whether the attempt is over without an outcome: its launcher knows, and may have to ask Slurm."""
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
