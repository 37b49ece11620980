"""The order of examples in an epoch: a function of seed and epoch, the same in every world.

All ranks draw one permutation and cut it into global batches; each takes its slice of every batch. The
incomplete last batch is dropped. So every example occurs at most once an epoch, and exactly once if the batch
size divides their number. A resumed epoch begins with the step after the last one done.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.workloads.workload import Share


def epoch_generator(share: Share, epoch: int) -> torch.Generator:
    """The generator of an epoch's random numbers, the same on every rank and in every world."""
    return torch.Generator().manual_seed(share.seed * 1_000_003 + epoch)


def seed_this_rank(share: Share) -> None:
    """Seed torch's own generator differently on each rank: for dropout and sampling in the model.

    To be called once the weights are initialised, which must be the same on all ranks.
    """
    torch.manual_seed(share.seed * 1_000_003 + share.rank)


def steps_per_epoch(share: Share, examples: int) -> int:
    """Complete global batches in an epoch."""
    return examples // share.global_batch_size


def global_batches(share: Share, order: Tensor, first_step: int) -> Iterator[Tensor]:
    """Indices of all ranks, step by step, of an epoch's `order` from `first_step` on."""
    steps = steps_per_epoch(share, len(order))
    yield from order.split(share.global_batch_size)[first_step:steps]


def local_batches(share: Share, order: Tensor, first_step: int) -> Iterator[Tensor]:
    """Indices of this rank, step by step."""
    for global_batch in global_batches(share, order, first_step):
        yield share.slice_of(global_batch)
