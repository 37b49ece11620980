"""The protocol of the drawer: what the training loop asks of a workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from harness.cell import Cell
from harness.workloads import WORKLOADS

Batch = Any


@dataclass(frozen=True)
class Share:
    """Which part of the data a rank sees.

    A global batch is the same for every world size: ranks cut it into consecutive slices.

    Attributes:
        local_batch_size: examples per step on this rank.
        seed: order of the examples; the same on every rank.
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
        """A freshly initialised model on the device, the same on every rank."""
        ...

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The local batches of an epoch from its step `first_step` on, `steps_per_epoch` in all.

        A batch depends on seed, epoch and its place in the epoch alone, whatever was drawn before: a run that
        is resumed in the middle of an epoch sees what it would have seen.
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
    """A workload with metrics that are no means over examples, as mAP, which ranks all detections of a class.

    After `evaluate` its ranks hand over what they found, and rank 0 makes the metrics of it.

    Attributes:
        pooled_metrics: names of those metrics; `evaluate` sums the others of its card.
    """

    pooled_metrics: Sequence[str]

    def findings(self) -> bytes:
        """What the last `evaluate` found on this rank."""
        ...

    def score(self, findings: Sequence[bytes]) -> Mapping[str, float]:
        """The metrics, from all ranks' findings."""
        ...


def build_workload(cell: Cell, share: Share) -> Workload:
    """The workload that `cell` names, as the rank of `share` sees it."""
    card = WORKLOADS[cell.workload.name]
    build = getattr(import_module(card.module), card.builder)
    workload: Workload = build({**card.options, **cell.workload.options}, share)
    return workload
