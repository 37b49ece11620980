"""The state of one rank's training between two steps: everything that a checkpoint saves and restores."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from harness.training.measurement.clocks import RunClocks
from kfac_core import KFAC
from kfac_core.timing import WindowTotals


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
