"""What launchers report about attempts, asked no more often than a scheduler's owner accepts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from harness.errors import StoreError
from harness.launchers import LAUNCHERS
from harness.launchers.attempt_state import AttemptState
from harness.runs.attempt_outcome import State
from harness.runs.run_place import LaunchFacts
from harness.runs.store import Attempt

_FIRST_PAUSE_SECONDS = 2.0  # a job that is refused, or a node that is down, shows itself soon
_GROWTH = 1.5


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
