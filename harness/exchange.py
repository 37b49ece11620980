"""A few numbers of every rank, known to all of them: for agreements outside of the training step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kfac_core.collectives import Communicator


def everyones(communicator: Communicator, device: torch.device, own: Sequence[float]) -> list[list[float]]:
    """Row r holds what rank r passed; every rank passes as many, and whole numbers below 2^53 stay exact."""
    table = torch.zeros(communicator.world_size, len(own), dtype=torch.float64, device=device)
    table[communicator.rank] = torch.tensor(list(own), dtype=torch.float64)
    communicator.all_reduce(table)
    rows: list[list[float]] = table.tolist()
    return rows
