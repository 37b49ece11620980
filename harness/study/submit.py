"""Submit, retry and cancel cells; each may be repeated and run concurrently."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.cell import Cell
from harness.errors import StoreError
from harness.launchers import LAUNCHERS
from harness.launchers.cost import CostEstimate, StartBudget
from harness.launchers.launch import WORKER_COMMAND, Launch
from harness.launchers.ranks.outcome import cancelled_before_start
from harness.launchers.resuming import continued_attempts, refuse_change
from harness.launchers.site_profile import Site
from harness.runs.attempt_outcome import State
from harness.runs.locks import exclusive
from harness.runs.store import DEFAULT_ROOT, Attempt, SweepFolder, sweep_folder
from harness.runs.stored_files import refuse_foreign
from harness.study.cell_states import IN_FLIGHT, RETRYABLE
from harness.study.expected_cost import expected_cost
from harness.study.start_cells import Terms, in_blocks, start_cells
from harness.study.status import CellStatus, LauncherReports, launcher_of, read_statuses, stalled_launchers

_CANCEL_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 2.0  # of files; schedulers are asked less often
_AS_SUBMIT = Terms()


@dataclass(frozen=True)
class Submission:
    """Result of `submit`, by cell.

    Attributes:
        new: got an attempt now.
        already_done: completed before.
        in_flight: pending or running already.
        failed_before: ended without completing; only `retry` gives them another attempt.
        cost: upper bound of the cost of the new ones.
        expected: what they will cost, from the completed ones; None if none has completed.
    """

    new: tuple[Cell, ...]
    already_done: tuple[Cell, ...]
    in_flight: tuple[Cell, ...]
    failed_before: tuple[Cell, ...]
    cost: CostEstimate = field(default_factory=CostEstimate)
    expected: CostEstimate | None = None


@dataclass(frozen=True)
class Preview:
    """What `submit` or `retry` would do.

    Attributes:
        new: the cells that would get an attempt, in the order of their start.
        text: the commands or scripts that their launcher would submit.
        cost: upper bound of their cost.
        expected: as in `Submission`.
        continued: the attempts that would be continued, by cell id.
    """

    new: tuple[Cell, ...]
    text: str
    cost: CostEstimate
    expected: CostEstimate | None = None
    continued: Mapping[str, Attempt] = field(default_factory=dict)


def submit(
    cells: Sequence[Cell],
    site: Site,
    root: Path = DEFAULT_ROOT,
    command: Sequence[str] = WORKER_COMMAND,
    budget: float | None = None,
    *,
    ask: bool = False,
) -> Submission:
    """Start every cell that has no attempt yet; restart a queue that was killed.

    Args:
        cells: cells of one sweep.
        site: site to run them on.
        root: folder of all sweeps.
        command: starts one rank.
        budget: see `Terms`.
        ask: see `Terms`.

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
        cost = start_cells(new, site, folder, Terms(command, budget, ask))
        for name in stalled_launchers(folder, statuses):
            if not new or name != site.launcher:  # whose `launch` has done so
                LAUNCHERS[name].finish_submission(folder, shared_runs=site.shared_runs)
    return Submission(
        new=tuple(new),
        already_done=_cells(statuses, lambda status: status.state == "COMPLETED"),
        in_flight=_cells(statuses, lambda status: status.state in IN_FLIGHT),
        failed_before=_cells(statuses, lambda status: status.state in RETRYABLE),
        cost=cost,
        expected=expected_cost(new, _taken(statuses), site),
    )


def preview(
    cells: Sequence[Cell],
    site: Site,
    root: Path = DEFAULT_ROOT,
    *,
    again: bool = False,
    repeat: bool = False,
    terms: Terms = _AS_SUBMIT,
) -> Preview:
    """What `submit` would do now, or with `again` what `retry` would; changes nothing.

    The random order within a block is drawn when they are submitted.

    Raises:
        SiteError: the site can never run one of the new cells, or a run would change its site.
    """
    folder = sweep_folder(cells[0].sweep, root)
    statuses = read_statuses(folder, _each_once(cells))
    new = _to_start(statuses, again=again, repeat=repeat)
    launcher = LAUNCHERS[site.launcher]
    for cell in new:
        launcher.check(cell, site)
    continued = continued_attempts(new, folder) if terms.resume else {}
    if not terms.change_site:
        refuse_change(continued, site)
    text = launcher.preview(folder, new, site) if new else ""
    return Preview(tuple(new), text, *_costs(new, statuses, site), continued)


def preview_cost(
    cells: Sequence[Cell], site: Site, root: Path = DEFAULT_ROOT
) -> tuple[list[Cell], CostEstimate, CostEstimate | None]:
    """The cells that `submit` would start, the most that they could cost, and what they are expected to."""
    statuses = read_statuses(sweep_folder(cells[0].sweep, root), _each_once(cells))
    new = _to_start(statuses, again=False)
    for cell in new:
        LAUNCHERS[site.launcher].check(cell, site)
    return new, *_costs(new, statuses, site)


def retry(
    cells: Sequence[Cell],
    site: Site,
    root: Path = DEFAULT_ROOT,
    command: Sequence[str] = WORKER_COMMAND,
    budget: float | None = None,
    *,
    fresh: bool = False,
    change_site: bool = False,
    ask: bool = False,
    repeat: bool = False,
) -> Submission:
    """Start a new attempt of every cell that ended without completing, and with `repeat` of completed ones.

    The new attempt resumes from the newest checkpoint of the earlier ones, unless `fresh` or `repeat`, and
    with `change_site` also at another site, launcher or kind of node. The newest completed attempt of a cell
    is the one that counts.

    Returns:
        `new` are the cells that got a new attempt; none is `failed_before`.

    Raises:
        SiteError: as `submit`, or a run would change its site.
        UserError: as in `submit`.
    """
    folder = _own_folder(cells, site, root)
    with exclusive(folder.path / "submit.lock"):
        _finish_interrupted(folder, site)
        statuses = read_statuses(folder, _each_once(cells))
        retried = _to_start(statuses, again=True, repeat=repeat)
        terms = Terms(command, budget, ask, resume=not (fresh or repeat), change_site=change_site)
        cost = start_cells(retried, site, folder, terms)
    return Submission(
        new=tuple(retried),
        already_done=_cells(statuses, lambda status: status.state == "COMPLETED"),
        in_flight=_cells(statuses, lambda status: status.state in IN_FLIGHT),
        failed_before=(),
        cost=cost,
        expected=expected_cost(retried, _taken(statuses), site),
    )


def cancel(cells: Sequence[Cell], root: Path = DEFAULT_ROOT, *, checkpoint: bool = False) -> list[Cell]:
    """End pending and running cells; returns once they have ended.

    With `checkpoint`, running cells save one first.

    Returns:
        The cells that were in flight.
    """
    folder = _folder(cells, root)
    reports = LauncherReports()
    statuses = read_statuses(folder, cells, reports)
    found = [one for one in statuses if one.state in IN_FLIGHT]
    remaining, cancelled = found, set[Attempt]()
    pause = _CANCEL_POLL_SECONDS
    while remaining:  # a run that has just met its time limit may go on in another attempt
        attempts = {status.attempt for status in remaining if status.attempt is not None}
        _cancel(sorted(attempts - cancelled, key=lambda one: one.path), checkpoint=checkpoint)
        cancelled |= attempts
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        statuses = read_statuses(folder, [status.cell for status in remaining], reports)
        remaining = [status for status in statuses if status.state in IN_FLIGHT]
    return [status.cell for status in found]


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
            launcher.finish_submission(folder, shared_runs=site.shared_runs)


def _cancel(attempts: Sequence[Attempt], *, checkpoint: bool) -> None:
    by_launcher: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_launcher[launcher_of(attempt)].append(attempt)
    for name, group in by_launcher.items():
        LAUNCHERS[name].cancel(group, checkpoint=checkpoint)
    for attempt in attempts:
        started = (attempt.path / "begun.json").exists()
        if not started and attempt.write_outcome(cancelled_before_start(attempt)):
            with suppress(OSError, StoreError):  # then it stays committed
                _refund(attempt)


def _refund(attempt: Attempt) -> None:
    """Give back what the start of an attempt on this host could have cost; its ranks never ran."""
    launch = Launch.read(attempt)
    if launch is None or launch.budget is None or launch.launcher != "local":
        return
    cell, folder = attempt.cell_folder.cell(), SweepFolder(attempt.path.parent.parent)
    cost = LAUNCHERS[launch.launcher].estimate_cost([cell], launch.site)
    limit = launch.site.limit_minutes(cell.world_size)
    StartBudget(folder, launch.budget, cost, limit, alone=True).refund()


def _to_start(statuses: Iterable[CellStatus], *, again: bool, repeat: bool = False) -> list[Cell]:
    states: tuple[State, ...] = RETRYABLE if again else ("STAGED",)
    if repeat:
        states = (*states, "COMPLETED")
    return in_blocks(_cells(statuses, lambda status: status.state in states))


def _costs(
    new: Sequence[Cell], statuses: Sequence[CellStatus], site: Site
) -> tuple[CostEstimate, CostEstimate | None]:
    if not new:
        return CostEstimate(), None
    return LAUNCHERS[site.launcher].estimate_cost(new, site), expected_cost(new, _taken(statuses), site)


def _taken(statuses: Iterable[CellStatus]) -> list[tuple[Cell, float]]:
    """Completed cells with the seconds that they took."""
    return [
        (one.cell, one.taken_seconds)
        for one in statuses
        if one.state == "COMPLETED" and one.taken_seconds is not None
    ]


def _cells(statuses: Iterable[CellStatus], condition: Callable[[CellStatus], bool]) -> tuple[Cell, ...]:
    return tuple(status.cell for status in statuses if condition(status))
