"""A small folder of images such as ImageNet's: the package's images enlarged to odd sizes."""

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
