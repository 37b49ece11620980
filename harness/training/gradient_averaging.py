"""Data parallelism: one flat gradient buffer, averaged over ranks in one collective."""

from __future__ import annotations

import torch
from torch import nn

from kfac_core.collectives import Communicator


class GradientAverage:
    """Makes every parameter's gradient a view of one buffer, so that averaging copies nothing.

    The collective runs after the backward pass and does not overlap it. Its cost is then a phase of its own,
    the same for every method that is compared.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        like = self._parameters[0]
        self._buffer = torch.zeros(
            sum(p.numel() for p in self._parameters), dtype=like.dtype, device=like.device
        )
        views = self._buffer.split([p.numel() for p in self._parameters])
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)

    def clear(self) -> None:
        """Set all gradients to zero, in place."""
        self._buffer.zero_()

    def average(self) -> None:
        """Replace each gradient by its mean over ranks."""
        if self._communicator.world_size > 1:
            self._communicator.all_reduce(self._buffer)
            self._buffer /= self._communicator.world_size


def broadcast_model(model: nn.Module, communicator: Communicator) -> None:
    """Copy rank 0's parameters and buffers to every rank."""
    if communicator.world_size > 1:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                communicator.broadcast(tensor, 0)
