"""COCO's annotations (Lin et al. 2014): the objects of each image (no torch).

The rules are those of torchvision's reference training: crowds and boxes without an area are not trained on,
nor are images without annotations.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.errors import DataError
from harness.workloads.sources.extras import import_extra

SOURCE = "https://cocodataset.org/#download"
AGAIN = f"get it again from {SOURCE}"

Array = np.ndarray[Any, Any]


class Objects(NamedTuple):
    """The objects of one image of H x W pixels.

    Attributes:
        boxes: float32 `[n, 4]`: left, top, right, bottom in pixels.
        labels: int64 `[n]`, from 1; 0 is the background.
        masks: uint8 `[n, H, W]`, one inside the object.
    """

    boxes: Array
    labels: Array
    masks: Array

    def mirrored(self) -> Objects:
        """The objects of the image with left and right exchanged."""
        width = self.masks.shape[2]
        left, top, right, bottom = self.boxes.T
        boxes = np.stack([width - right, top, width - left, bottom], axis=1)
        return Objects(boxes, self.labels, np.ascontiguousarray(self.masks[:, :, ::-1]))


class Annotations:
    """A checked set of annotations.

    Args:
        content: of a file in COCO's format; `iscrowd` and `area`, which some tools omit, are filled in, and
            objects are numbered from 1, because COCOeval takes 0 for none.
        name: the file, for error messages.
        classes: how many categories there must be.

    Attributes:
        coco: pycocotools' index of them.
        categories: COCO's id of each class, ascending; label `k` is `categories[k - 1]`.
        ids: of all images, ascending.

    Raises:
        DataError: something is missing, or refers to an image or category that does not exist.
    """

    def __init__(self, content: Any, name: str, classes: int) -> None:
        _check(content, name, classes)
        self.name = name
        self.coco = _indexed(content)
        self.categories: list[int] = sorted(self.coco.cats)
        self.ids: list[int] = sorted(self.coco.imgs)
        self._labels = {category: label for label, category in enumerate(self.categories, 1)}

    def trainable(self) -> list[int]:
        """Images with an annotation whose box is more than a pixel wide and high."""
        return [
            number
            for number in self.ids
            if any(min(entry["bbox"][2:]) > 1 for entry in self.coco.imgToAnns.get(number, ()))
        ]

    def file_name(self, number: int) -> str:
        """The image's file."""
        return str(self.coco.imgs[number]["file_name"])

    def size(self, number: int) -> tuple[int, int]:
        """Width and height of the image."""
        image = self.coco.imgs[number]
        return image["width"], image["height"]

    def objects(self, number: int) -> Objects:
        """The objects of an image.

        Raises:
            DataError: a mask is neither polygons nor run lengths.
        """
        width, height = self.size(number)
        entries = [entry for entry in self.coco.imgToAnns.get(number, ()) if not entry["iscrowd"]]
        boxes = np.array([entry["bbox"] for entry in entries], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        np.clip(boxes[:, 0::2], 0, width, out=boxes[:, 0::2])
        np.clip(boxes[:, 1::2], 0, height, out=boxes[:, 1::2])
        valid = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        kept = [entry for entry, keep in zip(entries, valid, strict=True) if keep]
        masks = np.zeros((len(kept), height, width), np.uint8)
        for mask, entry in zip(masks, kept, strict=True):
            mask[:] = self._mask(entry, mask.shape)
        labels = np.array([self._labels[entry["category_id"]] for entry in kept], np.int64)
        return Objects(boxes[valid], labels, masks)

    def _mask(self, entry: dict[str, Any], shape: tuple[int, ...]) -> Array:
        try:
            mask: Array = self.coco.annToMask(entry).reshape(shape)
        except Exception as error:  # pycocotools raises many kinds
            raise DataError(
                f"{self.name}: image {entry['image_id']} has an object without a readable mask "
                f"({_one_line(error)}); {AGAIN}"
            ) from None
        return mask


def read_annotations(path: Path, classes: int, hint: str) -> Annotations:
    """The annotations of a file.

    Args:
        path: the file.
        classes: how many categories there must be.
        hint: end of the error message about a missing file.

    Raises:
        DataError: it is missing, truncated, of another kind, or has another number of categories.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist; coco reads annotations/instances_train2017.json, train2017/*.jpg and "
            f"the same of val2017 (or 2014): get them from {SOURCE}, {hint}"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # also bytes that are not text
        raise DataError(f"{path} is not readable JSON ({_one_line(error)}); {AGAIN}") from None
    return Annotations(content, str(path), classes)


def same_categories(train: Annotations, test: Annotations) -> None:
    """Raises: DataError: the two sets number their classes differently."""
    if train.categories != test.categories:
        unmatched = sorted(set(train.categories) ^ set(test.categories))
        raise DataError(f"{test.name}: category {unmatched[0]} must be in both this file and {train.name}")


def _indexed(content: Mapping[str, Any]) -> Any:
    coco = import_extra("pycocotools.coco", "workload coco", "detection").COCO()
    coco.dataset = content
    with redirect_stdout(io.StringIO()):  # it prints its progress
        coco.createIndex()
    return coco


_REQUIRED = {
    "images": ("id", "file_name", "width", "height"),
    "categories": ("id",),
    "annotations": ("image_id", "category_id", "bbox", "segmentation"),
}

_INTEGERS = {"id", "width", "height", "image_id", "category_id"}


def _check(content: Any, name: str, classes: int) -> None:
    for part, keys in _REQUIRED.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise DataError(f"{name} must be a file of COCO's instances, but has no list {part!r}; {AGAIN}")
        for index, entry in enumerate(entries):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise DataError(f"{name}: {part}[{index}] has no {missing[0]}; {AGAIN}")
            invalid = [key for key in keys if key in _INTEGERS and type(entry[key]) is not int]
            if invalid:
                got = entry[invalid[0]]
                raise DataError(
                    f"{name}: {part}[{index}].{invalid[0]} must be a whole number, got {got!r}; {AGAIN}"
                )
    images, categories = (_ids(content[part], name, part) for part in ("images", "categories"))
    if len(categories) != classes:
        raise DataError(
            f"{name} must have {classes} categories, got {len(categories)}; get the annotations of "
            f"instances, or set workload.options.classes: {len(categories)}"
        )
    for number, entry in enumerate(content["annotations"], 1):
        where = f"{name}: annotations[{number - 1}]"
        for key, known in (("image_id", images), ("category_id", categories)):
            if entry[key] not in known:
                raise DataError(f"{where}.{key} must be a listed {key[:-3]}, got {entry[key]}; {AGAIN}")
        box = entry["bbox"]
        if not (isinstance(box, list) and len(box) == 4 and all(isinstance(x, int | float) for x in box)):
            raise DataError(f"{where}.bbox must be left, top, width and height, got {box}; {AGAIN}")
        entry["id"] = number
        entry.setdefault("iscrowd", 0)
        entry.setdefault("area", box[2] * box[3])


def _ids(entries: Sequence[Mapping[str, Any]], name: str, part: str) -> set[int]:
    counts = Counter(entry["id"] for entry in entries)
    repeated = [number for number, count in counts.items() if count > 1]
    if repeated:
        raise DataError(f"{name}: {part} have id {repeated[0]} more than once; {AGAIN}")
    return set(counts)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
