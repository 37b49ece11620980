"""The state of one rank's training between two steps: everything that a checkpoint saves and restores."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kfac_core import KFAC
from kfac_core.timing import PhaseTimer, WindowTotals


@dataclass
class TrainingState:
    """What is trained, and how far.

    Attributes:
        loss_sum: [], on the rank's device: losses of this rank since the last evaluation.
        loss_steps: steps in `loss_sum`.
        step: the next step, counted from 0.
        learning_rate: of the last step.
        window_start: first step of the open window.
        window: totals of the open window up to the last checkpoint; the phase timer has the remainder.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    kfac: KFAC | None
    clocks: RunClocks
    loss_sum: Tensor
    loss_steps: int = 0
    step: int = 0
    learning_rate: float = 0.0
    window_start: int = 0
    window: WindowTotals = field(default_factory=lambda: WindowTotals(0.0))


class RunClocks:
    """Seconds of training, evaluation, checkpoints and wall so far, on this rank, summed over all segments.

    The time between two segments of a resumed run is on none of them.

    Args:
        timer: measures the training of the present segment.

    Attributes:
        eval_seconds: spent in evaluations.
        checkpoint_seconds: spent saving checkpoints.
    """

    def __init__(self, timer: PhaseTimer) -> None:
        self.eval_seconds = self.checkpoint_seconds = 0.0
        self._timer = timer
        self._earlier_train_seconds = self._earlier_wall_seconds = 0.0
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Start the wall clock: this segment requests its first batch now."""
        self._began = time.perf_counter()

    @property
    def train_seconds(self) -> float:
        """The train clock; read it while the phase timer is stopped."""
        return self._earlier_train_seconds + self._timer.elapsed_seconds

    @property
    def wall_seconds(self) -> float:
        """Since the first batch was requested, without the time between segments."""
        return self._earlier_wall_seconds + time.perf_counter() - self._began

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Book the time of the block on the checkpoint clock."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.checkpoint_seconds += time.perf_counter() - began

    def state(self) -> dict[str, float]:
        """All clocks, as a checkpoint stores them."""
        return {
            "train_seconds": self.train_seconds,
            "eval_seconds": self.eval_seconds,
            "checkpoint_seconds": self.checkpoint_seconds,
            "earlier_wall_seconds": self.wall_seconds,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` returned in an earlier segment."""
        self._earlier_train_seconds = state["train_seconds"]
        self.eval_seconds = state["eval_seconds"]
        self.checkpoint_seconds = state["checkpoint_seconds"]
        self._earlier_wall_seconds = state["earlier_wall_seconds"]
