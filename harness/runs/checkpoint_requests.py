"""Requests for a checkpoint, by the signals that schedulers and launchers send to ranks."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved, to be resumed

_ALWAYS = (signal.SIGUSR1, signal.SIGUSR2)  # sent before a time limit by submitit and most sites


@dataclass(frozen=True)
class Request:
    """A request for a checkpoint.

    Attributes:
        reason: `interval`, or the name of the signal.
        stops: whether the run ends after it.
    """

    reason: str
    stops: bool


class SignalRequests:
    """Turns a signal into a request to save and stop; only for the main thread of a rank.

    Inside a Slurm job SIGTERM is such a request, because preemption sends it and sends SIGKILL only after the
    partition's grace time. Elsewhere launchers send SIGTERM to end a rank at once.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        numbers = (*_ALWAYS, signal.SIGTERM) if "SLURM_JOB_ID" in os.environ else _ALWAYS
        for number in numbers:
            signal.signal(number, self._on_signal)

    def __call__(self) -> Request | None:
        """The request received so far, if any."""
        number = self._number
        return None if number is None else Request(signal.Signals(number).name, stops=True)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._number = (
            number  # nothing else: a handler that takes a lock could wait for the code that it interrupts
        )
