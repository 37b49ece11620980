"""A DistributedDataParallel communication hook that averages gradients over MPI.

communicator = MPICommunicator()
model.register_comm_hook(MPIGradients(communicator), average_over_mpi)
kfac = KFAC(model, config, lr=optimizer, communicator=communicator)
"""

# torch compares the hook's annotations with its own classes, so they must not be postponed into text here.

from typing import Any

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but hidden from checkers
from torch.futures import Future

from kfac_core.collectives.mpi import MPICommunicator


class MPIGradients:
    """State of the hook: the pending sums of the buckets so far.

    Args:
        communicator: counts the buckets in its traffic; may be K-FAC's own.
    """

    def __init__(self, communicator: MPICommunicator) -> None:
        self.communicator = communicator
        self._started: list[tuple[Tensor, Tensor, Future[Tensor]]] = []
        self._requests: list[Any] = []  # mpi4py's, which is imported only with a communicator

    def add(self, buffer: Tensor) -> Future[Tensor]:
        """Start to average a bucket, in place."""
        buffer /= self.communicator.world_size  # before the sum, as in DDP: half precision overflows later
        summed, requests = self.communicator.start_all_reduce(buffer)
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._started.append((buffer, summed, future))
        self._requests += requests
        return future

    def finish(self) -> None:
        """Wait for all buckets."""
        self.communicator.wait_all(self._requests, f"average of {len(self._started)} gradient buckets")
        for buffer, summed, future in self._started:
            future.set_result(buffer if summed is buffer else buffer.copy_(summed))
        self._started, self._requests = [], []


def average_over_mpi(state: MPIGradients, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients over the ranks, for `DistributedDataParallel.register_comm_hook`.

    Every bucket's sum starts when its gradients are ready, and all are waited for after the last bucket. They
    overlap with the backward pass as far as the MPI library makes progress by itself.

    Raises:
        TimeoutError: a rank is lost.
        ConfigError: MPI cannot sum the gradients' dtype or reach their device.
    """
    future = state.add(bucket.buffer())
    if bucket.is_last():
        state.finish()
    return future
