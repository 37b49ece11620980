"""COCO's annotations (Lin et al. 2014): which objects are where in which image (no torch).

The rules are those of torchvision's reference training: crowds and boxes without an area are no objects to be
learned, and images in which nobody has annotated anything are not trained on.
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

SOURCE = "https://cocodataset.org/#download"
AGAIN = f"get it again from {SOURCE}"

Array = np.ndarray[Any, Any]


class Objects(NamedTuple):
    """The objects of one image of H x W pixels.

    Attributes:
        boxes: float32 `[n, 4]`: left, top, right, bottom in pixels.
        labels: int64 `[n]`, from 1 on; 0 is the background.
        masks: uint8 `[n, H, W]`, one inside.
    """

    boxes: Array
    labels: Array
    masks: Array

    def mirrored(self) -> Objects:
        """Left and right changed."""
        width = self.masks.shape[2]
        left, top, right, bottom = self.boxes.T
        boxes = np.stack([width - right, top, width - left, bottom], axis=1)
        return Objects(boxes, self.labels, np.ascontiguousarray(self.masks[:, :, ::-1]))


class Annotations:
    """A checked set of annotations.

    Args:
        content: what a file in COCO's format holds; `iscrowd` and `area`, which some tools leave out, are
            filled in, and objects numbered from 1 on, as COCOeval takes number 0 for none.
        name: the file, for messages.
        classes: how many categories there have to be.

    Attributes:
        coco: pycocotools' index of them.
        categories: COCO's id of each class, in ascending order; label `k` is `categories[k - 1]`.
        ids: of all images, in ascending order.

    Raises:
        DataError: something is missing, or refers to what is not there.
    """

    def __init__(self, content: Any, name: str, classes: int) -> None:
        _check(content, name, classes)
        self.name = name
        self.coco = _indexed(content)
        self.categories: list[int] = sorted(self.coco.cats)
        self.ids: list[int] = sorted(self.coco.imgs)
        self._labels = {category: label for label, category in enumerate(self.categories, 1)}

    def trainable(self) -> list[int]:
        """Images with an annotation, and not only ones whose box is a pixel wide or high or less."""
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
        """What is to be found in an image.

        Raises:
            DataError: a mask is neither polygons nor run lengths.
        """
        width, height = self.size(number)
        entries = [entry for entry in self.coco.imgToAnns.get(number, ()) if not entry["iscrowd"]]
        boxes = np.array([entry["bbox"] for entry in entries], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        np.clip(boxes[:, 0::2], 0, width, out=boxes[:, 0::2])
        np.clip(boxes[:, 1::2], 0, height, out=boxes[:, 1::2])
        whole = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        kept = [entry for entry, keeps in zip(entries, whole, strict=True) if keeps]
        masks = np.zeros((len(kept), height, width), np.uint8)
        for mask, entry in zip(masks, kept, strict=True):
            mask[:] = self._mask(entry, mask.shape)
        labels = np.array([self._labels[entry["category_id"]] for entry in kept], np.int64)
        return Objects(boxes[whole], labels, masks)

    def _mask(self, entry: dict[str, Any], shape: tuple[int, ...]) -> Array:
        try:
            mask: Array = self.coco.annToMask(entry).reshape(shape)
        # what pycocotools raises for shapes of other kinds and for polygons that are none
        except Exception as error:
            raise DataError(
                f"{self.name}: image {entry['image_id']} has an object without a readable mask "
                f"({_first_line(error)}); {AGAIN}"
            ) from None
        return mask


def read_annotations(path: Path, classes: int, hint: str) -> Annotations:
    """The annotations of a file; `hint` ends the sentence about one that is not there.

    Raises:
        DataError: it is missing, cut short, of another kind, or has other than `classes` categories.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path} is not there; coco reads annotations/instances_train2017.json, train2017/*.jpg and the "
            f"same of val2017 (or 2014): get them from {SOURCE}, {hint}"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # also bytes that are no text
        raise DataError(f"{path}: no readable JSON ({_first_line(error)}); {AGAIN}") from None
    return Annotations(content, str(path), classes)


def same_categories(train: Annotations, test: Annotations) -> None:
    """Raises: DataError: the two sets number their classes differently."""
    if train.categories != test.categories:
        odd = sorted(set(train.categories) ^ set(test.categories))
        raise DataError(f"{test.name}: category {odd[0]} is not in both this file and {train.name}")


def _indexed(content: Mapping[str, Any]) -> Any:
    try:
        from pycocotools.coco import COCO  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise ModuleNotFoundError(
            f"workload coco needs pycocotools: pip install 'kronscale[detection]' ({_first_line(error)})"
        ) from None
    coco = COCO()
    coco.dataset = content
    with redirect_stdout(io.StringIO()):  # it reports its progress there
        coco.createIndex()
    return coco


_NEEDED = {
    "images": ("id", "file_name", "width", "height"),
    "categories": ("id",),
    "annotations": ("image_id", "category_id", "bbox", "segmentation"),
}

_WHOLE = {"id", "width", "height", "image_id", "category_id"}


def _check(content: Any, name: str, classes: int) -> None:
    for part, keys in _NEEDED.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise DataError(f"{name}: has no list of {part}, expected COCO's instances; {AGAIN}")
        for place, entry in enumerate(entries):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise DataError(f"{name}: {part}[{place}] has no {missing[0]}; {AGAIN}")
            odd = [key for key in keys if key in _WHOLE and type(entry[key]) is not int]
            if odd:
                said = f"{odd[0]}={entry[odd[0]]!r}, no whole number"
                raise DataError(f"{name}: {part}[{place}] has {said}; {AGAIN}")
    images, categories = (_ids(content[part], name, part) for part in ("images", "categories"))
    if len(categories) != classes:
        raise DataError(
            f"{name}: {len(categories)} categories, {classes} expected; get the annotations of instances, or "
            f"set workload.options.classes: {len(categories)}"
        )
    for number, entry in enumerate(content["annotations"], 1):
        where = f"{name}: annotations[{number - 1}]"
        for key, there in (("image_id", images), ("category_id", categories)):
            if entry[key] not in there:
                named = f"{key}={entry[key]}, which is no {key[:-3]}"
                raise DataError(f"{where} has {named} of this file; {AGAIN}")
        box = entry["bbox"]
        if not (isinstance(box, list) and len(box) == 4 and all(isinstance(x, int | float) for x in box)):
            raise DataError(f"{where} has bbox={box}, not left, top, width and height; {AGAIN}")
        entry["id"] = number
        entry.setdefault("iscrowd", 0)
        entry.setdefault("area", box[2] * box[3])


def _ids(entries: Sequence[Mapping[str, Any]], name: str, part: str) -> set[int]:
    counts = Counter(entry["id"] for entry in entries)
    twice = [number for number, count in counts.items() if count > 1]
    if twice:
        raise DataError(f"{name}: {part} have id {twice[0]} more than once; {AGAIN}")
    return set(counts)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
