"""What state every cell is in, how far it has come, and why it failed.

Told from its files; its launcher is asked only about attempts without an outcome, all at once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from harness.cell import Cell
from harness.launchers import LAUNCHERS
from harness.launchers.attempt_state import AttemptState
from harness.launchers.launch import RanksStarted
from harness.runs.checkpoint_store import resumable
from harness.runs.effective_records import effective_evaluations
from harness.runs.log_tail import last_record
from harness.runs.records import FINAL_STATES, EvalRecord, Outcome, RankExit, State
from harness.runs.store import Attempt, SweepFolder

IN_FLIGHT: tuple[State, ...] = ("PENDING", "RUNNING")
RETRYABLE: tuple[State, ...] = tuple(state for state in FINAL_STATES if state != "COMPLETED")


@dataclass(frozen=True)
class CellStatus:
    """One cell as its files show it.

    Attributes:
        attempt: the newest attempt, if any.
        cause: why it ended as it did, one sentence; empty where there is nothing to explain.
        rank: whom `step` and `phase` are about: the cause of a failure, else the rank furthest behind.
        step: step in progress or last begun, counted from 0; None before the first.
        total_steps: steps that a run takes without reaching its target.
        value: newest value of the target's metric.
        started_at: Unix time, seconds.
        ended_at: Unix time, seconds.
        checkpoint_step: the step that a retry would go on from, if there is a checkpoint.
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

    @property
    def final(self) -> bool:
        """Whether nothing happens to the cell any more unless someone retries it."""
        return self.state in FINAL_STATES

    @property
    def elapsed_seconds(self) -> float | None:
        """Since its ranks were started, to the end or to now."""
        if self.started_at is None:
            return None
        return (self.ended_at or time.time()) - self.started_at

    @property
    def eta_seconds(self) -> float | None:
        """Until its last step at the pace so far; sooner if it reaches its target. None unless running."""
        elapsed = self.elapsed_seconds
        if self.state != "RUNNING" or not self.step or not self.total_steps or elapsed is None:
            return None
        return elapsed * (self.total_steps - self.step) / self.step

    def to_dict(self) -> dict[str, Any]:
        """For programs: flat, JSON types only."""
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


def read_statuses(folder: SweepFolder, cells: Iterable[Cell] | None = None) -> list[CellStatus]:
    """The status of the cells, or of all cells stored in the folder; in the order given.

    Raises:
        StoreError: a stored cell cannot be read.
    """
    wanted = [stored.cell() for stored in folder.cell_folders()] if cells is None else cells
    seen = [_read(folder, cell) for cell in wanted]
    fates = _fates(status.attempt for status in seen if status.state in IN_FLIGHT and status.attempt)
    return [_corrected(status, fates.get(status.attempt)) if status.attempt else status for status in seen]


def count_states(statuses: Iterable[CellStatus]) -> dict[State, int]:
    """How many cells are in each state, the commonest first."""
    counts: dict[State, int] = defaultdict(int)
    for status in statuses:
        counts[status.state] += 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def is_stalled(folder: SweepFolder, statuses: Iterable[CellStatus]) -> bool:
    """Whether cells are pending that nobody will start: their queue was killed."""
    names = {_launcher(status.attempt) for status in statuses if status.state == "PENDING" and status.attempt}
    return any(not LAUNCHERS[name].works_on(folder) for name in names)


def _read(folder: SweepFolder, cell: Cell) -> CellStatus:
    attempt = folder.cell_folder(cell).latest()
    if attempt is None:
        return CellStatus(cell, "STAGED")
    outcome = attempt.outcome()
    if outcome is not None:
        return _ended(cell, attempt, outcome)
    begun = RanksStarted.read(attempt)
    if begun is not None:
        return _running(CellStatus(cell, "RUNNING", attempt, started_at=begun.started_at))
    launched = (attempt.path / "launch.json").exists()
    return CellStatus(cell, "PENDING" if launched else "STAGED", attempt)


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
    )


def _running(status: CellStatus) -> CellStatus:
    assert status.attempt is not None  # noqa: S101  # see _read
    beats = [(status.attempt.last_heartbeat(rank), rank) for rank in range(status.cell.world_size)]
    heard = [(beat, rank) for beat, rank in beats if beat is not None]
    if not heard:
        return status
    beat, rank = min(heard, key=lambda pair: pair[0].step)
    newest = _newest_evaluation(status.attempt)
    return replace(
        status,
        rank=rank,
        step=beat.step if beat.step >= 0 else None,
        total_steps=beat.total_steps or None,
        phase=beat.phase,
        value=newest["value"] if newest is not None else None,
        ended_at=None,
        checkpoint_step=next((saved.step for _, saved in resumable(status.attempt)), None),
        cause=_resumed(status.attempt),
    )


def _newest_evaluation(attempt: Attempt) -> dict[str, Any] | None:
    newest = last_record(attempt.records(0), EvalRecord.KIND)
    if newest is None and len(attempt.lineage()) > 1:  # resumed, and not evaluated since
        return next(reversed(effective_evaluations(attempt)), None)
    return newest


def _resumed(attempt: Attempt) -> str:
    """Filter a resumed run went on, and what it had to pass over; empty for one that was not resumed."""
    segment = attempt.read("segment.json")
    if segment is None or not (segment["segment"] or segment["notes"]):
        return ""
    return "; ".join([f"resumed at step {segment['first_step']}", *segment["notes"]])


def _fates(in_flight: Iterable[Attempt]) -> dict[Attempt, AttemptState]:
    by_launcher: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in in_flight:
        by_launcher[_launcher(attempt)].append(attempt)
    fates: dict[Attempt, AttemptState] = {}
    for name, attempts in by_launcher.items():
        fates |= LAUNCHERS[name].fates(attempts)
    return fates


def _corrected(status: CellStatus, fate: AttemptState | None) -> CellStatus:
    attempt = status.attempt
    if fate is None or attempt is None:
        return status
    if fate.state is None or fate.state in IN_FLIGHT:
        cause = "; ".join(filter(None, [status.cause, fate.cause]))
        return replace(status, state=fate.state or status.state, cause=cause)
    if outcome := attempt.outcome():  # it ended while its launcher was asked
        return _ended(status.cell, attempt, outcome)
    cause = f"{fate.cause}; last seen {_place(status)}" if status.state == "RUNNING" else fate.cause
    if not fate.sure:
        return replace(status, state=fate.state, cause=cause)
    return _ended(status.cell, attempt, _settled(status, attempt, replace(fate, cause=cause)))


def _settled(status: CellStatus, attempt: Attempt, fate: AttemptState) -> Outcome:
    """Write the outcome that nobody else is left to write, while the scheduler remembers the cause."""
    ranks: tuple[RankExit, ...] = ()
    if status.rank is not None:
        ranks = (RankExit(status.rank, None, step=status.step, phase=status.phase),)
    now = time.time()
    outcome = Outcome(
        fate.state or "LOST", fate.cause, None, "error", status.started_at or now, now,
        ranks=ranks, checkpoint_step=status.checkpoint_step, failed_nodes=fate.failed_nodes,
    )  # fmt: skip
    try:
        written = attempt.write_outcome(outcome)
    except OSError:  # someone else's runs, or a full disk: shown all the same
        return outcome
    return outcome if written else attempt.outcome() or outcome


def _place(status: CellStatus) -> str:
    return f"at step {status.step} in {status.phase}" if status.step is not None else "before its first step"


def _launcher(attempt: Attempt) -> str:
    launch = attempt.read("launch.json")
    return str(launch["launcher"]) if launch is not None else "local"
