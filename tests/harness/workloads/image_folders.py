"""Small folders of images: the package's, enlarged to odd sizes, in ImageNet's layout; and of patients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from harness.workloads.imagenet.imagenet import ImageNet, build
from tests.harness.workloads.batch_files import embedded, options, share

CLASSES, TRAIN_EACH, TEST_EACH = 3, 8, 3
SIDE = 32
LIMITS = {
    "classes": CLASSES, "train_examples": CLASSES * TRAIN_EACH, "image_size": SIDE, "workers": 0,
}  # fmt: skip


def write_images(root: Path) -> Path:
    """`train` and `val` with a folder a class."""
    images = embedded()[0]
    sizes = np.random.default_rng(0).integers(34, 90, (1000, 2))
    number = 0
    for split, each in (("train", TRAIN_EACH), ("val", TEST_EACH)):
        for label in range(CLASSES):
            folder = root / split / f"n0000000{label}"
            folder.mkdir(parents=True)
            for _ in range(each):
                pixels = images.pixels[number].transpose(1, 2, 0)
                width, height = (int(side) for side in sizes[number])
                image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
                image.save(folder / f"{number:04}.JPEG", quality=95)
                number += 1
    Image.open(root / "train" / "n00000001" / "0008.JPEG").convert("L").save(
        root / "train" / "n00000001" / "0008.JPEG"
    )  # ImageNet has grey images, and some in cyan, magenta, yellow and black
    return root


def imagenet(root: Path, rank: int = 0, world_size: int = 1, batch: int = 12, **changes: Any) -> ImageNet:
    """The workload on that folder."""
    asked = options("imagenet", data=str(root), **{**LIMITS, **changes})
    return build(asked, share(rank, world_size, batch))


PATIENTS = {"image_size": 32, "width": 0.125, "test_patients": 2}  # options for what `write_patients` writes
SLICES = 12


def write_patients(root: Path) -> Path:
    """Patients as published; the pixels of slice n of patient p are 10 p + n, its mask is n columns wide."""
    for patient in range(4):
        name = f"TCGA_CS_{patient}_19990101"
        (root / "kaggle_3m" / name).mkdir(parents=True)
        for number in range(1, SLICES + 1):
            file = root / "kaggle_3m" / name / f"{name}_{number}.tif"
            pixels = np.full((32, 32, 3), 10 * patient + number, np.uint8)
            mask = np.zeros((32, 32), np.uint8)
            mask[:, :number] = 255
            Image.fromarray(pixels).save(file)
            Image.fromarray(mask).save(file.with_name(f"{name}_{number}_mask.tif"))
    return root
