"""What the training loop calls of a workload, and what a rank sees: its share, the order and the loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler

from harness.errors import DataError
from harness.workloads import WORKLOADS

if TYPE_CHECKING:  # not at run time: `harness.bench gpu` runs where pydantic may be missing
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

    def steps_per_epoch(self, examples: int) -> int:
        """Complete global batches in an epoch."""
        return examples // self.global_batch_size

    def slice_of(self, global_batch: Tensor) -> Tensor:
        """This rank's part of the indices of one global batch."""
        start = self.rank * self.local_batch_size
        return global_batch[start : start + self.local_batch_size]

    def held_out(self, examples: int) -> Tensor:
        """Indices of this rank's held-out examples: every world_size-th."""
        return torch.arange(examples)[self.rank :: self.world_size]

    def seed_torch(self) -> None:
        """Seed torch's own generator differently on each rank: for dropout and sampling in the model.

        To be called once the weights are initialised, which must be the same on all ranks.
        """
        torch.manual_seed(self.seed * 1_000_003 + self.rank)


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
        pooled_metrics: their names; `evaluate` sums the others of the description.
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


@runtime_checkable
class LeastSquares(CountedLoss, Protocol):
    """A workload whose loss is half the sum of squared residuals.

    K-FAC's statistics are then those of the exact Gauss-Newton matrix: they come from the residuals'
    derivatives, in a backward pass of their own.
    """

    def residuals(self, model: nn.Module, batch: Batch) -> Tensor:
        """`[n]`, over the root of the number of points that each kind of them is a mean over."""
        ...


def classified(scores: Tensor, classes: Tensor) -> dict[str, float]:
    """Correct predictions and summed loss, of scores `[..., C]` and classes `[...]`."""
    rows, wanted = scores.reshape(-1, scores.shape[-1]), classes.flatten()
    return {
        "accuracy": float((rows.argmax(1) == wanted).sum()),
        "loss": float(functional.cross_entropy(rows, wanted, reduction="sum")),
    }


def build_workload(cell: Cell, share: Share) -> Workload:
    """The workload that `cell` names, as the rank of `share` sees it."""
    description = WORKLOADS[cell.workload.name]
    build = getattr(import_module(description.module), description.builder)
    workload: Workload = build({**description.options, **cell.workload.options}, share)
    return workload


class EpochSampler(Sampler[Tensor]):
    """This rank's indices of each step of an epoch: a function of seed, epoch and step, in every world.

    All ranks draw one permutation and cut it into global batches; each takes its slice of every batch. The
    incomplete last batch is dropped. So every example occurs at most once an epoch, and exactly once if the
    batch size divides their number.

    Args:
        share: of this rank.
        examples: how many there are.
        epoch: from 0.
        first_step: with which a resumed epoch goes on.
        device: of the indices.

    Attributes:
        generator: of further random numbers of the epoch, the same on every rank and in every world.
    """

    def __init__(
        self, share: Share, examples: int, epoch: int, first_step: int, device: torch.device | str = "cpu"
    ) -> None:
        self.generator = torch.Generator().manual_seed(share.seed * 1_000_003 + epoch)
        order = torch.randperm(examples, generator=self.generator).to(device)
        steps = share.steps_per_epoch(examples)
        self.global_batches = order.split(share.global_batch_size)[first_step:steps]
        self._share = share

    def __len__(self) -> int:
        """Steps that remain."""
        return len(self.global_batches)

    def __iter__(self) -> Iterator[Tensor]:
        """Indices of one local batch after another."""
        return map(self._share.slice_of, self.global_batches)


class Examples(Dataset[Any]):
    """Examples by index, or the error message of one that cannot be read.

    An exception would leave a worker process wrapped in its traceback.
    """

    def __init__(self, read: Callable[[int], Any]) -> None:
        self._read = read

    def __getitem__(self, index: int) -> Any:
        """The example, or a message."""
        try:
            return self._read(index)
        except DataError as error:
            return str(error)


def load_batches(
    read: Callable[[int], Any],
    batches: Iterable[Tensor],
    workers: int,
    collate: Callable[[list[Any]], Any],
    device: torch.device,
) -> Iterator[Any]:
    """Collated batches of what `read` returns for each index, in order.

    Args:
        read: an example by its index; raises DataError.
        batches: indices of each batch.
        workers: processes that read; 0 reads in this one.
        collate: makes a batch of examples.
        device: of the model; memory for a GPU is pinned.

    Raises:
        DataError: an example cannot be read.
    """

    def collate_or_fail(examples: list[Any]) -> Any:
        return next((example for example in examples if isinstance(example, str)), None) or collate(examples)

    lists = [batch.tolist() for batch in batches if len(batch)]
    workers = min(workers, len(lists))
    loader = DataLoader(
        Examples(read),
        batch_sampler=lists,
        num_workers=workers,
        # A spawned worker would import MPI again and abort; a forked one has it already.
        multiprocessing_context="fork" if workers else None,
        collate_fn=collate_or_fail,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own: the global one's state must survive a resumed epoch
    )
    for loaded in loader:
        if isinstance(loaded, str):
            raise DataError(loaded)
        yield loaded
