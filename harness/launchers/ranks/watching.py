"""Watches the ranks of an attempt, however they were started: deaths, time limits, requests to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from harness.launchers.launch import cancel_requested
from harness.runs.store import Attempt
from harness.runs.stored_files import parse_object, read_bytes

Reason = Literal["ranks", "timeout", "cancel", "preempt"]

_REPEAT_SECONDS = 1.0  # a rank that is still starting ignores the first request


@dataclass(frozen=True)
class Stop:
    """A request that the ranks end.

    Attributes:
        save: whether they may save a checkpoint first.
    """

    reason: Reason
    save: bool


def stop_request(
    attempt: Attempt, save_seconds: float, left_seconds: float, *, preempted: bool
) -> Stop | None:
    """Whether the attempt's ranks have to end, by its `cancel` file and the time that is left.

    Args:
        attempt: for its `cancel` file.
        save_seconds: how long before the time limit they are asked to save.
        left_seconds: until the time limit.
        preempted: whether the ranks must free their place for others.
    """
    request = cancel_requested(attempt)
    if request == "now":
        return Stop("cancel", save=False)
    if left_seconds < 0:
        return Stop("timeout", save=False)
    if request == "checkpoint":
        return Stop("cancel", save=True)
    if preempted:
        return Stop("preempt", save=True)
    if left_seconds < save_seconds:
        return Stop("timeout", save=True)
    return None


def watch_ranks(
    running: Callable[[], bool],
    request: Callable[[], Stop | None],
    request_checkpoint: Callable[[], None],
    wait: Callable[[], None],
    save_seconds: float,
) -> Reason:
    """Wait until the ranks have ended or have to be ended by the caller.

    Args:
        running: whether there is something to wait for.
        request: whether the ranks have to end; called before every `wait`.
        request_checkpoint: has the ranks save a checkpoint and end; called every second.
        wait: returns after a fraction of a second, or sooner if a rank ends.
        save_seconds: what the ranks get to save a checkpoint, where they may.

    Returns:
        Why the ranks had to end; "ranks" if there was no request.
    """
    reason: Reason = "ranks"
    save_ends, requested_at = float("inf"), float("-inf")
    while running():
        now = time.monotonic()
        stop = request()
        if stop is not None:
            reason = stop.reason
            save_ends = min(save_ends, now + save_seconds)
            if not stop.save or now > save_ends:
                break
            if now - requested_at > _REPEAT_SECONDS:
                request_checkpoint()
                requested_at = now
        wait()
    return reason


@dataclass(frozen=True)
class RankDeath:
    """The end of one rank.

    Attributes:
        exit_code: as of `subprocess`: minus the signal's number when killed by one.
        own: whether the rank ended by itself; false when its launcher ended it.
    """

    rank: int
    exit_code: int
    own: bool


@dataclass(frozen=True)
class RanksEnd:
    """Why the ranks ended, and all deaths in the order in which they were seen."""

    reason: Reason
    deaths: tuple[RankDeath, ...]


def end_lines(attempt: Attempt, rank: int) -> list[dict[str, Any]]:
    """Lines of the rank's end file, which `wrapper.py` writes: one from its start, one from its end."""
    try:
        text = read_bytes(path := attempt.path / f"rank-{rank:05}.end")
    except FileNotFoundError:
        return []
    return [parse_object(line, path) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
