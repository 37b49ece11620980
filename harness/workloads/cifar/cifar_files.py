"""CIFAR's images: published batch files, the embedded part, or synthetic ones (no torch)."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from harness.errors import DataError
from harness.workloads.cards.card import EMBEDDED, SYNTHETIC
from harness.workloads.cards.vision import CIFAR_TEST, CIFAR_TRAIN
from harness.workloads.cifar.batch_files import Images, Variant, read_batch
from harness.workloads.sources.data_folder import EMBEDDED_FOLDER, data_folder, how_to_point
from harness.workloads.sources.download import download_archive
from harness.workloads.sources.images import balanced_subset


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
    _check_count(folder, "train_examples", train, options["train_examples"] or CIFAR_TRAIN)
    _check_count(folder, "test_examples", test, options["test_examples"] or CIFAR_TEST)
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


def _check_count(folder: Path, option: str, images: Images, wanted: int) -> None:
    if len(images.labels) < wanted:
        raise DataError(
            f"{folder} must have {wanted} images, got {len(images.labels)}; get the complete files, or set "
            f"workload.options.{option}: {len(images.labels)} to use this part"
        )


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
