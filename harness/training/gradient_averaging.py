"""Data parallelism: averages the gradients over ranks, during the backward pass or after it.

DistributedDataParallel hides what it can behind the backward pass, wherever torch.distributed connects the
ranks. Over MPI, which moves nothing outside of its calls, gradients are averaged in one all-reduce of a flat
buffer.
"""

# torch compares the hook's annotations with its own classes, so they must not be postponed into text here.

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but hidden from checkers
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from harness.cell import GradientAveraging
from harness.errors import TrainingError
from kfac_core.collectives import Communicator
from kfac_core.collectives.communicator import Wait

Loss = Callable[[nn.Module, Any], Tensor]
Waiting = Callable[[], AbstractContextManager[None]]
"""A context for the time that starting and awaiting collectives takes."""

AveragingMethod = Literal["none", "flat", "DistributedDataParallel"]


def averaging_method(averaging: GradientAveraging, world_size: int) -> AveragingMethod:
    """How such a run averages its gradients."""
    if world_size == 1:
        return "none"
    over_torch = dist.is_available() and dist.is_initialized()
    return "DistributedDataParallel" if averaging == "overlapped" and over_torch else "flat"


def build_average(
    averaging: GradientAveraging, model: nn.Module, communicator: Communicator, waiting: Waiting
) -> "FlatAverage | DDPAverage":
    """What averages the gradients of `model`; all ranks call it at the same time.

    Args:
        averaging: see `averaging_method`.
        model: equal on all ranks.
        communicator: carries the gradients, as it does K-FAC's traffic.
        waiting: a context for the part of the collectives that the backward pass does not hide.
    """
    if averaging_method(averaging, communicator.world_size) == "DistributedDataParallel":
        return DDPAverage(model, communicator, waiting)
    return FlatAverage(model, communicator)


class FlatAverage:
    """Makes every parameter's gradient a view of one buffer, and averages that after the backward pass.

    Averaging copies nothing and overlaps nothing. Its cost is then a phase of its own, the same for every
    method that is compared. A parameter without a gradient has zeros.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        parameters = _trained(model)
        sizes = [parameter.numel() for parameter in parameters]
        self._buffer = parameters[0].new_zeros(sum(sizes))
        for parameter, view in zip(parameters, self._buffer.split(sizes), strict=True):
            parameter.grad = view.view_as(parameter)

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        """The loss of the model itself."""
        return loss(self._model, batch)

    def clear(self) -> None:
        """Set all gradients to zero, in place."""
        self._buffer.zero_()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for the passes of all micro-batches but the last; before `average` nothing is sent."""
        return nullcontext()

    def average(self) -> None:
        """After a backward pass: replace each gradient by its mean over ranks."""
        if self._communicator.world_size > 1:
            self._communicator.all_reduce(self._buffer)
            self._buffer /= self._communicator.world_size


class DDPAverage:
    """torch's DistributedDataParallel: averages bucket after bucket while the backward pass goes on.

    Its communication hook sends the buckets over the communicator that carries K-FAC's traffic too, so that
    both take the same way and both are counted. Each bucket starts as soon as its gradients are there; the
    last one awaits them all.

    DistributedDataParallel sorts its buckets anew after the first backward pass of a process, by the order in
    which the gradients came. A resumed run would then add up its first step in another order than the
    run that was not interrupted. So that first pass is one over the bare parameters, here, which gives every
    start of a run the same buckets.
    """

    def __init__(self, model: nn.Module, communicator: Communicator, waiting: Waiting) -> None:
        self._communicator = communicator
        self._waiting: Waiting = nullcontext
        self._parameters = _trained(model)
        self._pending: list[tuple[Tensor, Wait, Future[Tensor]]] = []
        self._complete = False
        self._parallel = DistributedDataParallel(
            _Loss(model),
            init_sync=False,  # the caller has made the model equal
            gradient_as_bucket_view=True,
        )
        self._parallel.broadcast_buffers = False  # ranks keep their own running statistics, as with `flat`
        self._parallel.register_comm_hook(None, self._on_bucket)
        for _ in range(2):  # the second pass finds the order of the first, and sorts
            self._parallel(_sum_of_nothing, None).backward()
        self.clear()
        self._waiting = waiting

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        """The loss, computed inside of DistributedDataParallel."""
        result: Tensor = self._parallel(loss, batch)
        return result

    def clear(self) -> None:
        """Drop all gradients, as an optimizer's `zero_grad` does."""
        self._complete = False
        for parameter in self._parameters:
            parameter.grad = None

    def no_sync(self) -> AbstractContextManager[None]:
        """DistributedDataParallel's own."""
        context: AbstractContextManager[None] = self._parallel.no_sync()
        return context

    def average(self) -> None:
        """Nothing is left to do after the backward pass.

        Raises:
            TrainingError: a parameter got no gradient, for which the other ranks would wait.
        """
        if not self._complete:
            lacking = sum(parameter.grad is None for parameter in self._parameters)
            raise TrainingError(
                f"{lacking} of {len(self._parameters)} trained parameters got no gradient in this step, and "
                "DistributedDataParallel waits for all; use training.gradient_averaging: flat"
            )

    def _on_bucket(self, _: None, bucket: GradBucket) -> Future[Tensor]:
        """Start to average a bucket; with the last one, await all."""
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        with self._waiting():
            buffer /= self._communicator.world_size  # before the sum, as DistributedDataParallel does
            self._pending.append((buffer, self._communicator.all_reduce_async(buffer), future))
            if bucket.is_last():
                for summed, wait, done in self._pending:
                    wait()
                    done.set_result(summed)
                self._pending, self._complete = [], True
        return future


class _Loss(nn.Module):
    """The loss as a module, so that a workload may use its model as it likes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        return loss(self.model, batch)


def broadcast_model(model: nn.Module, communicator: Communicator) -> None:
    """Copy rank 0's parameters and buffers to every rank."""
    if communicator.world_size > 1:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                communicator.broadcast(tensor, 0)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _sum_of_nothing(model: nn.Module, _: Any) -> Tensor:
    """A loss of zero in which every parameter takes part, the last one first."""
    terms = [(parameter * 0).sum() for parameter in _trained(model)]
    return torch.stack([term.float() for term in terms]).sum()
