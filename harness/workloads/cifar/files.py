"""CIFAR's images from its published batch files, from the package, or made up (no torch)."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from harness.errors import DataError
from harness.workloads.cards.vision import CIFAR_TEST, CIFAR_TRAIN, EMBEDDED, SYNTHETIC
from harness.workloads.cifar.plain_pickle import read_plain
from harness.workloads.sources.download import Published, download_archive
from harness.workloads.sources.folders import data_folder, how_to_point
from harness.workloads.sources.parts import even_part

PIXELS = 3 * 32 * 32


class Images(NamedTuple):
    """A set of pictures.

    Attributes:
        pixels: uint8 `[N, 3, 32, 32]`, red, green, blue.
        labels: int64 `[N]`.
    """

    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    labels: np.ndarray[Any, np.dtype[np.int64]]

    def limited(self, count: int) -> Images:
        """So many images, taken from every class in turn, in the files' order; all for 0.

        Raises:
            DataError: there are fewer.
        """
        if not count or count == len(self.labels):
            return self
        if count > len(self.labels):
            raise DataError(f"there are {len(self.labels)} images, but the options ask for {count}")
        chosen = even_part(self.labels, count)
        return Images(self.pixels[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Variant:
    """CIFAR-10 or CIFAR-100, as published.

    Attributes:
        labels_key: name of the list of labels in a batch file.
    """

    name: str
    classes: int
    folder: str
    train_files: tuple[str, ...]
    test_file: str
    labels_key: bytes
    published: Published


VARIANTS: Mapping[int, Variant] = MappingProxyType(
    {
        10: Variant(
            "cifar10", 10, "cifar-10-batches-py", tuple(f"data_batch_{part}" for part in range(1, 6)),
            "test_batch", b"labels",
            Published(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"
            ),
        ),
        100: Variant(
            "cifar100", 100, "cifar-100-python", ("train",), "test", b"fine_labels",
            Published(
                "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"
            ),
        ),
    }
)  # fmt: skip


def read_cifar(variant: Variant, options: Mapping[str, Any]) -> tuple[Images, Images]:
    """Training and test images that the options ask for.

    Raises:
        DataError: files are missing, cut short or of another kind, or could not be downloaded.
    """
    if options["data"] == EMBEDDED:
        train, test = read_embedded()
    elif options["data"] == SYNTHETIC:
        train, test = (make_up(variant.classes, count) for count in (CIFAR_TRAIN, CIFAR_TEST))
    else:
        folder = _find(variant, options["data"], options["download"])
        train = _read(variant, [folder / name for name in variant.train_files])
        test = _read(variant, [folder / variant.test_file])
        _complete(folder, "train_examples", train, options["train_examples"] or CIFAR_TRAIN)
        _complete(folder, "test_examples", test, options["test_examples"] or CIFAR_TEST)
    return train.limited(options["train_examples"]), test.limited(options["test_examples"])


def read_embedded() -> tuple[Images, Images]:
    """The part of CIFAR-10 that the package carries, as JPEGs: real, slightly lossy, no download.

    200 training and 50 test images of each class; `harness/workloads/embedded/README.md` says whence.
    """
    pictures: dict[str, list[np.ndarray[Any, Any]]] = {"train": [], "test": []}
    classes: dict[str, list[str]] = {"train": [], "test": []}
    packed = files("harness.workloads").joinpath("embedded", "cifar10.tar.xz").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            held, file = member.name.split("/"), archive.extractfile(member)
            assert file is not None  # noqa: S101  the archive is the package's own
            pictures[held[0]].append(np.asarray(Image.open(file).convert("RGB")).transpose(2, 0, 1))
            classes[held[0]].append(held[1])
    names = sorted(set(classes["train"]))
    train, test = (
        Images(np.stack(pictures[split]), np.array([names.index(name) for name in classes[split]], np.int64))
        for split in ("train", "test")
    )
    return train, test


def make_up(classes: int, count: int) -> Images:
    """Random pixels and labels of CIFAR's shape: nothing to learn, the same work."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    return Images(pixels, np.arange(count, dtype=np.int64) % classes)


def _find(variant: Variant, option: str, may_download: bool) -> Path:
    root = data_folder(option)
    for folder in (root / variant.folder, root):
        if (folder / variant.train_files[0]).is_file():
            return folder
    if may_download:
        download_archive(variant.published, root, variant.folder, (*variant.train_files, variant.test_file))
        return root / variant.folder
    raise DataError(
        f"{root / variant.folder} is not there; {variant.name} reads the batch files "
        f"{variant.train_files[0]}, ...: unpack {variant.published.url} in {root}, set "
        f"workload.options.download: true, {how_to_point(option)}"
    )


def _read(variant: Variant, paths: list[Path]) -> Images:
    batches = [_read_batch(variant, path) for path in paths]
    pixels = np.concatenate([batch.pixels for batch in batches])
    labels = np.concatenate([batch.labels for batch in batches])
    there = len(np.unique(labels))
    if there != variant.classes:
        raise DataError(
            f"{paths[0].parent}: {there} classes in {paths[0].name} and its like, {variant.classes} expected "
            f"of {variant.name}; get {variant.published.url}"
        )
    return Images(pixels, labels)


def _read_batch(variant: Variant, path: Path) -> Images:
    expected = f"expected a batch file of {variant.name} from {variant.published.url}"
    try:
        batch = read_plain(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {expected}") from None
    if not isinstance(batch, dict):
        raise DataError(f"{path}: holds {type(batch).__name__}, no mapping; {expected}")
    named = {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}
    missing = [key.decode() for key in (b"data", variant.labels_key) if key not in named]
    if missing:
        raise DataError(f"{path}: has no {' and no '.join(missing)}; {expected}")
    pixels, labels = named[b"data"], np.asarray(named[variant.labels_key])
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape != (len(pixels), PIXELS)
    ):
        got = (
            f"{pixels.dtype} {list(pixels.shape)}"
            if isinstance(pixels, np.ndarray)
            else type(pixels).__name__
        )
        raise DataError(f"{path}: data is {got}, not uint8 [images, {PIXELS}]; {expected}")
    if labels.ndim != 1 or len(labels) != len(pixels) or labels.dtype.kind not in "iu":
        raise DataError(f"{path}: {len(pixels)} images with {labels.size} labels; {expected}")
    if len(labels) and not (labels.min() >= 0 and labels.max() < variant.classes):
        raise DataError(
            f"{path}: labels from {labels.min()} to {labels.max()}, allowed are 0 to {variant.classes - 1}; "
            f"{expected}"
        )
    return Images(pixels.reshape(-1, 3, 32, 32), labels.astype(np.int64))


def _complete(folder: Path, option: str, images: Images, wanted: int) -> None:
    if len(images.labels) < wanted:
        raise DataError(
            f"{folder}: {len(images.labels)} images, {wanted} expected; get a whole copy, or set "
            f"workload.options.{option}: {len(images.labels)} for this part"
        )
