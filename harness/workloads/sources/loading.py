"""Batches of examples that worker processes read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from harness.errors import DataError


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
    batches: Sequence[list[int]],
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

    workers = min(workers, len(batches))
    loader = DataLoader(
        Examples(read),
        batch_sampler=batches,
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
