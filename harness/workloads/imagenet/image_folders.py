"""Image files in a folder for each class; brings ImageNet's published files there (no torch).

Published are `ILSVRC2012_img_train.tar`, a tar of each class's tar; `ILSVRC2012_img_val.tar`, 50,000 images
without classes; and the development kit, which has the classes of those images: line `k` of
`data/ILSVRC2012_validation_ground_truth.txt` is the number of the class of `ILSVRC2012_val_<k>.JPEG`, and
`data/meta.mat` the WordNet id of each number.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.errors import DataError
from harness.workloads.sources.files import Labels, balanced_subset
from harness.workloads.sources.folders import EMBEDDED_FOLDER, cached, publish_folder, unpack

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


DEVKIT = "ILSVRC2012_devkit_t12"
TRAIN_TAR, VALIDATION_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_([0-9]{8})\.JPEG")

_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
_CLASS = re.compile(r"n[0-9]{8}")


def validation_classes(root: Path) -> list[str]:
    """The WordNet id of each validation image in order, from the development kit in `root`.

    Args:
        root: has the kit as a folder or as `.tar.gz`.

    Raises:
        DataError: the kit is missing or damaged.
    """
    truth, meta = (_kit_file(root, name) for name in (_TRUTH, _META))
    names = _class_names(root, meta)
    found = []
    for number, line in enumerate(truth.decode(errors="replace").split(), 1):
        if not line.isdecimal() or int(line) not in names:
            raise DataError(
                f"{root / DEVKIT / _TRUTH}, line {number}: must be the number of a class in {_META}, got "
                f"{line!r}; get the development kit again from {SOURCE}"
            )
        found.append(names[int(line)])
    return found


def unpack_training(root: Path) -> int:
    """Unpack the training images into `train/<class>/`, class by class; those that are complete are kept.

    Returns:
        Number of classes that were unpacked.

    Raises:
        DataError: the tar is damaged, or there is no space.
    """
    count = 0
    with _opened(root / TRAIN_TAR) as archive:
        for member in archive:
            name = member.name.removesuffix(".tar")
            if not _CLASS.fullmatch(name) or not member.isreg():
                raise DataError(f"{root / TRAIN_TAR}: {member.name!r} is not the tar of a class")
            if (root / "train" / name).is_dir():
                continue
            with tarfile.open(fileobj=archive.extractfile(member)) as inner:
                _publish_class(root / "train" / name, inner)
            count += 1
    return count


def sort_validation(root: Path) -> int:
    """Move validation images into `val/<class>/`, from `val/` itself or from the published tar.

    Repeating it continues what was interrupted.

    Returns:
        Number of images that were moved or unpacked.

    Raises:
        DataError: the development kit is missing, does not have an image, or an image lies in another class.
    """
    classes = validation_classes(root)
    val = root / "val"
    val.mkdir(exist_ok=True)
    for name in set(classes):
        (val / name).mkdir(exist_ok=True)
    for path in val.glob("*/ILSVRC2012_val_*.JPEG"):
        if path.parent.name != (right := _class_of(path.name, classes, root)):
            raise DataError(f"{path} must lie in {right}, the class that {DEVKIT} gives it; move it there")
    count = 0
    for path in sorted(val.glob("ILSVRC2012_val_*.JPEG")):
        path.rename(val / _class_of(path.name, classes, root) / path.name)
        count += 1
    if (root / VALIDATION_TAR).is_file():
        count += _unpack_validation(root, classes)
    return count


def _unpack_validation(root: Path, classes: list[str]) -> int:
    count = 0
    with _opened(root / VALIDATION_TAR) as archive:
        for member in archive:
            name = Path(member.name).name
            target = root / "val" / _class_of(name, classes, root) / name
            stream = archive.extractfile(member)
            if stream is None or (target.exists() and target.stat().st_size == member.size):
                continue
            temporary = target.with_name(f".{name}.part")
            with temporary.open("wb") as file:
                shutil.copyfileobj(stream, file)
            temporary.replace(target)
            count += 1
    return count


def _class_of(name: str, classes: list[str], root: Path) -> str:
    found = VALIDATION_IMAGE.fullmatch(name)
    number = int(found[1]) if found else 0
    if not 1 <= number <= len(classes):
        raise DataError(f"{name} is not one of the {len(classes)} validation images of {root / DEVKIT}")
    return classes[number - 1]


def _publish_class(target: Path, archive: tarfile.TarFile) -> None:
    publish_folder(
        target, lambda folder: unpack(archive, folder), what=f"class {target.name}",
        advice=f"free some space, or get {TRAIN_TAR} again from {SOURCE}",
    )  # fmt: skip


def _kit_file(root: Path, name: str) -> bytes:
    folder, packed = root / DEVKIT, root / f"{DEVKIT}.tar.gz"
    if (folder / name).is_file():
        return (folder / name).read_bytes()
    if not packed.is_file():
        raise DataError(f"{root} has no {DEVKIT}.tar.gz and no {folder / name}; get the kit from {SOURCE}")
    with _opened(packed) as archive:
        try:
            stream = archive.extractfile(f"{DEVKIT}/{name}")
        except KeyError:
            stream = None
        if stream is None:
            raise DataError(f"{packed} has no {DEVKIT}/{name}; get it again from {SOURCE}")
        return stream.read()


def _class_names(root: Path, meta: bytes) -> dict[int, str]:
    """WordNet id by class number; synsets with children are no classes."""
    from scipy.io import loadmat  # noqa: PLC0415  slow to load

    try:
        synsets: Any = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]  # type: ignore[arg-type]  # it takes open files
        rows = [(int(row[0]), str(row[1]), int(row[4])) for row in synsets]
    except Exception as error:  # scipy raises many kinds for damaged files
        raise DataError(
            f"{root / DEVKIT / _META} is damaged ({' '.join(str(error).split())[:100]}); get the development "
            f"kit again from {SOURCE}"
        ) from None
    return {number: name for number, name, children in rows if not children}


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path) as archive:
            yield archive
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; get it from {SOURCE}") from None
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(
            f"{path} cannot be unpacked ({' '.join(str(error).split())[:200]}); get it again from {SOURCE}, "
            "or free some space"
        ) from None
