"""The next attempt of a run, which resumes from the newest checkpoint of the attempts before it.

| what ended the attempt | who makes the next one |
|---|---|
| its time limit, on a site with `max_continuations` | its supervisor, by `continued` |
| Slurm, which requeued its job after a preemption or a lost node | the job's next start, by `resumed` |
| anything else | the user by `retry`, from `continued_attempts` (`harness.study.start_cells`) |

`continues` in `launch.json` names the attempt whose checkpoints are read, and `Attempt.lineage` follows the
names back to the first attempt. `resumable` of `harness.runs.checkpoint_store` lists the checkpoints,
`harness.training.checkpoint` chooses one (`parts.load_newest`) and restores it (`Checkpoints.restore`).
`refuse_change` refuses to continue a run at another site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from harness.cell import Cell
from harness.errors import SiteError, StoreError
from harness.launchers.cost import StartBudget
from harness.launchers.launch import Launch, RanksStarted, cancel_requested
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.launchers.site_profile import Site
from harness.runs.attempt_outcome import Outcome
from harness.runs.checkpoint_store import CheckpointStore, kept_step
from harness.runs.records import SegmentRecord
from harness.runs.run_place import RunPlace
from harness.runs.store import Attempt, SweepFolder


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
    following = None
    try:
        segment = attempt.read_as(SegmentRecord, "segment.json")
        first_step = segment.first_step if segment is not None else 0
        progressed = outcome.checkpoint_step is not None and outcome.checkpoint_step > first_step
        if launch.continuation >= most:
            why = f"max_continuations={most} of site {launch.site.name} is reached"
        elif not (progressed or launch.progressed):
            why = f"two attempts in a row saved no checkpoint after step {first_step}"
        else:
            why = budget.grant_next()
        if not why:
            update = {"continuation": launch.continuation + 1, "progressed": progressed}
            following = _next_attempt(attempt, launch.model_copy(update=update))
    except (OSError, StoreError) as error:
        why = f"the next attempt could not be prepared: {error}"
    what = f"not continued: {why}" if following is None else f"continued by attempt {following.number}"
    return replace(outcome, cause=f"{outcome.cause}; {what}"), following


def not_started(attempt: Attempt, why: str) -> Outcome:
    """The outcome of an attempt that `continued` has made and that could not be started."""
    return outcome_without_ranks("TIMEOUT", f"not continued: {why}", checkpoint_step=kept_step(attempt))


def resumed(interrupted: Attempt) -> Attempt | None:
    """The pending attempt that follows one whose job was started again; None if that was cancelled.

    Writes the outcome of the interrupted attempt, which its own supervisor could not.

    Raises:
        OSError: the disk is full, for example; there is no next attempt then.
    """
    started = RanksStarted.read(interrupted)
    started_at = started.started_at if started is not None else None
    step = kept_step(interrupted)
    if cancel_requested(interrupted) is not None:
        cause = "cancelled before its job was started again"
        interrupted.write_outcome(outcome_without_ranks("CANCELLED", cause, started_at, checkpoint_step=step))
        return None
    launch = Launch.read(interrupted)
    if launch is None:
        return None
    following = _next_attempt(interrupted, launch)
    cause = f"Slurm requeued its job and started it again; resumed by attempt {following.number}"
    outcome = outcome_without_ranks("PREEMPTED", cause, started_at)
    interrupted.write_outcome(replace(outcome, checkpoint_step=step))
    return following


def continued_attempts(cells: Sequence[Cell], folder: SweepFolder) -> dict[str, Attempt]:
    """The attempt from whose checkpoints a retry would resume, by cell id, where there is one."""
    newest = {}
    for cell in cells:
        for attempt in reversed(folder.cell_folder(cell).attempts()):
            if CheckpointStore(attempt).newest_first():
                newest[cell.id] = attempt
                break
    return newest


def refuse_change(continued: Mapping[str, Attempt], site: Site) -> None:
    """Refuse to continue a run elsewhere: its clock would add up the times of two machines.

    Raises:
        SiteError: a run would change its site, launcher or kind of node.
    """
    planned = RunPlace.planned(site.model_dump(mode="json"))
    for cell_id, attempt in continued.items():
        changes = RunPlace.of_attempt(attempt).changes(planned)
        if changes:
            raise SiteError(
                f"{cell_id} would continue attempt {attempt.number} elsewhere: {'; '.join(changes)}. "
                "Its times would be of two machines: give the earlier --site, start from the beginning with "
                "--fresh, or allow it with --change-site, which the report marks; nothing was submitted"
            )


def discard(attempt: Attempt) -> None:
    """Undo an attempt that nothing has started; if another process has written there meanwhile, it stays."""
    Launch.withdraw(attempt)
    for path in (attempt.path / "logs", attempt.path):
        with suppress(OSError):
            path.rmdir()


def _next_attempt(attempt: Attempt, launch: Launch) -> Attempt:
    """A pending attempt at the same cell, which resumes from `attempt` or from what that resumed from.

    Raises:
        OSError: the disk is full, for example; there is no such attempt then.
    """
    continues = attempt.number if CheckpointStore(attempt).newest_first() else launch.continues
    following = attempt.cell_folder.new_attempt()
    try:
        launch.model_copy(update={"continues": continues}).prepare(following)
    except OSError:
        discard(following)
        raise
    Launch.publish(following)
    return following
