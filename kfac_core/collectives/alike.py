"""Whether all ranks compute on devices of one kind, so that equal work gives equal bits."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from kfac_core.collectives.communicator import Communicator

_KINDS = 1 << 20  # numbers of kinds; float32 holds each exactly


def are_alike(communicator: Communicator, like: Tensor) -> bool:
    """Ask all ranks for the kind of their device, at the same time; not counted as traffic."""
    traffic = communicator.traffic
    before = traffic.calls, traffic.sent_bytes
    kinds = like.new_zeros(communicator.world_size, dtype=torch.float32)
    kinds.narrow(0, communicator.rank, 1).fill_(1 + zlib.crc32(kind_of(like.device).encode()) % _KINDS)
    communicator.all_reduce(kinds)
    traffic.calls, traffic.sent_bytes = before
    return len({kind for kind in map(float, kinds.cpu().unbind()) if kind}) == 1


def kind_of(device: torch.device) -> str:
    """What the bits of a decomposition depend on; on a CPU also the threads that share the work."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.__version__}"
    return f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} {torch.__version__}"
