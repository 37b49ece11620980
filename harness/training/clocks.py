"""A rank's clocks beside the phase timer's: they add up over a run's segments and stand still between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clocks:
    """Seconds so far, on this rank.

    Attributes:
        train_seconds: train clock of the segments before this one; the phase timer has the rest.
        eval_seconds: in evaluations, over all segments.
        checkpoint_seconds: saving checkpoints, over all segments.
        earlier_wall_seconds: wall of the segments before this one.
    """

    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    earlier_wall_seconds: float = 0.0
    _began: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        """This segment asks for its first batch now."""
        self._began = time.perf_counter()

    @property
    def wall_seconds(self) -> float:
        """Since the first batch was asked for, without the time between segments."""
        return self.earlier_wall_seconds + time.perf_counter() - self._began

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """The time of the block goes on the checkpoints' clock."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.checkpoint_seconds += time.perf_counter() - began
