"""What point-to-point exchange needs in order to read the memory of ranks on the same host.

`kfac_core` has no implementation: reading another process needs sockets and the consent of the kernel, which
a program has to choose. Pass one to `connect(find_peers=...)`; Kronscale's is
`harness.training.world.single_copy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class PeerMemory(Protocol):
    """Another rank's process on this host, whose memory this rank can read.

    Messages are matched by tag and subject, and kept until they are received.
    """

    def send(self, tag: int, subject: int, value: int = 0) -> None:
        """Send a message; its errors are those of `receive`."""
        ...

    def receive(self, tag: int, subject: int) -> int:
        """Wait for a message and return its value.

        Raises:
            ConnectionError: the process is gone.
            TimeoutError: it has been silent for too long.
        """
        ...

    def read(self, address: int, out: Tensor) -> None:
        """Fill contiguous `out` from the process's memory at `address`.

        Raises:
            ConnectionError: the process is gone.
        """
        ...


PeerFinder = Callable[[dist.ProcessGroup, float | None], tuple[Mapping[int, PeerMemory], bool]]
"""From a Gloo group and its time-out in seconds (None: for ever) to the members whose memory this rank reads,
by rank in the group, and whether every member reads all others. Every member calls it at the same time."""
