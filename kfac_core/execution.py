"""How the work of a step is issued to its device."""

from __future__ import annotations

from enum import StrEnum

import torch


class Execution(StrEnum):
    """One operation after another, or many alike at once.

    On a CPU an operation costs its memory traffic: factors and layers are worked on one by one, in place,
    while they are in cache, and a number is read where it is needed. On a GPU an operation costs a launch,
    and reading a number makes the host wait for the device: factors and layers of one shape are worked on
    together, and what depends on data is decided on the device.
    """

    SEQUENTIAL = "sequential"
    BATCHED = "batched"

    @classmethod
    def on(cls, device: torch.device) -> Execution:
        """The faster one for a device."""
        return cls.SEQUENTIAL if device.type == "cpu" else cls.BATCHED
