"""Counts collectives, FLOPs by phase and stored bytes of a real K-FAC step on one rank of a world.

In torch's fake process group every collective returns at once, so that one process is any of 4,096 ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harness.training.gradient_averaging import FlatAverage
from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.collectives import Communicator
from kfac_core.timing import PhaseTimer


@dataclass(frozen=True)
class Part:
    """A layer and the size of its input for one example."""

    module: nn.Module
    size: tuple[int, ...]


@dataclass(frozen=True)
class StepCount:
    """One step of one rank, by phase: collectives, payload bytes, FLOPs as torch counts them."""

    calls: dict[str, int]
    sent_bytes: dict[str, int]
    flops: dict[str, int]


@dataclass(frozen=True)
class Emulation:
    """The counts of one rank.

    Attributes:
        update: a step that updates factors and second-order data.
        plain: a step that does not.
        state_bytes: storage of K-FAC's tensors after both, by kind.
    """

    rank: int
    world_size: int
    update: StepCount
    plain: StepCount
    state_bytes: dict[str, int]


class ParallelLayers(nn.Module):
    """Layers in parallel, each with an input of its own: the same work for K-FAC as in a row.

    Args:
        other_parameters: trained parameters without K-FAC; their gradients are averaged too.
    """

    def __init__(self, parts: dict[str, Part], other_parameters: int, batch_size: int) -> None:
        super().__init__()
        self._sizes, self._batch_size = [part.size for part in parts.values()], batch_size
        self.layers = nn.ModuleDict({name: part.module for name, part in parts.items()})
        self.others = nn.Parameter(torch.zeros(other_parameters))

    def forward(self) -> Tensor:
        """A loss that depends on every parameter."""
        total = self.others.sum()
        for size, layer in zip(self._sizes, self.layers.values(), strict=True):
            total = total + layer(torch.zeros(self._batch_size, *size)).square().sum()
        return total


def count(model: nn.Module, config: KFACConfig, communicator: Communicator) -> Emulation:
    """Count a step with updates and one without; the model is called without arguments."""
    config = replace(config, factor_update_steps=2, inverse_update_steps=2)
    meter = _FlopMeter()
    timer = PhaseTimer(observer=meter.enter, traffic=communicator.traffic)
    gradients = FlatAverage(model, communicator)
    kfac = KFAC(model, config, lr=0.1, timer=timer, communicator=communicator)
    steps = []
    for _ in range(2):
        with meter.counting():
            timer.start()
            with timer.phase(Phase.FORWARD):
                loss = model()
            with timer.phase(Phase.BACKWARD):
                loss.backward()
            with timer.phase(Phase.GRADIENT_COMM):
                gradients.average()
            kfac.step()
            timer.stop()
        totals = timer.drain()
        calls = {phase: count for phase, count in totals.calls.items() if phase.endswith("_comm")}
        steps.append(StepCount(calls, totals.sent_bytes, meter.drain()))
    state = {
        "factors": storage_bytes(kfac._factors.running.values()),
        "second_order": storage_bytes(kfac._second_order.data.values()),
        "gradients": storage_bytes([kfac._gradients._raw, kfac._gradients._preconditioned]),
    }
    kfac.remove()
    return Emulation(communicator.rank, communicator.world_size, steps[0], steps[1], state)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages; views of one buffer count once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class _FlopMeter:
    """Books torch's FLOP count on the open phase."""

    def __init__(self) -> None:
        self._counter: FlopCounterMode | None = None
        self._open, self._booked = "other", 0
        self._flops: dict[str, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        with FlopCounterMode(display=False) as self._counter:
            self._booked = 0
            yield
            self.enter("other")

    def enter(self, phase: str) -> None:
        """Book the FLOPs since the last change on the phase that ends now."""
        if self._counter is None:
            return
        total = self._counter.get_total_flops()
        if total > self._booked:
            self._flops[self._open] = self._flops.get(self._open, 0) + total - self._booked
        self._open, self._booked = phase, total

    def drain(self) -> dict[str, int]:
        flops, self._flops = self._flops, {}
        return flops
