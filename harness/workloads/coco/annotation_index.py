"""Where each image and each object stands in a file of COCO's annotations, checked in one pass (no torch)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from harness.errors import DataError
from harness.workloads.coco.json_lists import Buffer, lists

SOURCE = "https://cocodataset.org/#download"
AGAIN = f"get it again from {SOURCE}"

Array = np.ndarray[Any, Any]


class Index(NamedTuple):
    """N images in the order of their ids and their M annotations, image after image.

    Attributes:
        categories: ids of the categories, ascending.
        ids: of the images, ascending.
        images: int64 `[N, 2]`: first byte of each image's entry, and the byte behind it.
        sizes: int64 `[N, 2]`: width and height.
        trainable: bool `[N]`: whether an annotation has a box of more than a pixel in width and height.
        first: int64 `[N + 1]`: the annotations of image n are `first[n]` to `first[n + 1]`.
        annotations: int64 `[M, 2]`: first byte of each annotation, and the byte behind it.
        order: int64 `[M]`: its place in the file.
    """

    categories: list[int]
    ids: list[int]
    images: Array
    sizes: Array
    trainable: Array
    first: Array
    annotations: Array
    order: Array


def read_index(buffer: Buffer, name: str, classes: int) -> Index:
    """Read a file once, entry by entry.

    Args:
        buffer: the file.
        name: the file, for error messages.
        classes: how many categories there must be.

    Raises:
        DataError: it is not JSON, something is missing, or an image or category is not listed.
    """
    tables: dict[str, tuple[Array, Array]] = {}
    try:
        for key, found in lists(buffer):
            if key in _KEPT:
                tables[key] = _table(key, found, name)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not readable JSON ({one_line(error)}); {AGAIN}") from None
    for part in _KEPT:
        if part not in tables:
            raise DataError(f"{name} must be a file of COCO's instances, but has no list {part!r}; {AGAIN}")
    return _index(tables, name, classes)


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(error).split())[:200]


def _index(tables: Mapping[str, tuple[Array, Array]], name: str, classes: int) -> Index:
    (described, images), (known, _), (rows, annotations) = (tables[part] for part in _KEPT)
    ids, categories = (_unique(part, table[:, 0], name) for part, table in
                       (("images", described), ("categories", known)))  # fmt: skip
    if len(categories) != classes:
        raise DataError(
            f"{name} must have {classes} categories, got {len(categories)}; get the annotations of "
            f"instances, or set workload.options.classes: {len(categories)}"
        )
    _check_listed("image", rows[:, 0], ids, name)
    _check_listed("category", rows[:, 1], categories, name)
    by_id, image_of = np.argsort(described[:, 0]), np.searchsorted(ids, rows[:, 0])
    order = np.argsort(image_of, kind="stable")
    trainable = np.zeros(len(ids), bool)
    trainable[image_of[rows[:, 2] > 0]] = True
    return Index(
        categories.tolist(), ids.tolist(), images[by_id], described[by_id, 1:], trainable,
        np.searchsorted(image_of[order], np.arange(len(ids) + 1)), annotations[order], order,
    )  # fmt: skip


def _table(part: str, found: Any, name: str) -> tuple[Array, Array]:
    """Of each entry of a list the numbers that are kept, and its first and last byte."""
    keys, kept = _KEPT[part]
    numbers, spans = array("q"), array("q")
    for place, (entry, start, stop) in enumerate(found):
        _check_entry(entry, keys, f"{name}: {part}[{place}]")
        numbers.extend(kept(entry))
        spans.extend((start, stop))
    rows = len(spans) // 2
    wide = (np.frombuffer(each, np.int64) if rows else np.empty(0, np.int64) for each in (numbers, spans))
    first, second = (each.reshape(rows, -1) if rows else each.reshape(0, 3) for each in wide)
    return first, second


def _check_entry(entry: Any, keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        if not isinstance(entry, dict) or key not in entry:
            raise DataError(f"{where} has no {key}; {AGAIN}")
        got = entry[key]
        if key in _INTEGERS and not (type(got) is int and abs(got) < 2**63):
            raise DataError(f"{where}.{key} must be a whole number, got {got!r}; {AGAIN}")
    if "bbox" in keys:
        box = entry["bbox"]
        if not (isinstance(box, list) and len(box) == 4 and all(isinstance(x, int | float) for x in box)):
            raise DataError(f"{where}.bbox must be left, top, width and height, got {box}; {AGAIN}")


def _unique(part: str, ids: Array, name: str) -> Array:
    """The ids, ascending."""
    found, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise DataError(f"{name}: {part} have id {found[counts > 1][0]} more than once; {AGAIN}")
    return found


def _check_listed(kind: str, ids: Array, listed: Array, name: str) -> None:
    unknown = np.flatnonzero(~np.isin(ids, listed))
    if len(unknown):
        place = unknown[0]
        raise DataError(
            f"{name}: annotations[{place}].{kind}_id must be a listed {kind}, got {ids[place]}; {AGAIN}"
        )


def _of_image(entry: Any) -> tuple[int, int, int]:
    return entry["id"], entry["width"], entry["height"]


def _of_category(entry: Any) -> tuple[int]:
    return (entry["id"],)


def _of_annotation(entry: Any) -> tuple[int, int, bool]:
    """With whether the box is more than a pixel wide and high."""
    return entry["image_id"], entry["category_id"], min(entry["bbox"][2:]) > 1


_KEPT: dict[str, tuple[tuple[str, ...], Callable[[Any], tuple[int, ...]]]] = {
    "images": (("id", "file_name", "width", "height"), _of_image),
    "categories": (("id",), _of_category),
    "annotations": (("image_id", "category_id", "bbox", "segmentation"), _of_annotation),
}
"""The lists that are read: the keys that an entry must have, and the numbers that are kept of it."""

_INTEGERS = {"id", "width", "height", "image_id", "category_id"}
