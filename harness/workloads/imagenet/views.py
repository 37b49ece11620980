"""Crops of an image for training and testing (no torch).

They are those of torchvision's reference training, bit for bit for the same random numbers: random resized
crop and mirror for training, the centre for testing. torchvision's own cannot be used: their random numbers
must be a function of seed, epoch and example, and torchvision works only with the torch that it was built
for.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
from PIL import Image

AREA = (0.08, 1.0)  # of the image that a crop takes, and
ASPECT = (3 / 4, 4 / 3)  # its width by its height (Szegedy et al. 2015, section 6)
TRIES = 10
CENTRE = 0.875  # of the shorter side that a test image keeps: 224 of 256, 299 of 342

Box = tuple[int, int, int, int]
View = np.ndarray[Any, np.dtype[np.uint8]]


def training_view(image: Image.Image, size: int, random: Random) -> View:
    """A random crop, mirrored with probability 1/2: uint8 `[size, size, 3]`."""
    left, top, width, height = random_box(image.width, image.height, random)
    crop = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
    view = np.asarray(crop)
    return np.ascontiguousarray(view[:, ::-1]) if random.random() < 0.5 else view


def random_box(width: int, height: int, random: Random) -> Box:
    """Left, top, width and height of a crop of 8 to 100 % of the area, with an aspect of 3:4 to 4:3."""
    for _ in range(TRIES):
        area = width * height * random.uniform(*AREA)
        aspect = math.exp(random.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    w = min(width, round(height * ASPECT[1]))  # no crop fits: the centre, with the nearest allowed aspect
    h = min(height, round(width / ASPECT[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def centre_view(image: Image.Image, size: int) -> View:
    """The centre of the image: uint8 `[size, size, 3]`."""
    short = round(size / CENTRE)
    width, height = image.size
    portrait = width <= height
    scaled = (short, int(short * height / width)) if portrait else (int(short * width / height), short)
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (round((side - size) / 2) for side in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)))
