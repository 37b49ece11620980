"""Annotated images that need no download: scenes of real handwritten digits, and random pixels.

A scene shows two to four of scikit-learn's digits (`harness.workloads.digits`), enlarged and coloured, on a
uniform background. Training scenes have training digits only, so that none occurs in a test scene too. A
scene is a function of its number.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np

from harness.workloads.coco import SCENE_CLASSES, SCENE_TEST, SCENE_TRAIN
from harness.workloads.digits.digits import split_digits

SIDE = 96  # pixels of a scene
SCALES = (2, 3, 4)  # of a digit of 8 pixels
THRESHOLD = 0.25  # least brightness, of 1, of a pixel of its digit
GAP = 2  # least pixels between two digits
TRIES = 40

Array = np.ndarray[Any, Any]


class Pictures(NamedTuple):
    """A data set in memory.

    Attributes:
        content: its annotations, as in a file in COCO's format; image i has id i.
        pixels: of each image, uint8 `[H, W, 3]`.
    """

    content: dict[str, Any]
    pixels: list[Array]


def digit_scenes() -> tuple[Pictures, Pictures]:
    """Training and test scenes; category 10 is the digit zero, because COCO's ids begin at 1."""
    train, test = split_digits()
    return _scenes("train", SCENE_TRAIN, *train), _scenes("test", SCENE_TEST, *test)


def noise(count: int, width: int, height: int, classes: int, objects: int, seed: int) -> Pictures:
    """Random pixels, with boxes that their masks fill: nothing to learn, the same work."""
    generator = np.random.default_rng(seed)
    pixels = [generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]
    annotations = []
    for image in range(count):
        for _ in range(objects):
            w, h = (int(generator.integers(side // 8, side // 2)) for side in (width, height))
            left, top = int(generator.integers(0, width - w)), int(generator.integers(0, height - h))
            corners = [left, top, left + w, top, left + w, top + h, left, top + h]
            annotations.append(
                {
                    "image_id": image, "category_id": int(generator.integers(1, classes + 1)),
                    "bbox": [left, top, w, h], "area": w * h, "iscrowd": 0, "segmentation": [corners],
                }
            )  # fmt: skip
    return Pictures(_content(pixels, annotations, classes), pixels)


def run_lengths(mask: Array) -> dict[str, Any]:
    """A mask `[H, W]` in COCO's uncompressed run lengths: of zeros, ones, zeros, ..., column by column."""
    flat = mask.astype(bool).T.ravel()
    bounds = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff([0, *bounds, len(flat)]).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


def _scenes(split: str, count: int, brightness: Any, digits: Any) -> Pictures:
    shapes, classes = brightness[:, 0].numpy(), digits.tolist()
    pixels, annotations = [], []
    for number in range(count):
        canvas, objects = _scene(Random(f"{split} scene {number}"), shapes)  # noqa: S311  not a secret
        pixels.append(canvas)
        for index, mask in objects:
            (top, bottom), (left, right) = (_extent(mask, axis) for axis in (1, 0))
            annotations.append(
                {
                    "image_id": number, "category_id": classes[index] or SCENE_CLASSES,
                    "bbox": [left, top, right - left, bottom - top], "area": int(mask.sum()), "iscrowd": 0,
                    "segmentation": run_lengths(mask), "source": index,
                }
            )  # fmt: skip
    return Pictures(_content(pixels, annotations, SCENE_CLASSES), pixels)


def _scene(random: Random, shapes: Array) -> tuple[Array, list[tuple[int, Array]]]:
    """A scene's pixels, and the index and the mask `[SIDE, SIDE]` of each digit in it."""
    canvas = np.empty((SIDE, SIDE, 3), np.uint8)
    canvas[:] = [random.randrange(0, 80) for _ in range(3)]
    taken = np.zeros((SIDE, SIDE), bool)
    objects = []
    for _ in range(random.randint(2, 4)):
        index = random.randrange(len(shapes))
        scale = random.choice(SCALES)
        ink = np.kron(shapes[index], np.ones((scale, scale), shapes.dtype))
        colour = np.array([random.randrange(120, 256) for _ in range(3)])
        corner = _free_corner(random, taken, len(ink))
        if corner is None:
            continue
        top, left = corner
        square = slice(top, top + len(ink)), slice(left, left + len(ink))
        inside = ink >= THRESHOLD
        canvas[square][inside] = (ink[inside][:, None] * colour).astype(np.uint8)
        taken[square] = True
        mask = np.zeros((SIDE, SIDE), bool)
        mask[square] = inside
        objects.append((index, mask))
    return canvas, objects


def _free_corner(random: Random, taken: Array, size: int) -> tuple[int, int] | None:
    """Top and left of a square that is free, as is a gap around it; None after too many tries."""
    for _ in range(TRIES):
        top, left = random.randint(0, SIDE - size), random.randint(0, SIDE - size)
        around = taken[max(0, top - GAP) : top + size + GAP, max(0, left - GAP) : left + size + GAP]
        if not around.any():
            return top, left
    return None


def _extent(mask: Array, axis: int) -> tuple[int, int]:
    inside = np.flatnonzero(mask.any(axis))
    return int(inside[0]), int(inside[-1]) + 1


def _content(pixels: list[Array], annotations: list[dict[str, Any]], classes: int) -> dict[str, Any]:
    images = [
        {"id": number, "file_name": f"{number}.png", "height": len(image), "width": len(image[0])}
        for number, image in enumerate(pixels)
    ]
    categories = [{"id": number, "name": str(number)} for number in range(1, classes + 1)]
    return {"images": images, "annotations": annotations, "categories": categories}
