"""Data parallelism: averages the gradients over ranks, during the backward pass or after it."""

# torch compares the hook's annotations with its own classes, so they must not be postponed into text here.

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

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
from kfac_core.collectives.mpi import MPICommunicator

Loss = Callable[[nn.Module, Any], Tensor]
Waiting = Callable[[], AbstractContextManager[None]]
"""A context for the time that starting and awaiting collectives takes."""

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DistributedDataParallel's own

AveragingMethod = Literal["none", "flat", "DistributedDataParallel", "hooks"]


class GradientAverage(Protocol):
    """Averages gradients over ranks."""

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        """The loss of a batch, whose backward pass makes the gradients."""
        ...

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for the passes of all micro-batches but the last, whose gradients only add up here."""
        ...

    def average(self) -> None:
        """After a backward pass: return when every gradient is its mean over ranks."""
        ...


def averaging_method(averaging: GradientAveraging, world_size: int) -> AveragingMethod:
    """How such a run averages its gradients.

    `overlapped` is DistributedDataParallel or, where only MPI connects the ranks, hooks of this project.
    """
    if world_size == 1:
        return "none"
    if averaging == "flat":
        return "flat"
    return "DistributedDataParallel" if dist.is_available() and dist.is_initialized() else "hooks"


def build_average(
    averaging: GradientAveraging, model: nn.Module, communicator: Communicator, waiting: Waiting
) -> GradientAverage:
    """What averages the gradients of `model`; all ranks call it at the same time.

    Args:
        averaging: see `averaging_method`.
        model: equal on all ranks.
        communicator: carries the gradients, as it does K-FAC's traffic.
        waiting: a context for the part of the collectives that the backward pass does not hide.
    """
    method = averaging_method(averaging, communicator.world_size)
    if method == "DistributedDataParallel":
        return DDPAverage(model, communicator, waiting)
    if method == "hooks":
        return BucketAverage(model, communicator, waiting)
    return FlatAverage(model, communicator)


class FlatAverage:
    """Makes every parameter's gradient a view of one buffer, and averages that after the backward pass.

    Averaging copies nothing and overlaps nothing. Its cost is then a phase of its own, the same for every
    method that is compared.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        self._buffer = _flat_gradients(_trained(model))

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        """The loss of the model itself."""
        return loss(self._model, batch)

    def clear(self) -> None:
        """Set all gradients to zero, in place."""
        self._buffer.zero_()

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is sent before `average` anyway."""
        return nullcontext()

    def average(self) -> None:
        """Replace each gradient by its mean over ranks."""
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


class BucketAverage:
    """The same with hooks of this project's own, for backends that torch.distributed has not: MPI.

    Gradients are views of one buffer, in reverse order, in which buckets are adjacent. A bucket starts when
    its gradients and all buckets before it are there, so that all ranks start them in one order.
    """

    def __init__(self, model: nn.Module, communicator: Communicator, waiting: Waiting) -> None:
        self._model, self._communicator, self._waiting = model, communicator, waiting
        parameters = _trained(model)[::-1]
        self._buffer = _flat_gradients(parameters)
        members = _bucket_sizes([p.numel() * p.element_size() for p in parameters])
        numbers = [number for number, count in enumerate(members) for _ in range(count)]
        elements = [0] * len(members)
        for number, parameter in zip(numbers, parameters, strict=True):
            elements[number] += parameter.numel()
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, number))
        self._buckets, self._members = self._buffer.split(elements), members
        self._missing = list(members)
        self._pending: list[Wait] = []
        self._sends = True

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        """The loss of the model itself."""
        return loss(self._model, batch)

    def clear(self) -> None:
        """Set all gradients to zero, in place."""
        self._buffer.zero_()
        self._missing = list(self._members)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are not counted as complete."""
        self._sends = False
        try:
            yield
        finally:
            self._sends = True

    def average(self) -> None:
        """Start the buckets that lack a gradient, and await all; what has no gradient has zeros."""
        self._start(complete_only=False)
        for wait in self._pending:
            wait()
        self._pending = []
        self._buffer /= self._communicator.world_size

    def _on_gradient(self, number: int, _: Tensor) -> None:
        if not self._sends:
            return
        self._missing[number] -= 1
        if number == len(self._pending) and not self._missing[number]:
            with self._waiting():
                self._start(complete_only=True)

    def _start(self, *, complete_only: bool) -> None:
        for number in range(len(self._pending), len(self._buckets)):
            if complete_only and self._missing[number]:
                return
            self._pending.append(_started(self._communicator, self._buckets[number]))


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


def _flat_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One buffer with the gradients of all, in this order."""
    sizes = [parameter.numel() for parameter in parameters]
    buffer = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, view in zip(parameters, buffer.split(sizes), strict=True):
        parameter.grad = view.view_as(parameter)
    return buffer


def _bucket_sizes(sizes: Sequence[int]) -> list[int]:
    """How many consecutive gradients, of these bytes, make each bucket; the first bucket is small."""
    counts, filled, limit = [0], 0, FIRST_BUCKET_BYTES
    for size in sizes:
        if filled >= limit:
            counts, filled, limit = [*counts, 0], 0, BUCKET_BYTES
        counts[-1] += 1
        filled += size
    return counts


def _started(communicator: Communicator, buffer: Tensor) -> Wait:
    """Start to sum a bucket; MPI's own collective would start when it is waited for."""
    if not isinstance(communicator, MPICommunicator):
        return communicator.all_reduce_async(buffer)
    summed, requests = communicator.start_all_reduce(buffer)

    def wait() -> None:
        communicator.wait_all(requests, f"average of {buffer.numel()} gradients")
        if summed is not buffer:
            buffer.copy_(summed)

    return wait


def _sum_of_nothing(model: nn.Module, _: Any) -> Tensor:
    """A loss of zero in which every parameter takes part, the last one first."""
    terms = [(parameter * 0).sum() for parameter in _trained(model)]
    return torch.stack([term.float() for term in terms]).sum()
