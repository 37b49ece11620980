"""CIFAR's images: published batch files, the embedded part, or synthetic ones (no torch).

A file of the binary version is a table of bytes. One of the Python version is a pickle, which can run any
code when it is loaded: it is loaded only if its checksum is the published one.
"""

from __future__ import annotations

import hashlib
import pickle
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from harness.errors import DataError
from harness.workloads.cifar import CIFAR_TEST, CIFAR_TRAIN
from harness.workloads.description import EMBEDDED, SYNTHETIC
from harness.workloads.sources.files import balanced_subset, check_enough
from harness.workloads.sources.folders import (
    EMBEDDED_FOLDER,
    Published,
    data_folder,
    download_archive,
    how_to_point,
)

PIXELS = 3 * 32 * 32


class Images(NamedTuple):
    """A set of labelled images.

    Attributes:
        pixels: uint8 `[N, 3, 32, 32]`, red, green, blue.
        labels: int64 `[N]`.
    """

    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    labels: np.ndarray[Any, np.dtype[np.int64]]


class Version(NamedTuple):
    """One of the two forms in which a variant is published.

    Attributes:
        folder: in which its archive has the files.
        checksums: MD5 of each file of the Python version, the only published ones. MD5 suffices here: nobody
            can make another file with a given MD5.
    """

    folder: str
    train: tuple[str, ...]
    test: str
    checksums: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Variant:
    """CIFAR-10 or CIFAR-100, as published.

    Attributes:
        label_bytes: before the pixels in a row of the binary version; the last one is the class.
        labels_key: the list of classes in a file of the Python version.
        archive: the binary version.
    """

    name: str
    classes: int
    label_bytes: int
    labels_key: bytes
    binary: Version
    python: Version
    archive: Published


VARIANTS: Mapping[int, Variant] = MappingProxyType(
    {
        10: Variant(
            "cifar10", 10, 1, b"labels",
            Version(
                "cifar-10-batches-bin", tuple(f"data_batch_{part}.bin" for part in range(1, 6)),
                "test_batch.bin",
            ),
            Version(
                "cifar-10-batches-py", tuple(f"data_batch_{part}" for part in range(1, 6)), "test_batch",
                {
                    "data_batch_1": "c99cafc152244af753f735de768cd75f",
                    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                    "data_batch_4": "634d18415352ddfa80567beed471001a",
                    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3fb",
                    "test_batch": "40351d587109b95175f43aff81a1287e",
                },
            ),
            Published(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        100: Variant(
            "cifar100", 100, 2, b"fine_labels",
            Version("cifar-100-binary", ("train.bin",), "test.bin"),
            Version(
                "cifar-100-python", ("train",), "test",
                {
                    "train": "16019d7e3df5f24257cddd939b257f8d",
                    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
                },
            ),
            Published(
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                "md5:03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
    }
)  # fmt: skip


def read_batch(variant: Variant, path: Path) -> Images:
    """The images of a batch file of either version.

    Raises:
        DataError: the file cannot be read, or is not one of `variant`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; get {variant.archive.url}") from None
    if path.name in variant.python.checksums:
        return _from_python(variant, path, content)
    return _from_binary(variant, path, content)


def _from_binary(variant: Variant, path: Path, content: bytes) -> Images:
    row_bytes = variant.label_bytes + PIXELS
    again = f"get {variant.archive.url} again"
    if not content or len(content) % row_bytes:
        raise DataError(
            f"{path} must have {row_bytes} bytes for each image, got {len(content)} bytes, which is not a "
            f"multiple: it is truncated or not a batch file of {variant.name}; {again}"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, row_bytes)
    labels = rows[:, variant.label_bytes - 1].astype(np.int64)
    if labels.max() >= variant.classes:
        raise DataError(f"{path}: labels must be 0 to {variant.classes - 1}, got {labels.max()}; {again}")
    return Images(rows[:, variant.label_bytes :].reshape(-1, 3, 32, 32), labels)


def _from_python(variant: Variant, path: Path, content: bytes) -> Images:
    published = variant.python.checksums[path.name]
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()  # builds with FIPS refuse it otherwise
    if found != published:
        raise DataError(
            f"{path}: MD5 must be the published {published}, got {found}; the file was not loaded, because a "
            f"pickle can run code: get it again, or the binary version from {variant.archive.url}"
        )
    batch = pickle.loads(content, encoding="bytes")  # noqa: S301  the published file
    return Images(batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[variant.labels_key], np.int64))


def read_cifar(variant: Variant, options: Mapping[str, Any]) -> tuple[Images, Images]:
    """Training and test images that the options ask for.

    Raises:
        DataError: files are missing, damaged or of another kind, or could not be downloaded.
    """
    if options["data"] == EMBEDDED:
        train, test = read_embedded()
    elif options["data"] == SYNTHETIC:
        train, test = (_synthetic(variant.classes, count) for count in (CIFAR_TRAIN, CIFAR_TEST))
    else:
        train, test = _read_files(variant, options)
    return _limited(train, options["train_examples"]), _limited(test, options["test_examples"])


def read_embedded() -> tuple[Images, Images]:
    """The part of CIFAR-10 that the package contains as JPEGs: 200 training, 50 test images of each class.

    `harness/workloads/embedded/README.md` names its source and terms.
    """
    pixels: dict[str, list[np.ndarray[Any, Any]]] = {"train": [], "test": []}
    classes: dict[str, list[str]] = {"train": [], "test": []}
    with tarfile.open(EMBEDDED_FOLDER / "cifar10.tar.xz") as archive:
        for member in archive:
            split, class_name, _ = member.name.split("/")
            with Image.open(archive.extractfile(member)) as image:  # type: ignore[arg-type]  # regular files
                pixels[split].append(np.asarray(image.convert("RGB")).transpose(2, 0, 1))
            classes[split].append(class_name)
    names = sorted(set(classes["train"]))
    train, test = (
        Images(np.stack(pixels[split]), np.array([names.index(name) for name in classes[split]], np.int64))
        for split in ("train", "test")
    )
    return train, test


def _read_files(variant: Variant, options: Mapping[str, Any]) -> tuple[Images, Images]:
    root = data_folder(options["data"])
    versions = (variant.binary, variant.python)
    places = [(version, folder) for version in versions for folder in (root / version.folder, root)]
    found = [(version, folder) for version, folder in places if (folder / version.train[0]).is_file()]
    if not found and options["download"]:
        download_archive(variant.archive, root / variant.binary.folder)
        found = places[:1]
    if not found:
        raise DataError(
            f"{root} has no batch files of {variant.name} ({variant.binary.folder} or "
            f"{variant.python.folder}): unpack {variant.archive.url} there, set "
            f"workload.options.download: true, {how_to_point(options['data'])}"
        )
    version, folder = found[0]
    train = _read(variant, [folder / name for name in version.train])
    test = _read(variant, [folder / version.test])
    for images, option, count in (
        (train, "train_examples", CIFAR_TRAIN),
        (test, "test_examples", CIFAR_TEST),
    ):
        check_enough(folder, "images", len(images.labels), option, options[option] or count)
    return train, test


def _read(variant: Variant, paths: list[Path]) -> Images:
    batches = [read_batch(variant, path) for path in paths]
    images = Images(*(np.concatenate(columns) for columns in zip(*batches, strict=True)))
    classes = len(np.unique(images.labels))
    if classes != variant.classes:
        raise DataError(
            f"{', '.join(map(str, paths))} must have {variant.classes} classes, got {classes}; "
            f"get {variant.archive.url}"
        )
    return images


def _limited(images: Images, count: int) -> Images:
    """`count` images, as many of each class, in the files' order; 0 means all."""
    if not count or count == len(images.labels):
        return images
    chosen = balanced_subset(images.labels, count)
    return Images(images.pixels[chosen], images.labels[chosen])


def _synthetic(classes: int, count: int) -> Images:
    """Random pixels: nothing to learn, the same work."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    return Images(pixels, np.arange(count, dtype=np.int64) % classes)
