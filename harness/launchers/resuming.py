"""Continues a run that has met its time limit: decides whether, and makes the next attempt."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from harness.errors import StoreError
from harness.launchers.cost import StartBudget
from harness.launchers.launch import Launch, cancel_requested
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.runs.attempt_outcome import Outcome
from harness.runs.checkpoint_store import CheckpointStore, kept_step
from harness.runs.records import SegmentRecord
from harness.runs.store import Attempt


def continued(
    attempt: Attempt, launch: Launch, outcome: Outcome, budget: StartBudget
) -> tuple[Outcome, Attempt | None]:
    """The outcome of an attempt, and the next attempt if it has met its time limit and may be continued.

    The next attempt is pending and has to be started by the caller. It is made before the outcome is written,
    so that the run is never seen to have ended in between.

    Args:
        attempt: whose ranks have all ended.
        launch: of the attempt.
        outcome: not written yet.
        budget: of the job or run.

    Returns:
        The outcome with what follows, or why nothing does, in its cause.
    """
    most = launch.site.max_continuations
    if outcome.state != "TIMEOUT" or not most or cancel_requested(attempt) is not None:
        return outcome, None
    why = ""
    following = None
    try:
        first_step = _first_step(attempt)
        progressed = outcome.checkpoint_step is not None and outcome.checkpoint_step > first_step
        if launch.continuation >= most:
            why = f"max_continuations={most} of site {launch.site.name} is reached"
        elif not (progressed or launch.progressed):
            why = f"two attempts in a row saved no checkpoint after step {first_step}"
        why = why or budget.grant_next()
        if not why:
            following = _next_attempt(attempt, _next_launch(attempt, launch, progressed))
    except (OSError, StoreError) as error:
        why = f"the next attempt could not be prepared: {error}"
    what = f"not continued: {why}" if following is None else f"continued by attempt {following.number}"
    return replace(outcome, cause=f"{outcome.cause}; {what}"), following


def not_started(attempt: Attempt, why: str) -> Outcome:
    """The outcome of an attempt that `continued` has made and that could not be started."""
    return outcome_without_ranks("TIMEOUT", f"not continued: {why}", checkpoint_step=kept_step(attempt))


def _first_step(attempt: Attempt) -> int:
    segment = attempt.read_as(SegmentRecord, "segment.json")
    return segment.first_step if segment is not None else 0


def _next_launch(attempt: Attempt, launch: Launch, progressed: bool) -> Launch:
    continues = attempt.number if CheckpointStore(attempt).newest_first() else launch.continues
    update = {"continues": continues, "continuation": launch.continuation + 1, "progressed": progressed}
    return launch.model_copy(update={**update, "job_id": None})


def _next_attempt(attempt: Attempt, launch: Launch) -> Attempt:
    """A pending attempt at the cell of `attempt`.

    Raises:
        OSError: the disk is full, for example; there is no such attempt then.
    """
    following = attempt.cell_folder.new_attempt()
    try:
        launch.prepare(following)
    except OSError:
        Launch.withdraw(following)
        for path in (following.path / "logs", following.path):
            with suppress(OSError):
                path.rmdir()
        raise
    Launch.publish(following)
    return following
