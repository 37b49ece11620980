"""The slices of each patient, from files, from scenes of digits, or random (no torch).

The published files (LGG, https://www.kaggle.com/datasets/mateuszbuda/lgg-mri-segmentation) are one folder for
each of 110 patients with `<patient>_<number>.tif` and `<patient>_<number>_mask.tif`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from harness.errors import DataError
from harness.workloads.coco.scenes import Pictures, digit_scenes
from harness.workloads.sources.images import read_image

SOURCE = "https://www.kaggle.com/datasets/mateuszbuda/lgg-mri-segmentation"
SPLIT_SEED = 42  # as published; the patients drawn from other folders differ

Array = np.ndarray[Any, Any]


class Patient(NamedTuple):
    """The slices of one patient.

    Attributes:
        name: of the folder.
        pixels: uint8 `[N, side, side, 3]`.
        masks: bool `[N, side, side]`.
    """

    name: str
    pixels: Array
    masks: Array


Split = tuple[list[Patient], list[Patient]]
"""Training and held-out patients."""


def split_patients(root: Path, held_out: int, side: int, how_to_point: str) -> Split:
    """Training and held-out patients of a folder, `held_out` of them by a fixed seed.

    The first and the last slice of a patient are left out, as published.

    Raises:
        DataError: the folder is missing or has too few patients, or a file is missing or damaged.
    """
    if not root.is_dir():
        raise DataError(f"{root} does not exist; get the files from {SOURCE}, {how_to_point}")
    if (root / "kaggle_3m").is_dir():
        root = root / "kaggle_3m"
    folders = sorted(Path(entry.path) for entry in os.scandir(root) if entry.is_dir())
    if len(folders) <= held_out:
        raise DataError(
            f"{root} must have more folders of patients than the {held_out} that "
            f"workload.options.test_patients holds out, got {len(folders)}; get the files from {SOURCE}, "
            f"{how_to_point}"
        )
    chosen = set(Random(SPLIT_SEED).sample(range(len(folders)), held_out))  # noqa: S311  not a secret
    patients = [_read_patient(folder, side) for folder in folders]
    return (
        [patient for number, patient in enumerate(patients) if number not in chosen],
        [patient for number, patient in enumerate(patients) if number in chosen],
    )


def scenes() -> Split:
    """Scenes of real digits, and where their ink is: one patient to train on, one for each test scene."""
    train, test = (_slices(pictures) for pictures in digit_scenes())
    return [Patient("scenes", *train)], [
        Patient(f"scene {number}", pixels[None], mask[None])
        for number, (pixels, mask) in enumerate(zip(*test, strict=True))
    ]


def random_pixels(count: int, side: int) -> Split:
    """Nothing to learn, the same work."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    patient = Patient("random", pixels, pixels[..., 0] > 200)
    return [patient], [Patient("random", pixels[:1], patient.masks[:1])]


def _read_patient(folder: Path, side: int) -> Patient:
    masks = sorted(folder.glob("*_mask.tif"), key=_number)
    if len(masks) < 3:
        raise DataError(
            f"{folder} must have <name>_<number>_mask.tif of three slices or more, got {len(masks)}"
        )
    pixels, inside = [], []
    for path in masks[1:-1]:
        image = path.with_name(path.name.replace("_mask.tif", ".tif"))
        pixels.append(_resized(image, side, Image.Resampling.BILINEAR))
        inside.append(_resized(path, side, Image.Resampling.NEAREST)[..., 0] > 127)
    return Patient(folder.name, np.stack(pixels), np.stack(inside))


def _number(path: Path) -> int:
    """Of a slice: 12 of `TCGA_CS_4944_20010208_12_mask.tif`."""
    number = path.name.removesuffix("_mask.tif").rpartition("_")[2]
    if not number.isdecimal():
        raise DataError(f"{path} must end with _<number>_mask.tif")
    return int(number)


def _resized(path: Path, side: int, how: Image.Resampling) -> Array:
    """Bytes `[side, side, 3]`; an image that is not square gets black edges."""
    image = read_image(str(path), SOURCE)
    longest = max(image.size)
    if image.size != (longest, longest):
        square = Image.new("RGB", (longest, longest))
        square.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
        image = square
    return np.asarray(image.resize((side, side), how))


def _slices(pictures: Pictures) -> tuple[Array, Array]:
    pixels = np.stack(pictures.pixels)
    masks = np.zeros(pixels.shape[:3], bool)
    for one in pictures.content["annotations"]:
        masks[one["image_id"]] |= _filled(one["segmentation"]["counts"], masks.shape[1:])
    return pixels, masks


def _filled(counts: Iterable[int], shape: tuple[int, ...]) -> Array:
    """The mask of COCO's run lengths, which go column by column and begin with the zeros."""
    values = [bool(number % 2) for number, _ in enumerate(counts)]
    return np.repeat(values, list(counts)).reshape(shape[::-1]).T
