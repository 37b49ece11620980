"""COCO's annotations (Lin et al. 2014) and the average precision of detections, by pycocotools (no torch).

Images to train on are those of torchvision's reference training: crowds and boxes without an area are not
trained on, nor are images without annotations.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from harness.errors import DataError
from harness.workloads.sources.files import import_extra

SOURCE = "https://cocodataset.org/#download"
METRICS = ("box_ap50", "box_map", "mask_ap50", "mask_map")

_AGAIN = f"get it again from {SOURCE}"
_KINDS = {"box": "bbox", "mask": "segm"}  # with COCOeval's name of each kind of overlap
_READ = ("dtMatches", "dtIgnore", "gtIgnore")  # by COCOeval of an image's evaluation, beside the scores

Array = np.ndarray[Any, Any]
Detection = dict[str, Any]


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
    """The annotations of a set of images, held in memory by pycocotools' COCO.

    An object's `iscrowd` and `area`, which some tools omit, are filled in. Objects are numbered from 1 in the
    order of the file, because COCOeval takes 0 for none.

    Args:
        content: of a file in COCO's format.
        name: of the file, for error messages.

    Attributes:
        categories: COCO's id of each class, ascending; label `k` is `categories[k - 1]`.
        ids: of all images, ascending.
    """

    def __init__(self, content: Mapping[str, Any], name: str) -> None:
        self.name = name
        for number, entry in enumerate(content["annotations"], 1):
            entry["id"] = number
            entry.setdefault("iscrowd", 0)
            entry.setdefault("area", entry["bbox"][2] * entry["bbox"][3])
        self._coco = _indexed(content)
        self.categories, self.ids = sorted(self._coco.cats), sorted(self._coco.imgs)
        self._labels = {category: label for label, category in enumerate(self.categories, 1)}

    def trainable(self) -> list[int]:
        """Images with an annotation whose box is more than a pixel wide and high."""
        return [
            number for number in self.ids if any(min(one["bbox"][2:]) > 1 for one in self.entries(number))
        ]

    def file_name(self, number: int) -> str:
        """The image's file."""
        return str(self._coco.imgs[number]["file_name"])

    def size(self, number: int) -> tuple[int, int]:
        """Width and height of the image."""
        return self._coco.imgs[number]["width"], self._coco.imgs[number]["height"]

    def entries(self, number: int) -> list[dict[str, Any]]:
        """The annotations of an image, in the file's order."""
        return list(self._coco.imgToAnns.get(number, ()))

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
        with self._readable(number):
            for mask, entry in zip(masks, kept, strict=True):
                mask[:] = self._coco.annToMask(entry).reshape(height, width)
        labels = np.array([self._labels[entry["category_id"]] for entry in kept], np.int64)
        return Objects(boxes[valid], labels, masks)

    def part(self, numbers: Sequence[int]) -> Any:
        """The index that pycocotools makes of these images' annotations, with masks as run lengths."""
        annotations = []
        for number in numbers:
            with self._readable(number):
                annotations += [
                    {**entry, "segmentation": self._coco.annToRLE(entry)} for entry in self.entries(number)
                ]
        images = [self._coco.imgs[number] for number in numbers]
        categories = list(self._coco.cats.values())
        return _indexed({"images": images, "annotations": annotations, "categories": categories})

    @contextmanager
    def _readable(self, number: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # pycocotools raises many kinds
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{self.name}: image {number} has an object without a readable mask ({reason}); {_AGAIN}"
            ) from None


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
        content = TypeAdapter(_File).validate_python(json.loads(path.read_bytes()), strict=True)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist; coco reads annotations/instances_train2017.json, train2017/*.jpg and "
            f"the same of val2017 (or 2014): get them from {SOURCE}, {hint}"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise DataError(
            f"{path} must be a file of COCO's instances: {where.removeprefix('.') or 'the file'}: "
            f"{first['msg']}; {_AGAIN}"
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is not readable JSON ({' '.join(str(error).split())}); {_AGAIN}") from None
    _check_ids(content, str(path), classes)
    return Annotations(content, str(path))


def same_categories(train: Annotations, test: Annotations) -> None:
    """Raises: DataError: the two sets number their classes differently."""
    if train.categories != test.categories:
        unmatched = sorted(set(train.categories) ^ set(test.categories))
        raise DataError(f"{test.name}: category {unmatched[0]} must be in both this file and {train.name}")


def detections(
    number: int, boxes: Array, labels: Array, scores: Array, masks: Array, categories: Sequence[int]
) -> list[Detection]:
    """A network's detections in an image, in COCO's format of results.

    Args:
        number: the image's id.
        boxes: `[n, 4]`: left, top, right, bottom in pixels.
        labels: `[n]`, from 1.
        scores: `[n]`.
        masks: bool `[n, H, W]`.
        categories: COCO's id of each label, see `Annotations`.
    """
    from pycocotools import mask as coding  # noqa: PLC0415  an optional extra

    return [
        {
            "image_id": number,
            "category_id": categories[int(label) - 1],
            "bbox": [left, top, right - left, bottom - top],
            "score": score,
            "segmentation": coding.encode(np.asfortranarray(mask, dtype=np.uint8)),
        }
        for (left, top, right, bottom), label, score, mask in zip(
            boxes.tolist(), labels, scores.tolist(), masks, strict=True
        )
    ]


def matched(truth: Any, results: Sequence[Detection]) -> bytes:
    """COCOeval's evaluation of some images: which detections match an object.

    Ranks exchange these matches, as in torchvision's reference, and neither objects nor masks.

    Args:
        truth: the annotations of these images, from `Annotations.part`.
        results: their detections; equal scores in one image count in this order.
    """
    tables = {kind: _evaluated(truth, results, iou) for kind, iou in _KINDS.items()}
    return zlib.compress(pickle.dumps((sorted(truth.imgs), tables)), 1)


def average_precision(
    images: Sequence[int], categories: Sequence[int], parts: Sequence[bytes]
) -> Mapping[str, float]:
    """The metrics of `METRICS`, whatever the division of the images.

    Args:
        images: ids of all evaluated images.
        categories: ids of all categories.
        parts: what `matched` found in the images of each rank.

    Returns:
        AP at IoU .50:.05:.95, COCO's mAP, and at .50; 0 without detections, -1 without objects.
    """
    from pycocotools.cocoeval import COCOeval  # noqa: PLC0415  an optional extra

    ranks = [pickle.loads(zlib.decompress(part)) for part in parts]  # noqa: S301  of this run's own ranks
    scores: dict[str, float] = {}
    for kind, iou in _KINDS.items():
        by_image = {
            image: tables[kind][place :: len(own)] for own, tables in ranks for place, image in enumerate(own)
        }
        evaluation = COCOeval(iouType=iou)
        evaluation.params.imgIds, evaluation.params.catIds = sorted(images), sorted(categories)
        groups = zip(*(by_image[image] for image in sorted(images)), strict=True)  # by category and size
        evaluation.evalImgs = [one for group in groups for one in group]
        evaluation._paramsEval = copy.deepcopy(evaluation.params)
        with redirect_stdout(io.StringIO()):  # it prints tables
            evaluation.accumulate()
            evaluation.summarize()
        scores |= {f"{kind}_map": float(evaluation.stats[0]), f"{kind}_ap50": float(evaluation.stats[1])}
    return scores


class _Image(TypedDict):
    id: int
    file_name: str
    width: int
    height: int


class _Category(TypedDict):
    id: int


class _Annotation(TypedDict):
    image_id: int
    category_id: int
    bbox: Annotated[list[float], Field(min_length=4, max_length=4)]
    segmentation: Any
    iscrowd: NotRequired[int | bool]
    area: NotRequired[float]


class _File(TypedDict):
    """What is read of a file; the rest, such as licences, is left out."""

    images: list[_Image]
    categories: list[_Category]
    annotations: list[_Annotation]


def _indexed(content: Mapping[str, Any]) -> Any:
    """Pycocotools' index of a file's content."""
    coco = import_extra("pycocotools.coco", "workload coco", "detection").COCO()
    coco.dataset = content
    with redirect_stdout(io.StringIO()):  # it prints its progress
        coco.createIndex()
    return coco


def _check_ids(content: _File, name: str, classes: int) -> None:
    """Ids of images and categories are unique, and objects name listed ones."""
    listed: dict[str, Counter[int]] = {}
    for part, entries in (("images", content["images"]), ("categories", content["categories"])):
        listed[part] = Counter(entry["id"] for entry in entries)
        if twice := [number for number, count in listed[part].items() if count > 1]:
            raise DataError(f"{name}: {part} have id {twice[0]} more than once; {_AGAIN}")
    if len(listed["categories"]) != classes:
        raise DataError(
            f"{name} must have {classes} categories, got {len(listed['categories'])}; get the annotations of "
            f"instances, or set workload.options.classes: {len(listed['categories'])}"
        )
    for place, entry in enumerate(content["annotations"]):
        for key, part in (("image_id", "images"), ("category_id", "categories")):
            if entry[key] not in listed[part]:  # type: ignore[literal-required]
                raise DataError(
                    f"{name}: annotations[{place}].{key} must be listed in {part}, got {entry[key]}; {_AGAIN}"  # type: ignore[literal-required]
                )


def _evaluated(truth: Any, results: Sequence[Detection], iou: str) -> list[dict[str, Array] | None]:
    """Of each category, size and image in this order, what COCOeval reads of their evaluation."""
    from pycocotools.cocoeval import COCOeval  # noqa: PLC0415  an optional extra

    # COCOeval takes a result with a box and a mask for a box, and its size class from the box's area.
    unwanted = "segmentation" if iou == "bbox" else "bbox"
    selected = [{key: value for key, value in result.items() if key != unwanted} for result in results]
    with redirect_stdout(io.StringIO()):  # it prints its progress
        # pycocotools cannot load an empty list
        found = truth.loadRes(selected) if selected else _indexed({**truth.dataset, "annotations": []})
        evaluation = COCOeval(truth, found, iou)
        evaluation.evaluate()
    return [
        one and {"dtScores": np.array(one["dtScores"]), **{key: np.array(one[key]) != 0 for key in _READ}}
        for one in evaluation.evalImgs
    ]
