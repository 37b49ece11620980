"""Submit, retry and cancel cells; each may be repeated and run concurrently."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.cell import Cell
from harness.errors import StoreError
from harness.launchers import LAUNCHERS
from harness.launchers.cost_estimate import CostEstimate
from harness.launchers.launch import WORKER_COMMAND, Launch
from harness.launchers.outcome import outcome_without_ranks
from harness.launchers.site_profile import Site
from harness.runs.checkpoint_store import CheckpointStore
from harness.runs.locks import exclusive
from harness.runs.ownership import foreign, refuse_foreign
from harness.runs.store import DEFAULT_ROOT, Attempt, CellFolder, SweepFolder, sweep_folder
from harness.study.cell_states import IN_FLIGHT, RETRYABLE, stored_state
from harness.study.status import CellStatus, in_flight, read_statuses, stalled_launchers

_CANCEL_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 2.0  # reading statuses may query a cluster's scheduler


@dataclass(frozen=True)
class Submission:
    """Result of `submit`, by cell.

    Attributes:
        new: got an attempt now.
        already_done: completed before.
        in_flight: pending or running already.
        failed_before: ended without completing; only `retry` gives them another attempt.
    """

    new: tuple[Cell, ...]
    already_done: tuple[Cell, ...]
    in_flight: tuple[Cell, ...]
    failed_before: tuple[Cell, ...]


@dataclass(frozen=True)
class Preview:
    """What `submit` would do.

    Attributes:
        new: the cells that would get an attempt, in the order of their start.
        text: the commands or scripts that their launcher would submit.
        cost: upper bound of their cost.
    """

    new: tuple[Cell, ...]
    text: str
    cost: CostEstimate


def submit(
    cells: Sequence[Cell],
    site: Site,
    root: Path = DEFAULT_ROOT,
    command: Sequence[str] = WORKER_COMMAND,
    budget: float | None = None,
) -> Submission:
    """Start every cell that has no attempt yet; restart a queue that was killed.

    Args:
        cells: cells of one sweep.
        site: site to run them on.
        root: folder of all sweeps.
        command: starts one rank.
        budget: upper limit of the cost of new cells, in GPU-hours if the site has GPUs, else in core-hours;
            None for no limit.

    Raises:
        SiteError: the site can never run one of the new cells; nothing is submitted.
        ForeignError: other users may have written the sweep's run folder, and the site lacks `shared_runs`.
        BudgetError: they could cost more; nothing is submitted.
        SchedulerError: a cluster did not answer; submit again to complete the submission.
    """
    folder = _own_folder(cells, site, root)
    with exclusive(folder.path / "submit.lock"):
        _finish_interrupted(folder, site)
        statuses = read_statuses(folder, _each_once(cells))
        new = [status.cell for status in statuses if status.state == "STAGED"]
        _start(new, site, folder, command, budget)
        for name in stalled_launchers(folder, statuses):
            if not new or name != site.launcher:  # whose `launch` has done so
                LAUNCHERS[name].resume(folder, shared_runs=site.shared_runs)
    return Submission(
        new=tuple(new),
        already_done=_cells(statuses, lambda status: status.state == "COMPLETED"),
        in_flight=_cells(statuses, lambda status: status.state in IN_FLIGHT),
        failed_before=_cells(statuses, lambda status: status.state in RETRYABLE),
    )


def preview(cells: Sequence[Cell], site: Site, root: Path = DEFAULT_ROOT) -> Preview:
    """What `submit` would do now; changes nothing.

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
    return Preview(tuple(new), text, launcher.estimate_cost(new, site) if new else CostEstimate())


def retry(
    cells: Sequence[Cell],
    site: Site,
    root: Path = DEFAULT_ROOT,
    command: Sequence[str] = WORKER_COMMAND,
    budget: float | None = None,
    *,
    fresh: bool = False,
) -> list[Cell]:
    """Start a new attempt of every cell that ended without completing.

    The new attempt resumes from the newest checkpoint of the earlier ones, unless `fresh`.

    Returns:
        The cells that got a new attempt.

    Raises:
        UserError: as in `submit`.
    """
    folder = _own_folder(cells, site, root)
    with exclusive(folder.path / "submit.lock"):
        _finish_interrupted(folder, site)
        statuses = read_statuses(folder, _each_once(cells))
        retried = [status.cell for status in statuses if status.state in RETRYABLE]
        _start(retried, site, folder, command, budget, resume=not fresh)
    return retried


def cancel(cells: Sequence[Cell], root: Path = DEFAULT_ROOT, *, checkpoint: bool = False) -> list[Cell]:
    """End pending and running cells; returns once they have ended.

    With `checkpoint`, running cells save one first.

    Returns:
        The cells that were in flight.
    """
    folder = _folder(cells, root)
    found = [status for status in read_statuses(folder, cells) if status.state in IN_FLIGHT]
    attempts = [status.attempt for status in found if status.attempt is not None]
    _cancel(attempts, checkpoint=checkpoint)
    remaining = [status.cell for status in found]
    pause = _CANCEL_POLL_SECONDS
    while remaining:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        remaining = [status.cell for status in read_statuses(folder, remaining) if status.state in IN_FLIGHT]
    return [status.cell for status in found]


def cancel_other_versions(folder: SweepFolder, *, checkpoint: bool = False) -> list[str]:
    """End what is pending or running of cells that this version cannot read; returns once it has ended.

    Returns:
        The ids of the cells that were in flight.
    """
    newest = [stored.latest() for stored in folder.cell_folders_of_other_versions()]
    attempts = [one for one in newest if one is not None and stored_state(one).state in IN_FLIGHT]
    _cancel(attempts, checkpoint=checkpoint)
    pause, remaining = _CANCEL_POLL_SECONDS, attempts
    while remaining := in_flight(remaining):
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
    return [attempt.cell_folder.id for attempt in attempts]


def in_blocks(cells: Sequence[Cell]) -> list[Cell]:
    """Cells in the order of their start: by seed, and within a seed shuffled by content hash.

    These are randomised blocks: a machine that slows down during the study then slows all arms, not only the
    last one in the file. The shuffle is deterministic.
    """
    return sorted(cells, key=lambda cell: (cell.seed, cell.content_hash))


def _each_once(cells: Iterable[Cell]) -> list[Cell]:
    return list({cell.id: cell for cell in cells}.values())


def _folder(cells: Sequence[Cell], root: Path) -> SweepFolder:
    names = {cell.sweep for cell in cells}
    if len(names) != 1:
        raise AssertionError(f"cells must be of one sweep, got {sorted(names)}")
    return sweep_folder(names.pop(), root)


def _own_folder(cells: Sequence[Cell], site: Site, root: Path) -> SweepFolder:
    """The folder of the cells' sweep, made if needed; nobody else may write it unless the site says so."""
    folder = _folder(cells, root)
    folder.make(group_readable=site.group_readable)
    if not site.shared_runs:
        refuse_foreign(folder.path, folder.path)
    return folder


def _finish_interrupted(folder: SweepFolder, site: Site) -> None:
    for launcher in LAUNCHERS.values():
        if launcher.interrupted(folder):
            launcher.resume(folder, shared_runs=site.shared_runs)


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
        launcher.estimate_cost(cells, site).refuse_beyond(budget)
        made: list[Attempt | CellFolder] = []
        launches = (_new(cell, site, folder, command, resume, made) for cell in in_blocks(cells))
        try:
            launcher.launch(folder, launches)
        except OSError as error:
            _withdraw(made)
            raise StoreError(
                f"{error.filename or folder.path}: {error.strerror or error}; nothing was submitted: free "
                f"some space, or keep runs on another file system (--runs)"
            ) from None


def _new(
    cell: Cell,
    site: Site,
    folder: SweepFolder,
    command: Sequence[str],
    resume: bool,
    made: list[Attempt | CellFolder],
) -> tuple[Attempt, Launch]:
    """The new attempt and its launch; adds the folders that it makes to `made`."""
    if not (cell_folder := folder.cell_folder(cell)).path.exists():
        made.append(cell_folder)
    folder.stage(cell)
    if not site.shared_runs:
        refuse_foreign(cell_folder.path / "cell.json", folder.path)

    def trusted(attempt: Attempt) -> bool:
        return site.shared_runs or foreign(attempt.path / "checkpoints", folder.path) is None

    saved = (
        [one.number for one in cell_folder.attempts() if trusted(one) and CheckpointStore(one).newest_first()]
        if resume
        else []
    )
    launch = LAUNCHERS[site.launcher].plan(cell, site, command)
    continues = saved[-1] if saved else None
    attempt = _attempt_at(cell_folder)
    made.append(attempt)
    return attempt, launch.model_copy(update={"continues": continues})


def _attempt_at(cell_folder: CellFolder) -> Attempt:
    """A new attempt, or the newest one if its submission was interrupted before the launch."""
    latest = cell_folder.latest()
    own = latest is not None and foreign(latest.path, cell_folder.path.parent) is None
    if latest is not None and own and stored_state(latest).state == "STAGED":
        latest.make_logs()  # the interrupted submission may not have made them
        return latest
    return cell_folder.new_attempt()


def _withdraw(made: Sequence[Attempt | CellFolder]) -> None:
    """Undo a submission that could not be completed, and that has started nothing.

    Folders in which another process has written something meanwhile stay.
    """
    for folder in reversed(made):
        if isinstance(folder, Attempt):
            Launch.withdraw(folder)
        elif folder.latest() is None:
            (folder.path / "cell.json").unlink(missing_ok=True)
        for path in (folder.path / "logs", folder.path):
            with suppress(OSError):
                path.rmdir()


def _cancel(attempts: Sequence[Attempt], *, checkpoint: bool) -> None:
    by_launcher: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        launch = attempt.read("launch.json")
        if launch is not None:
            by_launcher[launch["launcher"]].append(attempt)
    for name, group in by_launcher.items():
        LAUNCHERS[name].cancel(group, checkpoint=checkpoint)
    for attempt in attempts:
        if not (attempt.path / "begun.json").exists():
            attempt.write_outcome(outcome_without_ranks("CANCELLED", "cancelled before it started"))


def _cells(statuses: Iterable[CellStatus], condition: Callable[[CellStatus], bool]) -> tuple[Cell, ...]:
    return tuple(status.cell for status in statuses if condition(status))
