"""Checkpoints: all ranks agree on a step, save all or nothing, and resume bit for bit."""

from harness.training.checkpoint.checkpoints import Checkpoints, Schedule

__all__ = ["Checkpoints", "Schedule"]
