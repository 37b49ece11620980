"""CIFAR's batch files as their authors write them, small, with the package's real images in them."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from harness.workloads import WORKLOADS
from harness.workloads.cifar.files import Images, read_embedded
from harness.workloads.workload import Share

TRAIN, TEST = 600, 200
CPU = torch.device("cpu")

embedded = cache(read_embedded)


def share(rank: int = 0, world_size: int = 1, batch: int = 50, seed: int = 3) -> Share:
    """A rank's share of global batches of `batch`."""
    return Share(rank, world_size, batch // world_size, seed, CPU)


def options(name: str = "cifar10", **changes: Any) -> dict[str, Any]:
    """A workload's options with its defaults."""
    return {**WORKLOADS[name].options, **changes}


def some(images: Images, count: int, classes: int = 10) -> tuple[np.ndarray, list[int]]:
    """Rows of 3072 bytes and labels of every class, mixed."""
    order = np.random.default_rng(1).permutation(len(images.labels))
    labels = images.labels[order] if classes == 10 else np.arange(len(order)) % classes
    return images.pixels[order[:count]].reshape(count, 3072), [int(label) for label in labels[:count]]


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]  # the one that can be changed
    """Writes what the published files hold: text of Python 2, and NumPy 1's names."""

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_text(self, text: bytes | str) -> None:
        content = text.encode() if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_text


def python2_pickle(content: Any) -> bytes:
    """`content` as Python 2 and NumPy 1 wrote it."""
    written = io.BytesIO()
    Python2Pickler(written, 2).dump(content)
    return written.getvalue().replace(b"cnumpy._core.", b"cnumpy.core.")


def write_batch(path: Path, rows: np.ndarray, labels: Any, key: bytes = b"labels") -> None:
    """One batch file."""
    batch = {b"batch_label": b"a batch", key: labels, b"data": rows, b"filenames": [b"x.png"] * len(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(python2_pickle(batch))


def write_cifar10(root: Path) -> Path:
    """`cifar-10-batches-py` with 600 training images in five files and 200 test images."""
    folder = root / "cifar-10-batches-py"
    rows, labels = some(embedded()[0], TRAIN)
    for part in range(5):
        mine = slice(part * TRAIN // 5, (part + 1) * TRAIN // 5)
        write_batch(folder / f"data_batch_{part + 1}", rows[mine], labels[mine])
    write_batch(folder / "test_batch", *some(embedded()[1], TEST))
    return folder


def write_cifar100(root: Path) -> Path:
    """`cifar-100-python` with 600 training and 200 test images, labels from 0 to 99."""
    folder = root / "cifar-100-python"
    write_batch(folder / "train", *some(embedded()[0], TRAIN, 100), key=b"fine_labels")
    write_batch(folder / "test", *some(embedded()[1], TEST, 100), key=b"fine_labels")
    return folder


def torchvision_or_skip() -> ModuleType:
    """torchvision, which loads beside the torch it was built for alone."""
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:  # an operator that is missing is a RuntimeError
        pytest.skip(f"torchvision does not load here: {error}")
    return torchvision


def change(path: Path, edit: Callable[[dict[bytes, Any]], None]) -> None:
    """Rewrite a batch file."""
    batch = pickle.loads(path.read_bytes(), encoding="bytes")  # noqa: S301  written by this test
    edit(batch)
    path.write_bytes(python2_pickle(batch))
