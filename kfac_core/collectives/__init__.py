"""Collectives: execute a placement in flat buffers, and count the bytes sent.

To add a backend: a class with `Communicator`'s methods, chosen in `connect`.
"""

from __future__ import annotations

import torch.distributed as dist

from kfac_core.collectives.communicator import (
    Communicator,
    PendingCollective,
    SingleCommunicator,
    SplitWait,
)
from kfac_core.collectives.torch_distributed import TorchCommunicator
from kfac_core.errors import ConfigError

__all__ = ["Communicator", "PendingCollective", "SingleCommunicator", "SplitWait", "connect"]


def connect(process_group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of this process: torch.distributed where it is initialised, else a world of one.

    Every rank of the group calls it at the same time.

    Args:
        process_group: the ranks that work together; None is the whole world.

    Raises:
        ConfigError: this rank is not a member of the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return SingleCommunicator()
    if dist.get_rank(process_group) < 0:
        raise ConfigError(
            f"rank {dist.get_rank()} is not a member of process_group, and cannot run K-FAC in it"
        )
    if dist.get_world_size(process_group) == 1:
        return SingleCommunicator()
    return TorchCommunicator(process_group)
