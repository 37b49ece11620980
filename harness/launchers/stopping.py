"""Why ranks have to end before they are done, and whether they may save a checkpoint first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.launchers.launch import cancel_requested
from harness.launchers.site import Site
from harness.runs.store import Attempt

Reason = Literal["ranks", "timeout", "cancel", "preempt"]


@dataclass(frozen=True)
class Stop:
    """A wish that the ranks end.

    Attributes:
        save: whether they may save a checkpoint first.
    """

    reason: Reason
    save: bool


def stop_request(attempt: Attempt, site: Site, left_seconds: float, *, preempted: bool) -> Stop | None:
    """Whether the attempt's ranks have to end, by what was asked for and the time that is left.

    Args:
        attempt: for its `cancel` file.
        site: for its time limit and the grace before it.
        left_seconds: until the time limit.
        preempted: whether somebody wants the place back.
    """
    wish = cancel_requested(attempt)
    if wish == "now":
        return Stop("cancel", save=False)
    if left_seconds < 0:
        return Stop("timeout", save=False)
    if wish == "checkpoint":
        return Stop("cancel", save=True)
    if preempted:
        return Stop("preempt", save=True)
    if left_seconds < min(site.grace_seconds, site.timeout_minutes * 30):
        return Stop("timeout", save=True)
    return None
