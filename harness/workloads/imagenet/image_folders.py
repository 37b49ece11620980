"""Image files in one folder for each class, as ImageNet is kept (no torch)."""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.errors import DataError
from harness.workloads.sources.cache import cached
from harness.workloads.sources.data_folder import EMBEDDED_FOLDER
from harness.workloads.sources.images import Labels, balanced_subset
from harness.workloads.sources.publish import unpack

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".ppm", ".bmp", ".pgm", ".tif", ".tiff")
SOURCE = "https://image-net.org/challenges/LSVRC/2012 (after signing up)"


class ImageFiles(NamedTuple):
    """Paths and class numbers, class by class in the order of names."""

    paths: list[str]
    labels: Labels

    def limited(self, count: int) -> ImageFiles:
        """`count` images, as many of each class."""
        chosen = balanced_subset(self.labels, count)
        return ImageFiles([self.paths[index] for index in chosen], self.labels[chosen])


def list_images(folder: Path, classes: int, how_to_point: str) -> ImageFiles:
    """All images of a folder that has a folder for each class.

    Args:
        folder: `train` or `val`.
        classes: how many there must be.
        how_to_point: end of the error message about a missing folder.

    Raises:
        DataError: the folder is missing, has another number of classes, or a class without an image.
    """
    if not folder.is_dir():
        packed = folder.with_name(f"{folder.name}.tar").is_file()
        hint = f"name a folder of the node in KRONSCALE_STAGING to have {folder.name}.tar unpacked, "
        raise DataError(
            f"{folder} does not exist; imagenet reads train/<class>/*.JPEG and val/<class>/*.JPEG: "
            f"{hint if packed else f'get ILSVRC 2012 from {SOURCE}, '}{how_to_point}"
        )
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if len(names) != classes:
        raise DataError(
            f"{folder} must have {classes} folders of classes, got {len(names)}; complete them, or set "
            f"workload.options.classes: {len(names)} for another set of images"
        )
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = sorted(
            str(Path(parent, file))
            for parent, _, files in os.walk(folder / name, followlinks=True)
            for file in files
            if file.lower().endswith(SUFFIXES)
        )
        if not found:
            raise DataError(f"{folder / name} has no image; allowed are {', '.join(SUFFIXES)}")
        paths += found
        labels += [label] * len(found)
    return ImageFiles(paths, np.array(labels, np.int64))


def unpack_embedded() -> Path:
    """`train` and `test` of the 2,500 embedded images, as files in the cache."""
    packed = EMBEDDED_FOLDER / "cifar10.tar.xz"

    def prepare(folder: Path) -> None:
        with tarfile.open(packed) as archive:
            unpack(archive, folder)

    key = hashlib.sha256(packed.read_bytes()).hexdigest()[:10]
    return cached(f"photos-{key}", prepare, "the embedded images")
