"""A folder in COCO's layout, small: the package's images enlarged to odd sizes, objects of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from harness.workloads.coco.coco import Coco, build
from tests.harness.workloads.batch_files import embedded, options, share

CATEGORIES = (3, 18, 90)  # COCO's have gaps too
TRAIN, TEST = 14, 5
EMPTY, SLIVERS = 3, 5  # images of the training set: without an object, with slivers alone
TRAINABLE = TRAIN - 2
LIMITS = {"classes": len(CATEGORIES), "train_examples": TRAINABLE, "workers": 0}


def write_coco(root: Path, year: int = 2017) -> Path:
    """`train2017`, `val2017` and their annotations."""
    pixels, number = embedded()[0].pixels, 0
    draws = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    for split, count in ((f"train{year}", TRAIN), (f"val{year}", TEST)):
        (root / split).mkdir()
        images, annotations = [], []
        for place in range(count):
            width, height = (int(side) for side in draws.integers(40, 70, 2))
            image = Image.fromarray(pixels[number].transpose(1, 2, 0)).resize((width, height))
            if place == 2:
                image = image.convert("L")  # COCO has grey images
            number += 1
            name = f"{100 + 7 * place:012}.jpg"
            image.save(root / split / name, quality=95)
            images.append({"id": 100 + 7 * place, "file_name": name, "width": width, "height": height})
            annotations += objects_of(split, place, 100 + 7 * place, width, height)
        for index, annotation in enumerate(annotations):
            annotation["id"] = index  # from 0 on, which COCOeval takes for none
        content = {
            "images": images[::-1],
            "annotations": annotations,
            "categories": [{"id": category, "name": str(category)} for category in CATEGORIES],
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def objects_of(split: str, place: int, image: int, width: int, height: int) -> list[dict[str, Any]]:
    """Polygons, an object of two parts, run lengths, a box beyond the edge, a crowd, an empty box."""
    if split.startswith("train") and place == EMPTY:
        return []
    if split.startswith("train") and place == SLIVERS:
        return [annotation(image, 3, [5, 5, 0.5, 20], [[5, 5, 5.5, 5, 5.5, 25]])]
    near = 5 + place % 4
    square = [near, 6, near + 12, 6, near + 12, 18.5, near, 18.5]
    corner = [20, 25, 30, 25, 25, 34]
    beyond = [width - 8, 3, width + 4, 3, width + 4, 12, width - 8, 12]
    whole = np.zeros((height, width), bool)
    whole[20:30, 4 : 10 + place] = True
    found = [
        annotation(image, 18, [near, 6, 12, 12.5], [square]),
        annotation(image, 90, [near, 6, 25, 28], [square, corner]),
        annotation(image, 3, [width - 8, 3, 12, 9], [beyond]),
        annotation(image, 3, [4, 20, 6 + place, 10], lengths(whole)),
        annotation(image, 18, [0, 0, width, height], lengths(np.ones((height, width), bool)), crowd=1),
        annotation(image, 18, [10, 10, 0, 5], [square]),
    ]
    return found[place % 3 :] if place % 4 else found


def annotation(
    image: int, category: int, box: list[float], segmentation: Any, crowd: int = 0
) -> dict[str, Any]:
    """One object as COCO writes it."""
    return {
        "image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3] + 1.0,
        "segmentation": segmentation, "iscrowd": crowd,
    }  # fmt: skip


def lengths(mask: np.ndarray) -> dict[str, Any]:
    """Run lengths by definition: pixel after pixel, down the columns, zeros first."""
    counts, value = [0], False
    for pixel in mask.T.ravel().tolist():
        if pixel != value:
            counts.append(0)
            value = pixel
        counts[-1] += 1
    return {"size": list(mask.shape), "counts": counts}


def coco(root: Path | str, rank: int = 0, world_size: int = 1, batch: int = 6, **changes: Any) -> Coco:
    """The workload on that folder."""
    asked = options("coco", **{**LIMITS, "data": str(root), **changes})
    return build(asked, share(rank, world_size, batch))


def equal(some: Any, others: Any) -> bool:
    """Whether two batches, or lists of them, are the same to the last bit."""
    if isinstance(some, torch.Tensor):
        return torch.equal(some, others)
    if isinstance(some, dict):
        return some.keys() == others.keys() and all(equal(some[key], others[key]) for key in some)
    return len(some) == len(others) and all(equal(*pair) for pair in zip(some, others, strict=True))
