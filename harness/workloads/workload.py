"""The protocol of a workload: what the training loop calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from harness.workloads import WORKLOADS

if TYPE_CHECKING:  # not at run time: the GPU acceptance runs where pydantic may be missing
    from harness.cell import Cell

Batch = Any


@dataclass(frozen=True)
class Share:
    """The part of the data that one rank sees.

    A global batch is the same for every world size: ranks cut it into consecutive slices.

    Attributes:
        local_batch_size: examples per step on this rank.
        seed: of the order of examples; the same on every rank.
    """

    rank: int
    world_size: int
    local_batch_size: int
    seed: int
    device: torch.device

    @property
    def global_batch_size(self) -> int:
        """Examples per step on all ranks together."""
        return self.local_batch_size * self.world_size

    def slice_of(self, global_batch: Tensor) -> Tensor:
        """This rank's part of the indices of one global batch."""
        start = self.rank * self.local_batch_size
        return global_batch[start : start + self.local_batch_size]


class Workload(Protocol):
    """Data, model, loss and metrics of one learning problem, as one rank sees them."""

    steps_per_epoch: int

    def model(self) -> nn.Module:
        """A newly initialised model on the device, the same on every rank."""
        ...

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The local batches of an epoch from step `first_step` on; a whole epoch has `steps_per_epoch`.

        A batch is a function of seed, epoch and step alone, so that a run that is resumed within an epoch
        sees what it would have seen.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over the local batch."""
        ...

    def evaluate(self, model: nn.Module) -> tuple[Mapping[str, float], int]:
        """Sums of each metric over this rank's share of the held-out examples, and their number."""
        ...


@runtime_checkable
class Pooled(Protocol):
    """A workload with metrics that are not means over examples, such as mAP, which needs all detections.

    After `evaluate`, rank 0 computes these metrics from the findings of all ranks.

    Attributes:
        pooled_metrics: their names; `evaluate` sums the others of the card.
    """

    pooled_metrics: Sequence[str]

    def findings(self) -> bytes:
        """What the last `evaluate` found on this rank."""
        ...

    def score(self, findings: Sequence[bytes]) -> Mapping[str, float]:
        """The metrics, from the findings of all ranks."""
        ...


@runtime_checkable
class CountedLoss(Protocol):
    """A workload whose loss is a mean over neither the examples nor all tokens of a batch.

    K-FAC's Fisher is that of the loss; it cannot see which positions the loss leaves out.
    """

    def loss_terms(self, batch: Batch) -> float:
        """Loss terms of a local batch: 1 over the weight that each has in the loss."""
        ...


@runtime_checkable
class SumOfMeans(CountedLoss, Protocol):
    """A workload whose loss adds up means over different things, such as words and sentences.

    Each mean has its own number of loss terms, and so have the layers that only one of them reaches.
    """

    def loss_terms_of(self, batch: Batch) -> Mapping[str, float]:
        """Loss terms of a local batch by the name of a module that no other mean's gradient reaches."""
        ...


def build_workload(cell: Cell, share: Share) -> Workload:
    """The workload that `cell` names, as the rank of `share` sees it."""
    card = WORKLOADS[cell.workload.name]
    build = getattr(import_module(card.module), card.builder)
    workload: Workload = build({**card.options, **cell.workload.options}, share)
    return workload
