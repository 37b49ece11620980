"""Collectives over MPI, for CPU ranks, and for GPU ranks where the MPI library is CUDA-aware.

With DistributedDataParallel, a communication hook averages the gradients over MPI too:

communicator = MPICommunicator()
model.register_comm_hook(MPIGradients(communicator), average_over_mpi)
kfac = KFAC(model, config, lr=optimizer, communicator=communicator)
"""

# torch compares the hook's annotations with its own classes, so they must not be postponed into text here.

import ctypes
import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but hidden from checkers
from torch.futures import Future

from kfac_core.collectives.communicator import PendingCollective
from kfac_core.errors import ConfigError
from kfac_core.placement import Ranks
from kfac_core.timing import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

PEER_TIMEOUT_SECONDS = 300.0  # as the harness sets it for torch.distributed

# MPICH sums into scratch memory as large as the buffer. Beyond some MB the C library returns that memory to
# the system after every call, and the page faults cost as much as the sum. Pieces avoid that.
_PIECE_BYTES = 4 << 20

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # MPI cannot sum the narrow ones


class MPICommunicator:
    """A duplicated MPI communicator, with subgroups created on first use.

    MPI reads and writes the tensors in place, without a copy. Every call is one collective, however many
    parts it has; only large sums are made piece by piece. Moves are exact in every dtype. Sums of float64,
    float32 and integers are MPI's own; bfloat16 and float16 are summed in float32 and rounded once.

    Each collective is non-blocking and tested until it is complete, yielding the core in between. MPI's own
    wait never returns when a peer is lost, and spins on the core that a late peer may need.

    Args:
        base: the ranks that work together, duplicated here (a collective call); None is MPI's world.
        timeout_seconds: after this time in one collective a peer counts as lost.

    Raises:
        ImportError: mpi4py or an MPI library is missing.
    """

    in_background = False  # MPI makes no progress outside its calls

    def __init__(
        self, base: "MPI.Intracomm | None" = None, timeout_seconds: float = PEER_TIMEOUT_SECONDS
    ) -> None:
        from mpi4py import MPI  # noqa: PLC0415  # importing it starts MPI

        self._mpi = MPI
        self._all = (base if base is not None else MPI.COMM_WORLD).Dup()
        self.rank, self.world_size = self._all.rank, self._all.size
        self.traffic = Traffic()
        self._timeout_seconds = timeout_seconds
        self._groups: dict[Ranks, MPI.Intracomm] = {tuple(range(self.world_size)): self._all}
        self._summed = {
            torch.float64: MPI.DOUBLE, torch.float32: MPI.FLOAT, torch.int64: MPI.INT64_T,
            torch.int32: MPI.INT32_T, torch.uint8: MPI.UINT8_T,
        }  # fmt: skip
        self._moved = {
            1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX
        }  # fmt: skip

    def prepare(self, groups: Sequence[Ranks], like: Tensor) -> None:
        """Nothing: MPI creates a group among its members alone, on first use."""

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the world, in place."""
        self._count(buffer)
        wide = self._widened(buffer)
        for piece in _pieces(wide):
            self._wait([self._start_sum(piece)], "all_reduce", buffer)
        if wide is not buffer:
            buffer.copy_(wide)

    def all_reduce_async(self, buffer: Tensor) -> PendingCollective:
        """The same, run when it is waited for."""
        return PendingCollective(partial(self.all_reduce, buffer))

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> PendingCollective:
        """One reduce-scatter, run when it is waited for."""
        return PendingCollective(partial(self._reduce_parts, buffer, sizes))

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """One all-gather of uneven parts, in place."""
        own = buffer.split(list(sizes))[group.index(self.rank)]
        if own.numel():
            self._count(own)
        _synchronize(buffer)
        starts = [0, *accumulate(sizes)][:-1]
        message = [self._raw(buffer), (list(sizes), starts), self._moved[buffer.element_size()]]
        request = self._group(group).Iallgatherv(self._mpi.IN_PLACE, message)
        self._wait([request], "gather_parts", buffer)

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """One broadcast over the world."""
        if source == self.rank:
            self._count(buffer)
        _synchronize(buffer)
        message = [self._raw(buffer), self._moved[buffer.element_size()]]
        self._wait([self._all.Ibcast(message, source)], "broadcast", buffer)

    def duplicate(self) -> "MPICommunicator":
        """This communicator: collectives that run when waited for do not interleave."""
        return self

    def close(self) -> None:
        """Nothing was made for it."""

    def barrier(self, group: Ranks) -> None:
        """A barrier of the group."""
        self.wait_all([self._group(group).Ibarrier()], "barrier")

    def start_all_reduce(self, buffer: Tensor) -> tuple[Tensor, "list[MPI.Request]"]:
        """Start to sum `buffer` over the world.

        Returns:
            The tensor that will hold the sum and its requests. It is `buffer` itself, except for dtypes that
            are summed in float32; do not touch it before `wait_all` has returned.

        Raises:
            ConfigError: MPI has no sum for its dtype, or cannot reach its device.
        """
        self._count(buffer)
        wide = self._widened(buffer)
        return wide, [self._start_sum(piece) for piece in _pieces(wide)]

    def wait_all(self, requests: "Sequence[MPI.Request]", what: str) -> None:
        """Wait until all requests are complete.

        Raises:
            TimeoutError: they took longer than `timeout_seconds`.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while not self._mpi.Request.Testall(list(requests)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{what} over MPI: rank {self.rank} of {self.world_size} waited "
                    f"{self._timeout_seconds:g} s for its peers: one of them is lost, or is in another call"
                )
            os.sched_yield()

    def _start_sum(self, buffer: Tensor) -> "MPI.Request":
        _synchronize(buffer)
        message = [self._raw(buffer), self._sum_type(buffer)]
        return self._all.Iallreduce(self._mpi.IN_PLACE, message, op=self._mpi.SUM)

    def _reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> None:
        """One reduce-scatter; large parts piece by piece, one reduce-scatter per owner, all at once."""
        self._count(buffer)
        buffer.split(list(sizes))[self.rank].zero_()
        wide = self._widened(buffer)
        parts = wide.split(list(sizes))
        longest = _PIECE_BYTES // wide.element_size()
        if max(sizes) <= longest:
            self._reduce_scatter([(wide, list(sizes))], parts[self.rank], buffer)
        else:
            rounds = [part.split(longest) for part in parts]
            for turn in range(max(map(len, rounds))):
                pieces = [one[turn] if turn < len(one) else wide[:0] for one in rounds]
                sums = [(piece, _only(owner, piece, sizes)) for owner, piece in enumerate(pieces)]
                self._reduce_scatter(sums, pieces[self.rank], buffer)
        if wide is not buffer:
            buffer.split(list(sizes))[self.rank].copy_(parts[self.rank])

    def _reduce_scatter(self, sums: Sequence[tuple[Tensor, list[int]]], own: Tensor, whole: Tensor) -> None:
        """Sum each tensor, divided by its counts, over the world; this rank's part goes to `own`."""
        received = torch.empty_like(own)  # in place, MPI would write it to the start of the tensor
        _synchronize(whole)
        requests = []
        for tensor, counts in sums:
            mine = received if counts[self.rank] else received[:0]
            send, receive = ([self._raw(one), self._sum_type(one)] for one in (tensor, mine))
            requests.append(self._all.Ireduce_scatter(send, receive, counts, op=self._mpi.SUM))
        self._wait(requests, "reduce_parts", whole)
        own.copy_(received)

    def _wait(self, requests: "Sequence[MPI.Request]", what: str, buffer: Tensor) -> None:
        self.wait_all(requests, f"{what} of {buffer.numel()} x {buffer.dtype}")

    def _group(self, ranks: Ranks) -> "MPI.Intracomm":
        if ranks not in self._groups:
            # Only the members take part, so that rows and columns are all made at once.
            self._groups[ranks] = self._all.Create_group(self._all.group.Incl(list(ranks)))
        return self._groups[ranks]

    def _raw(self, buffer: Tensor) -> Any:
        """The tensor's memory as an MPI buffer.

        Raises:
            ConfigError: the tensor is not contiguous, or on a device that MPI cannot read.
        """
        if not buffer.is_contiguous():
            raise ConfigError(f"MPI moves contiguous tensors; got strides {buffer.stride()}")
        kind = buffer.device.type
        if kind != "cpu" and not (kind == "cuda" and is_cuda_aware()):
            raise ConfigError(
                f"MPI cannot carry tensors on {buffer.device}: {library_name()} is not CUDA-aware; allowed: "
                f"CPU tensors, or CUDA tensors with an MPI library built for CUDA; on GPUs use NCCL"
            )
        return self._mpi.buffer.fromaddress(buffer.data_ptr(), buffer.numel() * buffer.element_size())

    def _widened(self, buffer: Tensor) -> Tensor:
        return buffer.to(_WIDE[buffer.dtype]) if buffer.dtype in _WIDE else buffer

    def _sum_type(self, buffer: Tensor) -> "MPI.Datatype":
        if buffer.dtype not in self._summed:
            allowed = ", ".join(str(dtype) for dtype in (*self._summed, *_WIDE))
            raise ConfigError(f"MPI cannot sum a tensor of {buffer.dtype}; allowed: {allowed}")
        return self._summed[buffer.dtype]

    def _count(self, buffer: Tensor) -> None:
        self.traffic.calls += 1
        self.traffic.sent_bytes += buffer.numel() * buffer.element_size()


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


def is_cuda_aware() -> bool:
    """Whether the MPI library reports that it takes device pointers (an extension of MPICH and Open MPI)."""
    from mpi4py import MPI  # noqa: PLC0415  # importing it starts MPI

    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (AttributeError, OSError):
        return False
    query.restype = ctypes.c_int
    return bool(query())


def library_name() -> str:
    """Name and version of the MPI library, such as `MPICH 5.0.2`."""
    from mpi4py import MPI  # noqa: PLC0415  # importing it starts MPI

    first = MPI.Get_library_version().replace("\0", "").splitlines()[0]
    return " ".join(first.replace("Version:", "").split("(")[0].split()).rstrip(",")


def _pieces(buffer: Tensor) -> Sequence[Tensor]:
    if buffer.numel() * buffer.element_size() <= 2 * _PIECE_BYTES or not buffer.is_contiguous():
        return [buffer]
    pieces: Sequence[Tensor] = buffer.view(-1).split(2 * _PIECE_BYTES // buffer.element_size())
    return pieces


def _only(owner: int, piece: Tensor, sizes: Sequence[int]) -> list[int]:
    """Counts of a reduce-scatter that gives all of `piece` to its owner."""
    return [piece.numel() if rank == owner else 0 for rank in range(len(sizes))]


def _synchronize(buffer: Tensor) -> None:
    """Wait for the device's queued work: MPI, which does not know streams, reads its memory next."""
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()
