"""State of a cell as its stored files show it; `status` corrects it by what the launchers report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.cell import Cell
from harness.errors import StoredFileError, StoreError
from harness.runs.attempt_outcome import FINAL_STATES, Outcome, State
from harness.runs.store import Attempt, SweepFolder

IN_FLIGHT: tuple[State, ...] = ("PENDING", "RUNNING")
RETRYABLE: tuple[State, ...] = tuple(state for state in FINAL_STATES if state != "COMPLETED")


@dataclass(frozen=True)
class StoredState:
    """State of a cell.

    Attributes:
        attempt: the newest attempt, if any.
        outcome: how that attempt ended, if it has.
    """

    state: State
    attempt: Attempt | None = None
    outcome: Outcome | None = None


def stored_states(folder: SweepFolder, cells: Iterable[Cell]) -> Iterator[tuple[Cell, StoredState]]:
    """The state of each of a sweep's cells, in their order; cells without an attempt are STAGED."""
    # One listing instead of a look-up per cell: most of a sweep's thousands of cells may not have a folder.
    names = {path.name for path in folder.path.iterdir()} if folder.path.is_dir() else set()
    for cell in cells:
        attempt = folder.cell_folder(cell).latest() if cell.id in names else None
        yield cell, StoredState("STAGED") if attempt is None else stored_state(attempt)


def stored_state(attempt: Attempt) -> StoredState:
    """The state of the cell whose newest attempt is `attempt`; STAGED until the attempt is launched.

    An attempt whose outcome cannot be read, or whose launch cannot before it has started, is LOST: it is not
    started, and a retry makes a new one.
    """
    try:
        outcome = attempt.outcome()
        if outcome is not None:
            return StoredState(outcome.state, attempt, outcome)
        if (attempt.path / "begun.json").exists():
            return StoredState("RUNNING", attempt)
        launched = _is_launched(attempt)
    except StoredFileError as error:
        cause = f"it is not known how it ended: {error}"
        return StoredState("LOST", attempt, Outcome("LOST", cause, None, "error", 0.0, 0.0))
    return StoredState("PENDING" if launched else "STAGED", attempt)


def taken_seconds(attempt: Attempt, outcome: Outcome) -> float:
    """Time that a run has taken up to this outcome, in all attempts that it consists of."""
    earlier: list[Outcome | None] = []
    if attempt.number > 1:
        try:
            earlier = [one.outcome() for one in attempt.lineage()[1:]]
        except StoreError:  # whoever reads the run itself gets the reason
            earlier = []
    return sum(one.ended_at - one.started_at for one in (outcome, *earlier) if one is not None)


def _is_launched(attempt: Attempt) -> bool:
    if not (attempt.path / "launch.json").exists():
        return False
    from harness.launchers.launch import Launch  # noqa: PLC0415  slow to load, and few cells are pending

    return Launch.read(attempt) is not None
