"""COCO's average precision of boxes and masks, by pycocotools' COCOeval (no torch)."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np

METRICS = ("box_ap50", "box_map", "mask_ap50", "mask_map")

Array = np.ndarray[Any, Any]
Detection = dict[str, Any]


def detections(
    number: int, boxes: Array, labels: Array, scores: Array, masks: Array, categories: Sequence[int]
) -> list[Detection]:
    """What a network found in an image, in COCO's format of results.

    Args:
        number: the image's id.
        boxes: `[n, 4]`: left, top, right, bottom in pixels.
        labels: `[n]`, from 1 on.
        scores: `[n]`.
        masks: bool `[n, H, W]`.
        categories: COCO's id of each label, see `Annotations`.
    """
    from pycocotools import mask as coding  # noqa: PLC0415  an optional extra

    found = []
    for box, label, score, mask in zip(boxes.tolist(), labels, scores.tolist(), masks, strict=True):
        left, top, right, bottom = box
        code = coding.encode(np.asfortranarray(mask, dtype=np.uint8))
        found.append(
            {
                "image_id": number,
                "category_id": categories[int(label) - 1],
                "bbox": [left, top, right - left, bottom - top],
                "score": score,
                "segmentation": {"size": code["size"], "counts": code["counts"].decode()},
            }
        )
    return found


def packed(found: Sequence[Detection]) -> bytes:
    """Detections on their way to another rank; numbers keep every digit."""
    return zlib.compress(json.dumps(found).encode(), 1)


def unpacked(parts: Sequence[bytes]) -> list[Detection]:
    """All ranks' detections."""
    return [found for part in parts for found in json.loads(zlib.decompress(part))]


def average_precision(truth: Any, images: Sequence[int], found: Sequence[Detection]) -> Mapping[str, float]:
    """The metrics of `METRICS`; the order of images does not matter, nor which rank looked at which.

    Args:
        truth: pycocotools' index of the annotations.
        images: ids of those that were looked at.
        found: what was found in them; of equal scores in one image the first counts first.

    Returns:
        AP at IoU .50:.05:.95, COCO's mAP, and at .50; 0 where nothing was found, -1 where there is nothing.
    """
    scores: dict[str, float] = {}
    for kind, iou in (("box", "bbox"), ("mask", "segm")):
        mean, half = _evaluated(truth, images, found, iou)
        scores |= {f"{kind}_map": mean, f"{kind}_ap50": half}
    return scores


def _evaluated(
    truth: Any, images: Sequence[int], found: Sequence[Detection], iou: str
) -> tuple[float, float]:
    from pycocotools.cocoeval import COCOeval  # noqa: PLC0415  an optional extra

    if not found:
        return 0.0, 0.0  # pycocotools cannot load an empty list
    # A result with a box and a mask is taken for a box, whose area then sorts it into small, medium or large.
    unwanted = "segmentation" if iou == "bbox" else "bbox"
    results = [{key: value for key, value in one.items() if key != unwanted} for one in found]
    with redirect_stdout(io.StringIO()):  # it prints tables
        evaluation = COCOeval(truth, truth.loadRes(results), iou)
        evaluation.params.imgIds = sorted(images)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0]), float(evaluation.stats[1])
