"""COCO's annotations (Lin et al. 2014): the objects of each image (no torch).

A rank keeps where each object stands in the file, and reads objects when it needs them: 118,287 images with
860,001 objects take tens of megabytes, not gigabytes. The cache of the host holds the file once for all of
its ranks.

The rules are those of torchvision's reference training: crowds and boxes without an area are not trained on,
nor are images without annotations.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.errors import DataError
from harness.workloads.coco.annotation_index import AGAIN, SOURCE, one_line, read_index
from harness.workloads.coco.json_lists import Buffer, FileBuffer, parse
from harness.workloads.sources.files import import_extra

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
        buffer: a file in COCO's format.
        name: the file, for error messages.
        classes: how many categories there must be.

    Attributes:
        categories: COCO's id of each class, ascending; label `k` is `categories[k - 1]`.
        ids: of all images, ascending.

    Raises:
        DataError: it is not JSON, something is missing, or an image or category is not listed.
    """

    def __init__(self, buffer: Buffer, name: str, classes: int) -> None:
        _coding()  # if it is missing, fail before the file is read
        self.name, self._buffer = name, buffer
        self._index = read_index(buffer, name, classes)
        self.categories, self.ids = self._index.categories, self._index.ids
        self._labels = {category: label for label, category in enumerate(self.categories, 1)}

    @classmethod
    def of(cls, content: Mapping[str, Any], name: str, classes: int) -> Annotations:
        """Annotations that were made in memory, in COCO's format."""
        return cls(json.dumps(content).encode(), name, classes)

    def trainable(self) -> list[int]:
        """Images with an annotation whose box is more than a pixel wide and high."""
        return [self.ids[place] for place in np.flatnonzero(self._index.trainable)]

    def file_name(self, number: int) -> str:
        """The image's file."""
        return str(self._read(self._index.images[self._place(number)])["file_name"])

    def size(self, number: int) -> tuple[int, int]:
        """Width and height of the image."""
        width, height = self._index.sizes[self._place(number)]
        return int(width), int(height)

    def entries(self, number: int) -> list[dict[str, Any]]:
        """The annotations of an image as in the file, in its order.

        Its `iscrowd` and `area`, which some tools omit, are filled in, and annotations are numbered from 1,
        because COCOeval takes 0 for none.
        """
        place = self._place(number)
        chosen = slice(*self._index.first[place : place + 2])
        found = []
        for span, order in zip(self._index.annotations[chosen], self._index.order[chosen], strict=True):
            entry = self._read(span)
            entry["id"] = int(order) + 1
            entry.setdefault("iscrowd", 0)
            entry.setdefault("area", entry["bbox"][2] * entry["bbox"][3])
            found.append(entry)
        return found

    def objects(self, number: int) -> Objects:
        """The objects of an image.

        Raises:
            DataError: a mask is neither polygons nor run lengths.
        """
        width, height = self.size(number)
        entries = [entry for entry in self.entries(number) if not entry["iscrowd"]]
        boxes = np.array([entry["bbox"] for entry in entries], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        np.clip(boxes[:, 0::2], 0, width, out=boxes[:, 0::2])
        np.clip(boxes[:, 1::2], 0, height, out=boxes[:, 1::2])
        valid = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        kept = [entry for entry, keep in zip(entries, valid, strict=True) if keep]
        masks = np.zeros((len(kept), height, width), np.uint8)
        for mask, entry in zip(masks, kept, strict=True):
            mask[:] = self._mask(entry, height, width)
        labels = np.array([self._labels[entry["category_id"]] for entry in kept], np.int64)
        return Objects(boxes[valid], labels, masks)

    def coco(self, numbers: Sequence[int]) -> dict[str, Any]:
        """The part about these images, as pycocotools' index takes it."""
        return {
            "images": [
                {"id": number, "width": size[0], "height": size[1]}
                for number, size in zip(numbers, map(self.size, numbers), strict=True)
            ],
            "annotations": [entry for number in numbers for entry in self._with_run_lengths(number)],
            "categories": [{"id": category} for category in self.categories],
        }

    def _with_run_lengths(self, number: int) -> Iterator[dict[str, Any]]:
        width, height = self.size(number)
        for entry in self.entries(number):
            with self._readable(entry):
                entry["segmentation"] = _run_lengths(entry["segmentation"], height, width)
            yield entry

    def _place(self, number: int) -> int:
        return bisect_left(self.ids, number)

    def _read(self, span: Array) -> dict[str, Any]:
        start, stop = span.tolist()
        try:
            entry: dict[str, Any] = parse(self._buffer, start, stop)
        except (ValueError, OSError) as error:
            raise DataError(
                f"{self.name} has changed since it was opened, or has text that is not UTF-8 at byte {start} "
                f"({one_line(error)}); {AGAIN}"
            ) from None
        return entry

    def _mask(self, entry: dict[str, Any], height: int, width: int) -> Array:
        with self._readable(entry):
            mask: Array = (
                _coding().decode(_run_lengths(entry["segmentation"], height, width)).reshape(height, width)
            )
        return mask

    @contextmanager
    def _readable(self, entry: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # pycocotools raises many kinds
            raise DataError(
                f"{self.name}: image {entry['image_id']} has an object without a readable mask "
                f"({one_line(error)}); {AGAIN}"
            ) from None


def read_annotations(path: Path, classes: int, hint: str) -> Annotations:
    """The annotations of a file, which stays open.

    Args:
        path: the file.
        classes: how many categories there must be.
        hint: end of the error message about a missing file.

    Raises:
        DataError: it is missing, truncated, of another kind, or has another number of categories.
    """
    try:
        return Annotations(FileBuffer(path), str(path), classes)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist; coco reads annotations/instances_train2017.json, train2017/*.jpg and "
            f"the same of val2017 (or 2014): get them from {SOURCE}, {hint}"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def same_categories(train: Annotations, test: Annotations) -> None:
    """Raises: DataError: the two sets number their classes differently."""
    if train.categories != test.categories:
        unmatched = sorted(set(train.categories) ^ set(test.categories))
        raise DataError(f"{test.name}: category {unmatched[0]} must be in both this file and {train.name}")


def _run_lengths(segmentation: Any, height: int, width: int) -> Any:
    """Polygons or run lengths as pycocotools compresses them."""
    coding = _coding()
    if isinstance(segmentation, list):
        return coding.merge(coding.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return coding.frPyObjects(segmentation, height, width)
    return segmentation


def _coding() -> Any:
    return import_extra("pycocotools.mask", "workload coco", "detection")
