"""Cuts a local batch into micro-batches, whose gradients add up to those of the whole batch."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from harness.workloads.workload import Batch, Workload


@runtime_checkable
class CutsBatches(Protocol):
    """A workload that cuts its batches itself, because more than their examples depends on the cut."""

    def micro_batches(self, batch: Batch, count: int) -> list[Batch]:
        """Equal parts of a local batch, the mean of whose losses is the loss of the batch."""
        ...


def micro_batches(workload: Workload, batch: Batch, count: int) -> list[Batch]:
    """`count` equal parts of a local batch, in its order; tensors and lists are cut along their examples."""
    if count == 1:
        return [batch]
    if isinstance(workload, CutsBatches):
        return workload.micro_batches(batch, count)
    return [part(batch, number, count) for number in range(count)]


def part(batch: Any, number: int, count: int) -> Any:
    """Part `number` of `count` of a tensor or list of examples, or of each in a tuple.

    Raises:
        TypeError: it is none of these.
        ValueError: its examples cannot be cut into equal parts.
    """
    if isinstance(batch, tuple):
        return tuple(part(each, number, count) for each in batch)
    if not isinstance(batch, Tensor | list):
        raise TypeError(f"a batch must consist of tensors and lists, got a {type(batch).__name__}")
    examples, rest = divmod(len(batch), count)
    if rest:
        raise ValueError(f"{len(batch)} examples cannot be cut into {count} equal parts")
    return batch[number * examples : (number + 1) * examples]
