"""In which order an epoch takes its examples: a matter of seed and epoch, whatever the world.

The order is one permutation for all ranks, cut into global batches; `Share` cuts those into local ones. What
is left at the end, less than a global batch, waits for another epoch's permutation. So every example comes at
most once an epoch, and exactly once where the batch divides their number; the first step of a resumed epoch
is where the one before left off.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.workloads.workload import Share


def generator_of(share: Share, epoch: int) -> torch.Generator:
    """What an epoch draws from, the same on every rank and in every world."""
    return torch.Generator().manual_seed(share.seed * 1_000_003 + epoch)


def steps_per_epoch(share: Share, examples: int) -> int:
    """Whole global batches in an epoch."""
    return examples // share.global_batch_size


def global_batches(share: Share, order: Tensor, first_step: int) -> Iterator[Tensor]:
    """All ranks' indices, step by step from `first_step` on, of an epoch's `order`."""
    steps = steps_per_epoch(share, len(order))
    yield from order.split(share.global_batch_size)[first_step:steps]


def local_batches(share: Share, order: Tensor, first_step: int) -> Iterator[Tensor]:
    """This rank's part of each of them."""
    for global_batch in global_batches(share, order, first_step):
        yield share.slice_of(global_batch)
