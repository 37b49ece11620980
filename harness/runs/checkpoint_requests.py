"""Who may ask a rank for a checkpoint: signals, as schedulers and launchers send them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved, and to be started again

_ALWAYS = (signal.SIGUSR1, signal.SIGUSR2)  # submitit's and most sites' choice, before a time limit


@dataclass(frozen=True)
class Request:
    """Why a checkpoint is wanted.

    Attributes:
        reason: `interval`, or the name of the signal.
        stops: whether the run is to end after it.
    """

    reason: str
    stops: bool


class SignalRequests:
    """Turns a signal into a request to save and stop; only for the main thread of a rank.

    Inside a Slurm job SIGTERM asks too: preemption sends it first, and SIGKILL after the partition's grace.
    Elsewhere SIGTERM ends a rank at once, as its launcher means it to.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        numbers = (*_ALWAYS, signal.SIGTERM) if "SLURM_JOB_ID" in os.environ else _ALWAYS
        for number in numbers:
            signal.signal(number, self._on_signal)

    def __call__(self) -> Request | None:
        """The request made so far, if any."""
        number = self._number
        return None if number is None else Request(signal.Signals(number).name, stops=True)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._number = number  # nothing else: a handler that takes a lock can wait for the code it interrupts
