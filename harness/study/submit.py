"""Undone cells -> jobs: submit, retry and cancel, each safe to repeat and to run twice at once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cell import Cell
from harness.launchers import LAUNCHERS
from harness.launchers.cost_estimate import CostEstimate
from harness.launchers.launch import WORKER_COMMAND, Launch
from harness.launchers.outcome import outcome_without_ranks
from harness.launchers.site import Site
from harness.runs.checkpoint_store import CheckpointStore
from harness.runs.locks import exclusive
from harness.runs.store import DEFAULT_ROOT, Attempt, CellFolder, SweepFolder, sweep_folder
from harness.study.cell_states import IN_FLIGHT, RETRYABLE, stored_state
from harness.study.status import CellStatus, is_stalled, read_statuses

_CANCEL_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 2.0  # every look may ask a cluster's scheduler


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


@dataclass(frozen=True)
class Preview:
    """What a submission would be.

    Attributes:
        new: the cells that would get an attempt, in the order of their start.
        text: what their launcher would hand over.
        hours: what they could cost at most.
    """

    new: tuple[Cell, ...]
    text: str
    hours: CostEstimate


def submit(
    cells: Sequence[Cell],
    site: Site,
    root: Path = DEFAULT_ROOT,
    command: Sequence[str] = WORKER_COMMAND,
    budget: float | None = None,
) -> Submission:
    """Give every cell of one sweep that was never tried an attempt; restart a queue that was killed.

    Args:
        cells: of one sweep.
        site: where they run.
        root: folder of all sweeps.
        command: starts one rank.
        budget: hours that the new cells may cost at most, GPU-hours where the site gives GPUs, else
            core-hours; None for any.

    Raises:
        SiteError: the site can never run one of the new cells; nothing was submitted then.
        BudgetError: they could cost more; nothing was submitted then.
        SchedulerError: a cluster did not answer; submitting again finishes what was begun.
    """
    folder = _folder(cells, root)
    folder.make(group_readable=site.group_readable)
    with exclusive(folder.path / "submit.lock"):
        _finish_interrupted(folder)
        statuses = read_statuses(folder, _each_once(cells))
        new = [status.cell for status in statuses if status.state == "STAGED"]
        _start(new, site, folder, command, budget)
        if not new and is_stalled(folder, statuses):
            LAUNCHERS[site.launcher].resume(folder)
    return Submission(
        new=tuple(new),
        already_done=_cells(statuses, lambda status: status.state == "COMPLETED"),
        in_flight=_cells(statuses, lambda status: status.state in IN_FLIGHT),
        failed_before=_cells(statuses, lambda status: status.state in RETRYABLE),
    )


def preview(cells: Sequence[Cell], site: Site, root: Path = DEFAULT_ROOT) -> Preview:
    """What `submit` would hand over now; changes nothing.

    Raises:
        SiteError: the site can never run one of the new cells.
    """
    folder = sweep_folder(cells[0].sweep, root)
    launcher = LAUNCHERS[site.launcher]
    statuses = read_statuses(folder, _each_once(cells))
    new = in_blocks(_cells(statuses, lambda status: status.state == "STAGED"))
    for cell in new:
        launcher.check(cell, site)
    text = launcher.preview(folder, new, site) if new else ""
    return Preview(tuple(new), text, launcher.hours(new, site) if new else CostEstimate())


def retry(
    cells: Sequence[Cell],
    site: Site,
    root: Path = DEFAULT_ROOT,
    command: Sequence[str] = WORKER_COMMAND,
    budget: float | None = None,
    *,
    fresh: bool = False,
) -> list[Cell]:
    """Give every cell that ended without completing a new attempt; leaves all others alone.

    The new attempt goes on from the newest checkpoint of the older ones, unless `fresh`.

    Returns:
        The cells that got one.

    Raises:
        UserError: as `submit`.
    """
    folder = _folder(cells, root)
    folder.make(group_readable=site.group_readable)
    with exclusive(folder.path / "submit.lock"):
        _finish_interrupted(folder)
        statuses = read_statuses(folder, _each_once(cells))
        again = [status.cell for status in statuses if status.state in RETRYABLE]
        _start(again, site, folder, command, budget, resume=not fresh)
    return again


def cancel(cells: Sequence[Cell], root: Path = DEFAULT_ROOT, *, checkpoint: bool = False) -> list[Cell]:
    """End pending and running cells, running ones after a checkpoint if asked; returns once they have ended.

    Returns:
        The cells that were in flight.
    """
    folder = _folder(cells, root)
    caught = [status for status in read_statuses(folder, cells) if status.state in IN_FLIGHT]
    attempts = [status.attempt for status in caught if status.attempt is not None]
    _cancel(attempts, checkpoint=checkpoint)
    left = [status.cell for status in caught]
    pause = _CANCEL_POLL_SECONDS
    while left:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
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
    return sweep_folder(names.pop(), root)


def _finish_interrupted(folder: SweepFolder) -> None:
    for launcher in LAUNCHERS.values():
        if launcher.interrupted(folder):
            launcher.resume(folder)


def _start(
    cells: Sequence[Cell],
    site: Site,
    folder: SweepFolder,
    command: Sequence[str],
    budget: float | None,
    *,
    resume: bool = False,
) -> None:
    launcher = LAUNCHERS[site.launcher]
    for cell in cells:
        launcher.check(cell, site)
    if cells:
        launcher.hours(cells, site).refuse_beyond(budget)
        launcher.launch(folder, (_new(cell, site, folder, command, resume) for cell in in_blocks(cells)))


def _new(
    cell: Cell, site: Site, folder: SweepFolder, command: Sequence[str], resume: bool
) -> tuple[Attempt, Launch]:
    cell_folder = folder.stage(cell)
    saved = (
        [one.number for one in cell_folder.attempts() if CheckpointStore(one).newest_first()]
        if resume
        else []
    )
    launch = LAUNCHERS[site.launcher].plan(cell, site, command)
    continues = saved[-1] if saved else None
    return _attempt_at(cell_folder), launch.model_copy(update={"continues": continues})


def _attempt_at(cell_folder: CellFolder) -> Attempt:
    """A new attempt, or the one whose submission ended before anything was launched."""
    latest = cell_folder.latest()
    if latest is not None and stored_state(latest).state == "STAGED":
        latest.make_logs()  # the submission may have ended before it did
        return latest
    return cell_folder.new_attempt()


def _cancel(attempts: Sequence[Attempt], *, checkpoint: bool) -> None:
    by_launcher: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        launch = attempt.read("launch.json")
        if launch is not None:
            by_launcher[launch["launcher"]].append(attempt)
    for name, found in by_launcher.items():
        LAUNCHERS[name].cancel(found, checkpoint=checkpoint)
    for attempt in attempts:
        if not (attempt.path / "begun.json").exists():
            attempt.write_outcome(outcome_without_ranks("CANCELLED", "cancelled before it started"))


def _cells(statuses: Iterable[CellStatus], chosen: Callable[[CellStatus], bool]) -> tuple[Cell, ...]:
    return tuple(status.cell for status in statuses if chosen(status))
