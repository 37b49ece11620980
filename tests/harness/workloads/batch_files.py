"""Small batch files in CIFAR's published formats, with the embedded images."""

from __future__ import annotations

import hashlib
import io
import pickle
import shutil
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from harness.workloads import WORKLOADS
from harness.workloads.cifar.cifar_files import VARIANTS, Images, Variant, read_batch, read_embedded
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
    """Writes pickles like the published ones: with text of Python 2 and NumPy 1's names."""

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


def write_binary(path: Path, rows: np.ndarray, labels: list[int], coarse: bool = False) -> None:
    """One file of the binary version; CIFAR-100 has a coarse class before the fine one."""
    columns = [*([[label // 5 for label in labels]] if coarse else []), labels]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.hstack([np.array(columns, np.uint8).T, rows]).tobytes())


def write_cifar10(root: Path) -> Path:
    """`cifar-10-batches-bin` with 600 training images in five files and 200 test images."""
    folder = root / "cifar-10-batches-bin"
    rows, labels = some(embedded()[0], TRAIN)
    for part in range(5):
        mine = slice(part * TRAIN // 5, (part + 1) * TRAIN // 5)
        write_binary(folder / f"data_batch_{part + 1}.bin", rows[mine], labels[mine])
    write_binary(folder / "test_batch.bin", *some(embedded()[1], TEST))
    return folder


def write_cifar100(root: Path) -> Path:
    """`cifar-100-binary` with 600 training and 200 test images, labels from 0 to 99."""
    folder = root / "cifar-100-binary"
    write_binary(folder / "train.bin", *some(embedded()[0], TRAIN, 100), coarse=True)
    write_binary(folder / "test.bin", *some(embedded()[1], TEST, 100), coarse=True)
    return folder


def write_python_version(root: Path, classes: int = 10) -> Variant:
    """The same images in the Python version; returns the variant with their checksums."""
    variant = VARIANTS[classes]
    (write_cifar10 if classes == 10 else write_cifar100)(root / "binary")
    folder, checksums = root / variant.python.folder, {}
    folder.mkdir()
    for binary, name in zip(
        (*variant.binary.train, variant.binary.test),
        (*variant.python.train, variant.python.test),
        strict=True,
    ):
        images = read_batch(variant, root / "binary" / variant.binary.folder / binary)
        rows, labels = images.pixels.reshape(-1, 3072), images.labels.tolist()
        batch = {b"batch_label": b"a batch", variant.labels_key: labels, b"data": rows}
        content = python2_pickle(batch)
        (folder / name).write_bytes(content)
        checksums[name] = hashlib.md5(content).hexdigest()  # noqa: S324  as published
    shutil.rmtree(root / "binary")
    return replace(variant, python=variant.python._replace(checksums=checksums))


def torchvision_or_skip() -> ModuleType:
    """torchvision, which loads beside the torch it was built for alone."""
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:  # an operator that is missing is a RuntimeError
        pytest.skip(f"torchvision does not load here: {error}")
    return torchvision
