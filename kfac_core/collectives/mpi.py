"""Collectives over MPI: the data plane of CPU ranks, and of GPU ranks where the MPI library is CUDA-aware."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfac_core.errors import ConfigError
from kfac_core.placement import Ranks
from kfac_core.timer import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

PEER_TIMEOUT_SECONDS = 300.0  # torch.distributed waits as long for a lost peer in the harness

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # MPI has no sum for them


class MPICommunicator:
    """An MPI communicator of its own, with subgroups made on first use.

    Tensors are handed to MPI where they lie: no copy is made of what is moved, and every exchange is one
    collective, however many parts it has. Moves are exact in every dtype. Sums of float64, float32 and
    integers are MPI's own; bfloat16 and float16 are summed in float32 and rounded once.

    Each collective is started without blocking and tested until it is complete, giving way to other
    processes meanwhile: MPI's own wait has no end when a peer is lost, and spins on the core that a late
    peer may need.

    Args:
        base: the ranks that work together, duplicated here (a collective call); None is MPI's world.
        timeout_seconds: a collective that takes longer has lost a peer.

    Raises:
        ImportError: mpi4py or an MPI library is missing.
    """

    def __init__(
        self, base: MPI.Intracomm | None = None, timeout_seconds: float = PEER_TIMEOUT_SECONDS
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

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the world, in place."""
        summed, request = self.start_all_reduce(buffer)
        self._finish(request, "all_reduce", buffer)
        if summed is not buffer:
            buffer.copy_(summed)

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> None:
        """One reduce-scatter; this rank's part of the sum is written into its part of `buffer`."""
        self._count(buffer)
        wide = self._widened(buffer)
        own = wide.new_empty(sizes[self.rank])  # MPI leaves it at the start of a buffer reduced in place
        _ready(wide)
        datatype = self._sum_type(wide)
        request = self._all.Ireduce_scatter(
            [self._raw(wide), datatype], [self._raw(own), datatype], list(sizes), op=self._mpi.SUM
        )
        self._finish(request, "reduce_parts", buffer)
        buffer.split(list(sizes))[self.rank].copy_(own)

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """One all-gather of uneven parts, in place."""
        own = buffer.split(list(sizes))[group.index(self.rank)]
        if own.numel():
            self._count(own)
        _ready(buffer)
        starts = [0, *accumulate(sizes)][:-1]
        message = [self._raw(buffer), (list(sizes), starts), self._moved[buffer.element_size()]]
        request = self._group(group).Iallgatherv(self._mpi.IN_PLACE, message)
        self._finish(request, "gather_parts", buffer)

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """One broadcast over the world."""
        if source == self.rank:
            self._count(buffer)
        _ready(buffer)
        message = [self._raw(buffer), self._moved[buffer.element_size()]]
        self._finish(self._all.Ibcast(message, source), "broadcast", buffer)

    def start_all_reduce(self, buffer: Tensor) -> tuple[Tensor, MPI.Request]:
        """Begin to sum `buffer` over the world.

        Returns:
            Where the sum will be, `buffer` itself but for dtypes that are summed in float32, not to be
            touched before `finish_all` has waited for the request beside it.

        Raises:
            ConfigError: MPI has no sum for its dtype, or cannot reach its device.
        """
        self._count(buffer)
        wide = self._widened(buffer)
        _ready(wide)
        message = [self._raw(wide), self._sum_type(wide)]
        return wide, self._all.Iallreduce(self._mpi.IN_PLACE, message, op=self._mpi.SUM)

    def finish_all(self, requests: Sequence[MPI.Request], what: str) -> None:
        """Wait until all requests are complete.

        Raises:
            TimeoutError: they were not in time.
        """
        ends = time.monotonic() + self._timeout_seconds
        while not self._mpi.Request.Testall(list(requests)):
            if time.monotonic() > ends:
                raise TimeoutError(
                    f"{what} over MPI: rank {self.rank} of {self.world_size} waited "
                    f"{self._timeout_seconds:g} s for its peers: one of them is lost, or does something else"
                )
            os.sched_yield()

    def _finish(self, request: MPI.Request, what: str, buffer: Tensor) -> None:
        self.finish_all([request], f"{what} of {buffer.numel()} x {buffer.dtype}")

    def _group(self, ranks: Ranks) -> MPI.Intracomm:
        if ranks not in self._groups:
            # Only the members take part, so that rows and columns are all made at once.
            self._groups[ranks] = self._all.Create_group(self._all.group.Incl(list(ranks)))
        return self._groups[ranks]

    def _raw(self, buffer: Tensor) -> Any:
        """The tensor's own memory, for MPI.

        Raises:
            ConfigError: it does not lie in one piece, or on a device that MPI cannot read.
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

    def _sum_type(self, buffer: Tensor) -> MPI.Datatype:
        if buffer.dtype not in self._summed:
            allowed = ", ".join(str(dtype) for dtype in (*self._summed, *_WIDE))
            raise ConfigError(f"MPI cannot sum a tensor of {buffer.dtype}; allowed: {allowed}")
        return self._summed[buffer.dtype]

    def _count(self, buffer: Tensor) -> None:
        self.traffic.calls += 1
        self.traffic.sent_bytes += buffer.numel() * buffer.element_size()


def is_cuda_aware() -> bool:
    """Whether the MPI library says that it takes device pointers (MPICH's and Open MPI's own extension)."""
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


def _ready(buffer: Tensor) -> None:
    """Let the device finish what is queued before MPI, which knows no streams, reads its memory."""
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()
