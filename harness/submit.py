"""Undone cells -> jobs: submit, retry and cancel, each safe to repeat and to run twice at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cell import Cell
from harness.checkpoint.shelf import Shelf
from harness.launchers import LAUNCHERS
from harness.launchers.launch import WORKER_COMMAND, Launch
from harness.launchers.site import Site
from harness.locks import exclusive
from harness.records import Outcome
from harness.status import IN_FLIGHT, RETRYABLE, CellStatus, is_stalled, read_statuses
from harness.store import DEFAULT_ROOT, Attempt, SweepFolder, sweep_folder

_CANCEL_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Submission:
    """What `submit` found and did, cell by cell.

    Attributes:
        new: cells that got an attempt now.
        already_done: completed before.
        in_flight: pending or running already.
        failed_before: ended without completing; only `retry` gives these another attempt.
    """

    new: tuple[Cell, ...]
    already_done: tuple[Cell, ...]
    in_flight: tuple[Cell, ...]
    failed_before: tuple[Cell, ...]


def submit(
    cells: Sequence[Cell], site: Site, root: Path = DEFAULT_ROOT, command: Sequence[str] = WORKER_COMMAND
) -> Submission:
    """Give every cell of one sweep that was never tried an attempt; restart a queue that was killed.

    Args:
        cells: of one sweep.
        site: where they run.
        root: folder of all sweeps.
        command: starts one rank.

    Raises:
        SiteError: the site can never run one of the new cells; nothing was submitted then.
    """
    folder = _folder(cells, root)
    with exclusive(folder.path / "submit.lock"):
        statuses = read_statuses(folder, _each_once(cells))
        new = [status.cell for status in statuses if status.state == "STAGED"]
        _start(new, site, folder, command)
        if not new and is_stalled(folder, statuses):
            LAUNCHERS[site.launcher].resume(folder)
    return Submission(
        new=tuple(new),
        already_done=_cells(statuses, lambda status: status.state == "COMPLETED"),
        in_flight=_cells(statuses, lambda status: status.state in IN_FLIGHT),
        failed_before=_cells(statuses, lambda status: status.state in RETRYABLE),
    )


def retry(
    cells: Sequence[Cell],
    site: Site,
    root: Path = DEFAULT_ROOT,
    command: Sequence[str] = WORKER_COMMAND,
    *,
    fresh: bool = False,
) -> list[Cell]:
    """Give every cell that ended without completing a new attempt; leaves all others alone.

    The new attempt goes on from the newest checkpoint of the older ones, unless `fresh`.

    Returns:
        The cells that got one.

    Raises:
        SiteError: the site can never run one of them; nothing was submitted then.
    """
    folder = _folder(cells, root)
    with exclusive(folder.path / "submit.lock"):
        statuses = read_statuses(folder, _each_once(cells))
        again = [status.cell for status in statuses if status.state in RETRYABLE]
        _start(again, site, folder, command, resume=not fresh)
    return again


def cancel(cells: Sequence[Cell], root: Path = DEFAULT_ROOT, *, checkpoint: bool = False) -> list[Cell]:
    """End pending and running cells, running ones after a checkpoint if asked; returns once they have ended.

    Returns:
        The cells that were in flight.
    """
    folder = _folder(cells, root)
    caught = [status for status in read_statuses(folder, cells) if status.state in IN_FLIGHT]
    for status in caught:
        if status.attempt is not None:
            _cancel(status.attempt, checkpoint=checkpoint)
    left = [status.cell for status in caught]
    while left:
        time.sleep(_CANCEL_POLL_SECONDS)
        left = [status.cell for status in read_statuses(folder, left) if status.state in IN_FLIGHT]
    return [status.cell for status in caught]


def in_blocks(cells: Sequence[Cell]) -> list[Cell]:
    """The order in which cells start: seed after seed, and within a seed shuffled by content hash.

    A machine that slows down meanwhile then slows all arms, instead of the one that came last in the file
    (randomised blocks; the shuffle is the same for everyone who submits the sweep).
    """
    return sorted(cells, key=lambda cell: (cell.seed, cell.content_hash))


def _each_once(cells: Iterable[Cell]) -> list[Cell]:
    return list({cell.id: cell for cell in cells}.values())


def _folder(cells: Sequence[Cell], root: Path) -> SweepFolder:
    names = {cell.sweep for cell in cells}
    if len(names) != 1:
        raise AssertionError(f"cells of one sweep at a time, got {sorted(names)}")
    folder = sweep_folder(names.pop(), root)
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def _start(
    cells: Sequence[Cell], site: Site, folder: SweepFolder, command: Sequence[str], *, resume: bool = False
) -> None:
    launcher = LAUNCHERS[site.launcher]
    for cell in cells:
        launcher.check(cell, site)
    if cells:
        launcher.launch(folder, (_new(cell, site, folder, command, resume) for cell in in_blocks(cells)))


def _new(
    cell: Cell, site: Site, folder: SweepFolder, command: Sequence[str], resume: bool
) -> tuple[Attempt, Launch]:
    cell_folder = folder.stage(cell)
    saved = [one.number for one in cell_folder.attempts() if Shelf(one).newest_first()] if resume else []
    launch = LAUNCHERS[site.launcher].plan(cell, site, command)
    continues = saved[-1] if saved else None
    return cell_folder.new_attempt(), launch.model_copy(update={"continues": continues})


def _cancel(attempt: Attempt, *, checkpoint: bool) -> None:
    launch = attempt.read("launch.json")
    if launch is not None:
        LAUNCHERS[launch["launcher"]].cancel(attempt, checkpoint=checkpoint)
    if not (attempt.path / "begun.json").exists():
        now = time.time()
        attempt.write_outcome(Outcome("CANCELLED", "cancelled before it started", None, "error", now, now))


def _cells(statuses: Iterable[CellStatus], chosen: Callable[[CellStatus], bool]) -> tuple[Cell, ...]:
    return tuple(status.cell for status in statuses if chosen(status))
