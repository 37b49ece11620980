"""Examples read by worker processes, and a library that not every installation has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from harness.errors import DataError


def load_batches(
    views: Dataset[Any],
    batches: Sequence[list[int]],
    workers: int,
    together: Callable[[list[Any]], Any],
    device: torch.device,
) -> Iterator[Any]:
    """What `together` makes of the views of each batch, in order.

    Raises:
        DataError: `together` handed on a sentence about a broken example, in place of a batch.
    """
    workers = min(workers, len(batches))
    loader = DataLoader(
        views,
        batch_sampler=batches,
        num_workers=workers,
        # A worker that imports MPI anew, as spawned ones do, aborts; a forked one has it already.
        multiprocessing_context="fork" if workers else None,
        collate_fn=together,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own: the global one would not survive a resumed epoch
    )
    for loaded in loader:
        if isinstance(loaded, str):
            raise DataError(loaded)
        yield loaded


def import_torchvision(asking: str, extra: str, instead: str = "") -> ModuleType:
    """The library, for who is `asking`.

    Raises:
        ModuleNotFoundError: it is missing or built for another torch; says which extra, and what `instead`.
    """
    try:
        import torchvision  # noqa: PLC0415  an optional extra
    except (ImportError, RuntimeError) as error:  # a build for another torch lacks operators
        said = " ".join(str(error).split())
        raise ModuleNotFoundError(
            f"{asking} needs torchvision in the build that fits torch {torch.__version__}: "
            f"pip install 'kronscale[{extra}]'{instead} ({said})"
        ) from None
    module: ModuleType = torchvision
    return module
