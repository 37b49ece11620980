"""The drawer of collectives: executes a placement, in flat buffers, and counts what travels.

To add a backend: a class with `Communicator`'s methods, chosen in `connect`.
"""

import torch.distributed as dist

from kfac_core.collectives.communicator import Communicator
from kfac_core.collectives.single import SingleCommunicator
from kfac_core.collectives.torch_distributed import TorchCommunicator

__all__ = ["Communicator", "connect"]


def connect() -> Communicator:
    """The communicator of this process: torch.distributed where it is initialised, else a world of one."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchCommunicator()
    return SingleCommunicator()
