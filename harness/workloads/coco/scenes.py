"""Annotated images that need no download: scenes composed of real handwritten digits, and made-up noise.

A scene is no photograph: two to four of scikit-learn's digits (`harness.workloads.digits`), enlarged and
coloured, on a plain ground. Training scenes hold training digits alone: none of them is met again in a test
scene. What a scene shows is a matter of its number.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np

from harness.workloads.cards.detection import DIGITS, SCENE_TEST, SCENE_TRAIN
from harness.workloads.digits import split_digits

SIDE = 96  # pixels of a scene
ENLARGED = (2, 3, 4)  # times 8 pixels
INK = 0.25  # brightness, of 1, from which on a pixel belongs to its digit
GAP = 2  # pixels that digits keep from each other
TRIES = 40

Array = np.ndarray[Any, Any]


class Pictures(NamedTuple):
    """A data set in memory.

    Attributes:
        content: its annotations, as a file in COCO's format holds them; image i has id i.
        pixels: of each image, uint8 `[H, W, 3]`.
    """

    content: dict[str, Any]
    pixels: list[Array]


def digit_scenes() -> tuple[Pictures, Pictures]:
    """Training and test scenes; category 10 is the digit zero, for COCO's ids begin at 1."""
    train, test = split_digits()
    return _scenes("train", SCENE_TRAIN, *train), _scenes("test", SCENE_TEST, *test)


def noise(count: int, width: int, height: int, classes: int, objects: int, seed: int) -> Pictures:
    """Random pixels, and boxes filled to the brim: nothing to learn, the same work."""
    draws = np.random.default_rng(seed)
    pixels = [draws.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]
    annotations = []
    for image in range(count):
        for _ in range(objects):
            w, h = (int(draws.integers(side // 8, side // 2)) for side in (width, height))
            left, top = int(draws.integers(0, width - w)), int(draws.integers(0, height - h))
            corners = [left, top, left + w, top, left + w, top + h, left, top + h]
            annotations.append(
                {
                    "image_id": image, "category_id": int(draws.integers(1, classes + 1)),
                    "bbox": [left, top, w, h], "area": w * h, "iscrowd": 0, "segmentation": [corners],
                }
            )  # fmt: skip
    return Pictures(_content(pixels, annotations, classes), pixels)


def run_lengths(mask: Array) -> dict[str, Any]:
    """COCO's uncompressed code of a mask `[H, W]`: lengths of zeros, ones, zeros, ..., column by column."""
    flat = mask.astype(bool).T.ravel()
    bounds = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff([0, *bounds, len(flat)]).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


def _scenes(split: str, count: int, brightness: Any, digits: Any) -> Pictures:
    shapes, kinds = brightness[:, 0].numpy(), digits.tolist()
    pixels, annotations = [], []
    for number in range(count):
        canvas, found = _scene(Random(f"{split} scene {number}"), shapes)  # noqa: S311  no secret
        pixels.append(canvas)
        for index, mask in found:
            (top, bottom), (left, right) = (_extent(mask, across) for across in (1, 0))
            annotations.append(
                {
                    "image_id": number, "category_id": kinds[index] or DIGITS,
                    "bbox": [left, top, right - left, bottom - top], "area": int(mask.sum()), "iscrowd": 0,
                    "segmentation": run_lengths(mask), "source": index,
                }
            )  # fmt: skip
    return Pictures(_content(pixels, annotations, DIGITS), pixels)


def _scene(draws: Random, shapes: Array) -> tuple[Array, list[tuple[int, Array]]]:
    """A scene's pixels, and the number and the mask `[SIDE, SIDE]` of each digit in it."""
    canvas = np.empty((SIDE, SIDE, 3), np.uint8)
    canvas[:] = [draws.randrange(0, 80) for _ in range(3)]
    taken = np.zeros((SIDE, SIDE), bool)
    found = []
    for _ in range(draws.randint(2, 4)):
        index = draws.randrange(len(shapes))
        times = draws.choice(ENLARGED)
        ink = np.kron(shapes[index], np.ones((times, times), shapes.dtype))
        colour = np.array([draws.randrange(120, 256) for _ in range(3)])
        place = _free_place(draws, taken, len(ink))
        if place is None:
            continue
        top, left = place
        here = slice(top, top + len(ink)), slice(left, left + len(ink))
        inside = ink >= INK
        canvas[here][inside] = (ink[inside][:, None] * colour).astype(np.uint8)
        taken[here] = True
        mask = np.zeros((SIDE, SIDE), bool)
        mask[here] = inside
        found.append((index, mask))
    return canvas, found


def _free_place(draws: Random, taken: Array, size: int) -> tuple[int, int] | None:
    """Top and left of a square with nothing in it and around it, if some tries find one."""
    for _ in range(TRIES):
        top, left = draws.randint(0, SIDE - size), draws.randint(0, SIDE - size)
        around = taken[max(0, top - GAP) : top + size + GAP, max(0, left - GAP) : left + size + GAP]
        if not around.any():
            return top, left
    return None


def _extent(mask: Array, across: int) -> tuple[int, int]:
    places = np.flatnonzero(mask.any(across))
    return int(places[0]), int(places[-1]) + 1


def _content(pixels: list[Array], annotations: list[dict[str, Any]], classes: int) -> dict[str, Any]:
    images = [
        {"id": number, "file_name": f"{number}.png", "height": len(image), "width": len(image[0])}
        for number, image in enumerate(pixels)
    ]
    categories = [{"id": number, "name": str(number)} for number in range(1, classes + 1)]
    return {"images": images, "annotations": annotations, "categories": categories}
