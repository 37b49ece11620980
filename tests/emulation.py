"""Emulates one rank of a world of any size: the real K-FAC step on tensors without values.

torch's fake process group completes every collective at once, and fake tensors have shapes and sizes but no
values, so that rank 1,000 of 4,096 with ResNet-152 takes seconds on a laptop. Counted are calls and bytes of
every collective, FLOPs of every phase, and bytes of every stored tensor of the real code.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from harness.training.gradient_averaging import FlatAverage
from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.collectives import Communicator, connect
from kfac_core.timing import PhaseTimer
from tests.kfac_core.worlds import fake_world


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


def emulate(
    parts: Callable[[], dict[str, Part]],
    other_parameters: int,
    config: KFACConfig,
    world_size: int,
    ranks: Iterable[int],
    batch_size: int = 1,
) -> Iterator[Emulation]:
    """Count a step with updates and one without on each of `ranks`."""
    for rank in ranks:
        with fake_world(world_size, rank), FakeTensorMode(), _ConstantScalars():  # type: ignore[no-untyped-call]  # torch's own
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about values that do not exist, such as skipped updates
                emulation = count(ParallelLayers(parts(), other_parameters, batch_size), config, connect())
            yield emulation


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


class _ConstantScalars(TorchDispatchMode):
    """Gives fake tensors scalar values: every condition is true, every number is one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


class _FlopMeter:
    """Books torch's FLOP count on the open phase."""

    def __init__(self) -> None:
        self._counter: FlopCounterMode | None = None
        self._open, self._booked = "other", 0
        self._flops: dict[str, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        with FlopCounterMode(display=False, custom_mapping=_DECOMPOSITIONS) as self._counter:
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


def _cubic(factor: float) -> Callable[..., int]:
    """FLOPs of a decomposition of `[..., n, n]`: `factor` n^3 for each matrix."""

    def count(shape: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(factor * math.prod(shape[:-2]) * shape[-1] ** 3)

    return count


# torch counts products only. Golub & Van Loan, "Matrix Computations", sections 4.2 and 8.3: a symmetric
# eigenproblem with vectors takes about 9 n^3, Cholesky n^3 / 3, the inverse from it 2 n^3 / 3.
_DECOMPOSITIONS = {
    torch.ops.aten._linalg_eigh: _cubic(9.0),
    torch.ops.aten.linalg_cholesky_ex: _cubic(1 / 3),
    torch.ops.aten.cholesky_inverse: _cubic(2 / 3),
}
