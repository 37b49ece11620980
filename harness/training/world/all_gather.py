"""All-gathers of Python values, for agreements outside of the training step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kfac_core.collectives import Communicator


def all_gather_rows(
    communicator: Communicator, device: torch.device, own: Sequence[float]
) -> list[list[float]]:
    """Row r holds what rank r passed.

    Every rank passes the same number of values. Integers below 2^53 stay exact.
    """
    table = torch.zeros(communicator.world_size, len(own), dtype=torch.float64, device=device)
    table[communicator.rank] = torch.tensor(list(own), dtype=torch.float64)
    communicator.all_reduce(table)
    rows: list[list[float]] = table.tolist()
    return rows


def all_gather_bytes(communicator: Communicator, device: torch.device, own: bytes) -> list[bytes]:
    """Entry r is what rank r passed; lengths may differ."""
    sizes = [int(size) for (size,) in all_gather_rows(communicator, device, [len(own)])]
    buffer = torch.zeros(sum(sizes), dtype=torch.uint8)
    if own:  # torch.frombuffer rejects an empty buffer
        buffer.split(sizes)[communicator.rank].copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    buffer = buffer.to(device)
    communicator.gather_parts(buffer, sizes, tuple(range(communicator.world_size)))
    return [part.numpy().tobytes() for part in buffer.cpu().split(sizes)]
