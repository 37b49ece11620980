"""COCO's average precision of boxes and masks, computed by pycocotools' COCOeval (no torch)."""

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


def packed(results: Sequence[Detection]) -> bytes:
    """Detections as bytes for another rank; numbers are exact."""
    return zlib.compress(json.dumps(results).encode(), 1)


def unpacked(parts: Sequence[bytes]) -> list[Detection]:
    """The detections of all ranks, from the bytes of each."""
    return [result for part in parts for result in json.loads(zlib.decompress(part))]


def average_precision(truth: Any, images: Sequence[int], results: Sequence[Detection]) -> Mapping[str, float]:
    """The metrics of `METRICS`, independent of the order of images.

    Args:
        truth: pycocotools' index of the annotations.
        images: ids of the evaluated images.
        results: their detections; equal scores in one image count in this order.

    Returns:
        AP at IoU .50:.05:.95, COCO's mAP, and at .50; 0 without detections, -1 without objects.
    """
    scores: dict[str, float] = {}
    for kind, iou in (("box", "bbox"), ("mask", "segm")):
        mean, half = _evaluated(truth, images, results, iou)
        scores |= {f"{kind}_map": mean, f"{kind}_ap50": half}
    return scores


def _evaluated(
    truth: Any, images: Sequence[int], results: Sequence[Detection], iou: str
) -> tuple[float, float]:
    from pycocotools.cocoeval import COCOeval  # noqa: PLC0415  an optional extra

    if not results:
        return 0.0, 0.0  # pycocotools cannot load an empty list
    # COCOeval takes a result with a box and a mask for a box, and its size class from the box's area.
    unwanted = "segmentation" if iou == "bbox" else "bbox"
    selected = [{key: value for key, value in result.items() if key != unwanted} for result in results]
    with redirect_stdout(io.StringIO()):  # it prints tables
        evaluation = COCOeval(truth, truth.loadRes(selected), iou)
        evaluation.params.imgIds = sorted(images)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0]), float(evaluation.stats[1])
