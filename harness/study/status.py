"""State, progress and cause of failure of every cell.

Read from the run folder; launchers are asked only about attempts without an outcome, all at once.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.cell import Cell
from harness.errors import StoreError
from harness.launchers import LAUNCHERS, AttemptState
from harness.runs.attempt_outcome import FINAL_STATES, Outcome, RankExit, State
from harness.runs.checkpoint_store import kept_step, resumable
from harness.runs.record_lines import effective_evaluations, last_record
from harness.runs.records import EvalRecord, SegmentRecord
from harness.runs.run_place import LaunchFacts
from harness.runs.store import Attempt, SweepFolder
from harness.study.cell_states import IN_FLIGHT, StoredState, stored_states, taken_seconds

_FIRST_PAUSE_SECONDS = 2.0  # a job that is refused, or a node that is down, shows itself soon
_GROWTH = 1.5


@dataclass(frozen=True)
class CellStatus:
    """State and progress of one cell.

    Attributes:
        attempt: the newest attempt, if any.
        cause: why it ended, one sentence; empty if there is nothing to explain.
        rank: the rank of `step` and `phase`: the one that failed first, else the one furthest behind.
        step: step in progress or last begun, counted from 0; None before the first.
        total_steps: steps of a run that does not reach its target.
        value: newest value of the target's metric.
        started_at: Unix time, seconds.
        ended_at: Unix time, seconds.
        checkpoint_step: the step at which a retry would resume, if there is a checkpoint.
        taken_seconds: of an ended run, time of the ranks in all of its attempts.
    """

    cell: Cell
    state: State
    attempt: Attempt | None = None
    cause: str = ""
    rank: int | None = None
    step: int | None = None
    total_steps: int | None = None
    phase: str | None = None
    value: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    checkpoint_step: int | None = None
    taken_seconds: float | None = None

    @property
    def final(self) -> bool:
        """Whether the cell has ended; only a retry changes it."""
        return self.state in FINAL_STATES

    @property
    def elapsed_seconds(self) -> float | None:
        """From the start of its ranks to the end or to now."""
        if self.started_at is None:
            return None
        return (self.ended_at or time.time()) - self.started_at

    @property
    def eta_seconds(self) -> float | None:
        """Time to its last step at the pace so far, an upper bound; None unless running."""
        elapsed = self.elapsed_seconds
        if self.state != "RUNNING" or not self.step or not self.total_steps or elapsed is None:
            return None
        return elapsed * (self.total_steps - self.step) / self.step

    def to_dict(self) -> dict[str, Any]:
        """Flat dictionary of JSON types."""
        names = (
            "state", "cause", "rank", "step", "total_steps", "phase", "value", "started_at", "ended_at",
            "checkpoint_step",
        )  # fmt: skip
        return {
            "id": self.cell.id,
            "sweep": self.cell.sweep,
            "method": self.cell.method,
            "world_size": self.cell.world_size,
            "seed": self.cell.seed,
            "attempt": self.attempt.number if self.attempt is not None else None,
            **{name: getattr(self, name) for name in names},
            "elapsed_seconds": self.elapsed_seconds,
            "eta_seconds": self.eta_seconds,
        }


def read_statuses(
    folder: SweepFolder, cells: Iterable[Cell] | None = None, reports: LauncherReports | None = None
) -> list[CellStatus]:
    """The status of the given cells, or of all cells stored in the folder, in the order given.

    Args:
        folder: of the sweep.
        cells: of the sweep.
        reports: where statuses are read again and again, what remembers the launchers' answers.

    Raises:
        StoreError: a stored cell cannot be read.
    """
    [found] = corrected([stored_statuses(folder, cells)], reports)
    return found


def stored_statuses(folder: SweepFolder, cells: Iterable[Cell] | None = None) -> list[CellStatus]:
    """The statuses as files of the runs have them; arguments and errors as of `read_statuses`."""
    wanted = [stored.cell() for stored in folder.cell_folders()] if cells is None else cells
    return [_status(cell, stored) for cell, stored in stored_states(folder, wanted)]


def corrected(
    sweeps: Sequence[Sequence[CellStatus]], reports: LauncherReports | None = None
) -> list[list[CellStatus]]:
    """Statuses of any number of sweeps, by what the launchers report; each launcher is asked once at most."""
    states = {
        one.attempt: one.state
        for statuses in sweeps
        for one in statuses
        if one.state in IN_FLIGHT and one.attempt
    }
    found = (reports or LauncherReports()).of(states)
    return [
        [_corrected(one, found.get(one.attempt)) if one.attempt else one for one in statuses]
        for statuses in sweeps
    ]


def count_states(statuses: Iterable[CellStatus]) -> dict[State, int]:
    """Number of cells in each state, the commonest first."""
    return dict(Counter(status.state for status in statuses).most_common())


def is_stalled(folder: SweepFolder, statuses: Iterable[CellStatus]) -> bool:
    """Whether cells are pending and their queue was killed, so that nothing will start them."""
    return bool(stalled_launchers(folder, statuses))


def stalled_launchers(folder: SweepFolder, statuses: Iterable[CellStatus]) -> list[str]:
    """The launchers of pending cells that nothing will start; see `is_stalled`."""
    names = {
        launcher_of(status.attempt) for status in statuses if status.state == "PENDING" and status.attempt
    }
    return sorted(name for name in names if not LAUNCHERS[name].starts_pending(folder))


class LauncherReports:
    """Answers of launchers about attempts without an outcome, for one reading or for as long as one watches.

    Starts and ends of attempts show in their own files; a launcher only knows why one waits, and which are
    lost. So one that asks a scheduler is asked at once, then after pauses that grow from 2 s to its
    `poll_seconds`. In between an answer counts until the attempt's own files show another state.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._answers: dict[str, dict[Attempt, tuple[State, AttemptState]]] = {}

    def of(self, states: Mapping[Attempt, State]) -> dict[Attempt, AttemptState]:
        """What is reported about attempts, of any number of sweeps; each launcher is asked at most once.

        Args:
            states: of attempts without an outcome, as their files show them.
        """
        by_launcher: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in states:
            by_launcher[launcher_of(attempt)].append(attempt)
        reported: dict[Attempt, AttemptState] = {}
        for name, group in by_launcher.items():
            if self._clock() >= self._due.get(name, 0.0):
                answers = LAUNCHERS[name].attempt_states(group)
                self._answers[name] = {one: (states[one], answer) for one, answer in answers.items()}
                self._wait(name)
            known = self._answers[name]
            reported |= {one: known[one][1] for one in group if one in known and known[one][0] == states[one]}
        return reported

    def _wait(self, name: str) -> None:
        most = LAUNCHERS[name].poll_seconds
        pause = min(self._pauses.get(name, _FIRST_PAUSE_SECONDS), most)
        self._due[name], self._pauses[name] = self._clock() + pause, pause * _GROWTH


def launcher_of(attempt: Attempt) -> str:
    """Name of the launcher that the attempt was launched by; the local one if that is not known."""
    try:
        launch = attempt.read_as(LaunchFacts, "launch.json")
    except StoreError:  # of a running attempt: only its own files show whether it still runs
        launch = None
    return launch.launcher if launch is not None and launch.launcher in LAUNCHERS else "local"


def _status(cell: Cell, stored: StoredState) -> CellStatus:
    if stored.attempt is not None and stored.outcome is not None:
        return _ended(cell, stored.attempt, stored.outcome)
    if stored.attempt is not None and stored.state == "RUNNING":
        return _running(cell, stored.attempt)
    return CellStatus(cell, stored.state, stored.attempt)


def _ended(cell: Cell, attempt: Attempt, outcome: Outcome) -> CellStatus:
    first = outcome.ranks[0] if outcome.ranks else None
    return CellStatus(
        cell,
        outcome.state,
        attempt,
        cause=outcome.cause,
        rank=first.rank if first else None,
        step=first.step if first else None,
        phase=first.phase if first else None,
        value=outcome.value,
        started_at=outcome.started_at,
        ended_at=outcome.ended_at,
        checkpoint_step=outcome.checkpoint_step,
        taken_seconds=taken_seconds(attempt, outcome),
    )


def _running(cell: Cell, attempt: Attempt) -> CellStatus:
    try:
        return _progress(cell, attempt)
    except StoreError as error:
        return CellStatus(cell, "RUNNING", attempt, cause=f"its progress is not known: {error}")


def _progress(cell: Cell, attempt: Attempt) -> CellStatus:
    from harness.launchers.launch import RanksStarted  # noqa: PLC0415  slow to load, and few cells run

    started = RanksStarted.read(attempt)
    status = CellStatus(cell, "RUNNING", attempt, started_at=started.started_at if started else None)
    heartbeats = [(attempt.last_heartbeat(rank), rank) for rank in range(cell.world_size)]
    found = [(heartbeat, rank) for heartbeat, rank in heartbeats if heartbeat is not None]
    if not found:
        return status
    heartbeat, rank = min(found, key=lambda pair: pair[0].step)
    newest = _newest_evaluation(attempt)
    return replace(
        status,
        rank=rank,
        step=heartbeat.step if heartbeat.step >= 0 else None,
        total_steps=heartbeat.total_steps or None,
        phase=heartbeat.phase,
        value=newest["value"] if newest is not None else None,
        checkpoint_step=next((saved.step for _, saved in resumable(attempt)), None),
        cause=_resume_note(attempt),
    )


def _newest_evaluation(attempt: Attempt) -> dict[str, Any] | None:
    newest = last_record(attempt.records(0), EvalRecord.KIND)
    if newest is None and len(attempt.lineage()) > 1:  # resumed and not evaluated since
        return next(reversed(effective_evaluations(attempt)), None)
    return newest


def _resume_note(attempt: Attempt) -> str:
    """The step at which a run was resumed, and checkpoints that it skipped; empty if it was not resumed."""
    segment = attempt.read_as(SegmentRecord, "segment.json")
    if segment is None or not (segment.segment or segment.notes):
        return ""
    return "; ".join([f"resumed at step {segment.first_step}", *segment.notes])


def _corrected(status: CellStatus, reported: AttemptState | None) -> CellStatus:
    attempt = status.attempt
    if reported is None or attempt is None:
        return status
    if reported.state is None or reported.state in IN_FLIGHT:
        cause = "; ".join(filter(None, [status.cause, reported.cause]))
        return replace(status, state=reported.state or status.state, cause=cause)
    if outcome := attempt.outcome():  # it ended while its launcher was asked
        return _ended(status.cell, attempt, outcome)
    cause = reported.cause
    if status.state == "RUNNING":
        cause += f"; last seen {_place(status)}"
    status = replace(status, checkpoint_step=kept_step(attempt))
    from harness.launchers.ranks.outcome import checkpoint_note  # noqa: PLC0415  slow to load, see _progress

    cause += checkpoint_note(status.checkpoint_step)
    if not reported.sure:
        return replace(status, state=reported.state, cause=cause)
    return _ended(status.cell, attempt, _written_outcome(status, attempt, replace(reported, cause=cause)))


def _written_outcome(status: CellStatus, attempt: Attempt, reported: AttemptState) -> Outcome:
    """Write the outcome of an attempt whose own processes are gone, while the scheduler knows the cause."""
    ranks: tuple[RankExit, ...] = ()
    if status.rank is not None:
        ranks = (RankExit(status.rank, None, step=status.step, phase=status.phase),)
    now = time.time()
    outcome = Outcome(
        reported.state or "LOST", reported.cause, None, "error", status.started_at or now, now,
        ranks=ranks, checkpoint_step=status.checkpoint_step, failed_nodes=reported.failed_nodes,
    )  # fmt: skip
    try:
        written = attempt.write_outcome(outcome)
    except OSError:  # the folder is not writable or the disk is full; the status is shown all the same
        return outcome
    return outcome if written else attempt.outcome() or outcome


def _place(status: CellStatus) -> str:
    return f"at step {status.step} in {status.phase}" if status.step is not None else "before its first step"
