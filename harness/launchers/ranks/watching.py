"""Runs the ranks of an attempt, however they are started: notices the first death, ends the rest.

`Ranks.run` is the only loop that waits for ranks. `LocalRanks`, `MpiexecRanks` and `SrunRanks` say how ranks
are started, what they died of and how they are ended; `outcome.py` says which death was the cause.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from harness.launchers.launch import Launch, cancel_requested
from harness.launchers.ranks.outcome import Reason, outcome_without_ranks
from harness.runs.attempt_outcome import Outcome
from harness.runs.store import Attempt
from harness.runs.stored_files import parse_object, read_bytes

TERM_SECONDS = 5.0
"""From SIGTERM, by which the ranks are ended, to SIGKILL."""

WATCH_SECONDS = 0.2
"""Between checks of the time limit and of requests to stop."""

_REPEAT_SECONDS = 1.0  # a rank that is still starting ignores the first request

Interruption = Literal["cancel", "preempt"]


@dataclass(frozen=True)
class Stop:
    """A request that the ranks end.

    Attributes:
        save: whether they may save a checkpoint first.
    """

    reason: Reason
    save: bool


class Ranks(ABC):
    """The ranks of one attempt.

    Args:
        attempt: its `begun.json` is written.
        launch: of the attempt.
        world_size: number of ranks.
    """

    def __init__(self, attempt: Attempt, launch: Launch, world_size: int) -> None:
        self.attempt, self.launch, self.world_size = attempt, launch, world_size

    def run(
        self, started_at: float, interruption: Callable[[], Interruption | None] = lambda: None
    ) -> Outcome:
        """Start the ranks and watch them to their end; at the first failure all others are ended.

        Args:
            started_at: Unix time, seconds.
            interruption: called a few times a second; why this process has to end, if it has to.

        Returns:
            The outcome, not written yet. Its cause names the rank that was lost first, and how.
        """
        limit_ends = time.monotonic() + self.launch.site.limit_minutes(self.world_size) * 60
        try:
            try:
                self.start()
                reason = self._watch(lambda: self._request(limit_ends, interruption()))
            finally:
                self.end()
        except OSError as error:
            return outcome_without_ranks("FAILED", f"the ranks could not be run: {error}", started_at)
        return self.outcome(reason, started_at)

    @abstractmethod
    def start(self) -> None:
        """Start every rank.

        Raises:
            OSError: a process could not be started.
        """

    @abstractmethod
    def running(self) -> bool:
        """Whether ranks run that are worth waiting for: false once all have ended, or one has failed."""

    @abstractmethod
    def wait(self) -> None:
        """Return after a fraction of a second, or sooner if a rank ends."""

    @abstractmethod
    def request_checkpoint(self) -> None:
        """Have the ranks save a checkpoint and end; called every second."""

    @abstractmethod
    def end(self) -> None:
        """End the ranks that still run, and all that they started, by SIGTERM and then by SIGKILL."""

    @abstractmethod
    def outcome(self, reason: Reason, started_at: float) -> Outcome:
        """The outcome of the attempt, whose ranks have all ended."""

    def _request(self, limit_ends: float, interruption: Interruption | None) -> Stop | None:
        """Whether the ranks have to end.

        An interruption ends them at once, unless the `cancel` file asks for a checkpoint first.
        """
        if interruption == "cancel" and cancel_requested(self.attempt) is None:
            return Stop("cancel", save=False)
        save_seconds = self.launch.site.save_seconds(self.world_size)
        left = limit_ends - time.monotonic()
        return stop_request(self.attempt, save_seconds, left, preempted=interruption is not None)

    def _watch(self, request: Callable[[], Stop | None]) -> Reason:
        """Wait until the ranks have ended or must be ended; why they had to, "ranks" if for no request."""
        reason: Reason = "ranks"
        save_seconds = self.launch.site.grace_seconds
        save_ends, requested_at = float("inf"), float("-inf")
        while self.running():
            now = time.monotonic()
            stop = request()
            if stop is not None:
                reason = stop.reason
                save_ends = min(save_ends, now + save_seconds)
                if not stop.save or now > save_ends:
                    break
                if now - requested_at > _REPEAT_SECONDS:
                    self.request_checkpoint()
                    requested_at = now
            self.wait()
        return reason


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


def end_lines(attempt: Attempt, rank: int) -> list[dict[str, Any]]:
    """Lines of the rank's end file, which `wrapper.py` writes: one from its start, one from its end."""
    try:
        text = read_bytes(path := attempt.path / f"rank-{rank:05}.end")
    except FileNotFoundError:
        return []
    return [parse_object(line, path) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
