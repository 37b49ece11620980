"""COCO's average precision of boxes and masks, computed by pycocotools' COCOeval (no torch).

Each rank matches the detections in its own images with their objects. Ranks exchange these matches, and
neither objects nor masks: rank 0 puts the matches of all images together and reads precision off them.
"""

from __future__ import annotations

import copy
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np

METRICS = ("box_ap50", "box_map", "mask_ap50", "mask_map")

KINDS = {"box": "bbox", "mask": "segm"}
"""COCOeval's name of each kind of overlap."""

Array = np.ndarray[Any, Any]
Detection = dict[str, Any]


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

    results = []
    for box, label, score, mask in zip(boxes.tolist(), labels, scores.tolist(), masks, strict=True):
        left, top, right, bottom = box
        code = coding.encode(np.asfortranarray(mask, dtype=np.uint8))
        results.append(
            {
                "image_id": number,
                "category_id": categories[int(label) - 1],
                "bbox": [left, top, right - left, bottom - top],
                "score": score,
                "segmentation": {"size": code["size"], "counts": code["counts"].decode()},
            }
        )
    return results


def truth_of(content: Mapping[str, Any]) -> Any:
    """The index that pycocotools makes of some images' annotations, see `Annotations.coco`."""
    from pycocotools.coco import COCO  # noqa: PLC0415  an optional extra

    truth = COCO()
    truth.dataset = content
    with redirect_stdout(io.StringIO()):  # it prints its progress
        truth.createIndex()
    return truth


def matched(truth: Any, results: Sequence[Detection]) -> bytes:
    """Which detections of some images match an object, by kind of overlap, threshold, category and size.

    Args:
        truth: the annotations of these images, from `truth_of`.
        results: their detections; equal scores in one image count in this order.
    """
    tables: dict[str, Array] = {"detections": np.array(len(results))}
    for kind, iou in KINDS.items():
        evaluation = _evaluated(truth, results, iou)
        images, thresholds = len(evaluation.params.imgIds), len(evaluation.params.iouThrs)
        found = [(place // images, one) for place, one in enumerate(evaluation.evalImgs) if one is not None]
        where = [(group, one["image_id"], len(one["dtScores"]), len(one["gtIgnore"])) for group, one in found]
        nothing = np.empty((thresholds, 0), bool)
        tables |= {
            f"{kind} where": np.array(where, np.int64).reshape(-1, 4),
            f"{kind} scores": np.array([score for _, one in found for score in one["dtScores"]]),
            f"{kind} matches": np.hstack([nothing, *(one["dtMatches"] != 0 for _, one in found)]),
            f"{kind} ignored": np.hstack([nothing, *(one["dtIgnore"] != 0 for _, one in found)]),
            f"{kind} objects ignored": np.hstack([[], *(one["gtIgnore"] for _, one in found)]) != 0,
        }
    file = io.BytesIO()
    np.savez(file, **tables)  # type: ignore[arg-type]  # names with spaces are arrays all the same
    return zlib.compress(file.getvalue(), 1)


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
    ranks = [np.load(io.BytesIO(zlib.decompress(part)), allow_pickle=False) for part in parts]
    if not sum(int(tables["detections"]) for tables in ranks):
        return dict.fromkeys(METRICS, 0.0)
    scores: dict[str, float] = {}
    for kind, iou in KINDS.items():
        found = [one for tables in ranks for one in _unpacked(tables, kind)]
        mean, half = _accumulated(images, categories, found, iou)
        scores |= {f"{kind}_map": mean, f"{kind}_ap50": half}
    return scores


def _evaluated(truth: Any, results: Sequence[Detection], iou: str) -> Any:
    from pycocotools.cocoeval import COCOeval  # noqa: PLC0415  an optional extra

    # COCOeval takes a result with a box and a mask for a box, and its size class from the box's area.
    unwanted = "segmentation" if iou == "bbox" else "bbox"
    selected = [{key: value for key, value in result.items() if key != unwanted} for result in results]
    with redirect_stdout(io.StringIO()):  # it prints its progress
        # pycocotools cannot load an empty list
        found = truth.loadRes(selected) if selected else truth_of({**truth.dataset, "annotations": []})
        evaluation = COCOeval(truth, found, iou)
        evaluation.evaluate()
    return evaluation


def _unpacked(tables: Any, kind: str) -> Iterator[tuple[int, int, dict[str, Array]]]:
    """Category and size as one number, image, and what COCOeval reads of their evaluation."""
    where, scores, matches, ignored, objects = (
        tables[f"{kind} {name}"] for name in ("where", "scores", "matches", "ignored", "objects ignored")
    )
    first = first_object = 0
    for group, image, count, object_count in where.tolist():
        own = slice(first, first + count)
        yield (
            group,
            image,
            {
                "dtScores": scores[own],
                "dtMatches": matches[:, own],
                "dtIgnore": ignored[:, own],
                "gtIgnore": objects[first_object : first_object + object_count],
            },
        )
        first, first_object = first + count, first_object + object_count


def _accumulated(
    images: Sequence[int],
    categories: Sequence[int],
    found: Sequence[tuple[int, int, dict[str, Array]]],
    iou: str,
) -> tuple[float, float]:
    """AP at IoU .50:.05:.95 and at .50."""
    from pycocotools.cocoeval import COCOeval  # noqa: PLC0415  an optional extra

    with redirect_stdout(io.StringIO()):  # it prints tables
        evaluation = COCOeval(iouType=iou)
        params = evaluation.params
        params.imgIds, params.catIds = sorted(images), sorted(categories)
        place = {image: index for index, image in enumerate(params.imgIds)}
        groups = len(params.catIds) * len(params.areaRng)
        evaluation.evalImgs = [None] * (groups * len(place))
        for group, image, one in found:
            evaluation.evalImgs[group * len(place) + place[image]] = one
        evaluation._paramsEval = copy.deepcopy(params)
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0]), float(evaluation.stats[1])
