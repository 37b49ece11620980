"""Photographs in a folder a class, as ImageNet is kept, and the views of them that a network sees (no torch).

The views are those of torchvision's reference training (random-resized crop and mirror; for tests the middle
of the image), bit for bit where the draws are the same. They are written out here because the draws have to
be a matter of seed, epoch and example, and because torchvision loads beside no build of torch but the one
that it was made for.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import tarfile
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from harness.errors import DataError
from harness.workloads.sources.archives import unpack as unpack_archive
from harness.workloads.sources.cache import cached
from harness.workloads.sources.parts import Labels, even_part

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".ppm", ".bmp", ".pgm", ".tif", ".tiff")
SOURCE = "https://image-net.org/challenges/LSVRC/2012 (after signing up)"

AREA = (0.08, 1.0)  # of the image that a crop takes, and
ASPECT = (3 / 4, 4 / 3)  # its width by its height (Szegedy et al. 2015, section 6)
TRIES = 10
MIDDLE = 0.875  # of the shorter side that a test image keeps: 224 of 256, 299 of 342

Box = tuple[int, int, int, int]
View = np.ndarray[Any, np.dtype[np.uint8]]


class Photos(NamedTuple):
    """Files and the number of their class, class by class in the order of names."""

    paths: list[str]
    labels: Labels

    def limited(self, count: int) -> Photos:
        """So many photographs, taken from every class in turn."""
        chosen = even_part(self.labels, count)
        return Photos([self.paths[index] for index in chosen], self.labels[chosen])


def list_photos(folder: Path, classes: int, how_to_point: str) -> Photos:
    """All photographs of a folder that has a folder for each class.

    `how_to_point` is the end of the sentence about a folder that is not there.

    Raises:
        DataError: there is no folder, another number of classes than `classes`, or a class without an image.
    """
    if not folder.is_dir():
        packed = folder.with_name(f"{folder.name}.tar").is_file()
        hint = "it lies packed beside: name a folder of the node in KRONSCALE_STAGING to have it unpacked, "
        raise DataError(
            f"{folder} is not there; imagenet reads train/<class>/*.JPEG and val/<class>/*.JPEG: "
            f"{hint if packed else f'get ILSVRC 2012 from {SOURCE}, '}{how_to_point}"
        )
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if len(names) != classes:
        raise DataError(
            f"{folder}: {len(names)} folders of classes, {classes} expected; complete them, or set "
            f"workload.options.classes: {len(names)} for another set of images"
        )
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = sorted(
            str(Path(where, file))
            for where, _, there in os.walk(folder / name, followlinks=True)
            for file in there
            if file.lower().endswith(SUFFIXES)
        )
        if not found:
            raise DataError(f"{folder / name}: no image in this class; allowed are {', '.join(SUFFIXES)}")
        paths += found
        labels += [label] * len(found)
    return Photos(paths, np.array(labels, np.int64))


def unpack_embedded() -> Path:
    """`train` and `test` of the 2,500 images that the package carries, as files in the cache."""
    packed = files("harness.workloads").joinpath("embedded", "cifar10.tar.xz").read_bytes()

    def unpack(folder: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            unpack_archive(archive, folder)

    key = hashlib.sha256(packed).hexdigest()[:10]
    return cached(f"photos-{key}", unpack, "the embedded images")


def read_photo(path: str, source: str = SOURCE) -> Image.Image:
    """The image in red, green and blue; `source` is where to get it again.

    Raises:
        DataError: it is missing, cut short or no image.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    # What Pillow raises for damaged files, by format and place of the damage.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{path}: no readable image ({said}); copy it again from {source}") from None


def training_view(image: Image.Image, size: int, draws: Random) -> View:
    """A random part of the image, mirrored in half of the cases: uint8 `[size, size, 3]`."""
    left, top, width, height = random_box(image.width, image.height, draws)
    part = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
    view = np.asarray(part)
    return np.ascontiguousarray(view[:, ::-1]) if draws.random() < 0.5 else view


def random_box(width: int, height: int, draws: Random) -> Box:
    """Left, top, width and height of a part of 8 to 100 % of the area, between 3:4 and 4:3."""
    for _ in range(TRIES):
        area = width * height * draws.uniform(*AREA)
        aspect = math.exp(draws.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return draws.randint(0, width - w), draws.randint(0, height - h), w, h
    w = min(width, round(height * ASPECT[1]))  # too long an image: its middle, as far as the aspect allows
    h = min(height, round(width / ASPECT[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def middle_view(image: Image.Image, size: int) -> View:
    """The middle of the image: uint8 `[size, size, 3]`."""
    short = round(size / MIDDLE)
    width, height = image.size
    upright = width <= height
    scaled = (short, int(short * height / width)) if upright else (int(short * width / height), short)
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (round((side - size) / 2) for side in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)))
