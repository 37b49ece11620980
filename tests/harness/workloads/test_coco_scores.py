"""Promise: mAP is COCO's, on one rank or several, and nothing of it is printed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from pycocotools.cocoeval import COCOeval
from torch import nn

from harness.cell import Cell
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import EvalRecord
from harness.training.train import Trainer
from harness.training.world import World, all_gather_bytes
from harness.workloads.coco import coco as module
from harness.workloads.coco.annotations import METRICS, Annotations, average_precision, detections, matched
from kfac_core.collectives import connect
from tests.harness.workloads.batch_files import options
from tests.harness.workloads.coco_folders import annotation, coco, lengths

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools'

W, H = 60, 50


def rectangle(left, top, width, height):
    mask = np.zeros((H, W), bool)
    mask[top : top + height, left : left + width] = True
    return mask


def truth(*boxes, crowd=()):
    """One image a box list; categories 3 and 7."""
    annotations = [
        annotation(image, category, list(box), lengths(rectangle(*box)), crowd=int((image, index) in crowd))
        for image, objects in enumerate(boxes)
        for index, (category, box) in enumerate(objects)
    ]
    images = [{"id": i, "file_name": "x", "width": W, "height": H} for i in range(len(boxes))]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 3}, {"id": 7}]}
    return Annotations(content, "truth")


def found(image, *objects):
    """Detections of (category, box, score)."""
    boxes = np.array([[x, y, x + w, y + h] for _, (x, y, w, h), _ in objects], float).reshape(-1, 4)
    labels = np.array([[3, 7].index(category) + 1 for category, _, _ in objects])
    masks = np.array([rectangle(*box) for _, box, _ in objects]).reshape(-1, H, W)
    return detections(image, boxes, labels, np.array([score for _, _, score in objects]), masks, [3, 7])


def score(there, *parts):
    results = [one for part in parts for one in part]
    found = matched(there.part(there.ids), results)
    return average_precision(there.ids, there.categories, [found])


A, B = (5, 5, 20, 20), (30, 20, 20, 20)


def test_all_found_exactly_is_one(capsys):
    there = truth([(3, A), (7, B)], [(3, B)])
    scores = score(there, found(0, (3, A, 0.9), (7, B, 0.8)), found(1, (3, B, 0.7)))
    assert scores == pytest.approx(dict.fromkeys(METRICS, 1.0))
    assert capsys.readouterr().out == ""


def test_nothing_found_is_zero():
    assert score(truth([(3, A)])) == dict.fromkeys(METRICS, 0.0)


def test_boxes_and_masks_are_judged_apart():
    there = truth([(3, A)])
    (one,) = found(0, (3, A, 0.9))
    (other,) = found(0, (3, B, 0.9))
    scores = score(there, [{**one, "segmentation": other["segmentation"]}])
    assert (scores["box_map"], scores["mask_map"]) == (pytest.approx(1.0), 0.0)


def test_the_first_object_of_a_file_counts_though_its_number_is_zero():
    there = truth([(3, A)])
    assert [entry["id"] for entry in there.entries(0)] == [1]
    assert score(there, found(0, (3, A, 0.9)))["box_map"] == pytest.approx(1.0)


class Oracle(nn.Module):
    """Knows what is in every test scene; leaves some out and moves some, by the scene's own bytes."""

    def __init__(self, images) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self._known = {
            _key(torch.from_numpy(images.pixels(number).transpose(2, 0, 1).copy()).float() / 255): (
                images.annotations.objects(number)
            )
            for number in images.annotations.ids
        }

    def forward(self, images, targets=None):
        if self.training:
            return {"some": self.weight.sum(), "other": sum(image.mean() for image in images)}
        return [self._found(_key(image)) for image in images]

    def _found(self, key):
        objects, luck = self._known[key], np.frombuffer(key, np.uint8) / 255
        kept = slice(1 if luck[0] < 0.4 else 0, None)
        boxes = torch.from_numpy(objects.boxes[kept]) + (3.0 if luck[1] < 0.3 else 0.0)
        masks = torch.from_numpy(objects.masks[kept]).float().unsqueeze(1) * 0.8
        scores = torch.from_numpy(luck[2 : 2 + len(boxes)].astype(np.float32))
        return {
            "boxes": boxes, "labels": torch.from_numpy(objects.labels[kept]), "scores": scores,
            "masks": masks,
        }  # fmt: skip


def _key(image):
    return hashlib.sha256(image.numpy().tobytes()).digest()


def train(rank: int, world_size: int, folder: str, metric: str) -> list[EvalRecord]:
    """A cell of embedded scenes with the oracle in the network's place, which torchvision would bring."""
    asked = options("coco", data="embedded", classes=10, train_examples=12, workers=0)
    cell = Cell.model_validate(
        {
            "sweep": "test", "method": "m", "world_size": world_size, "optimizer": {"lr": 0.01},
            "workload": {"name": "coco", "options": asked}, "target": {"metric": metric, "at_least": 1.0},
            "training": {"global_batch_size": 6, "epochs": 1},
        }
    )  # fmt: skip
    knows = Oracle(coco("embedded", classes=10, train_examples=12)._test)
    built, module.mask_rcnn = module.mask_rcnn, lambda *_: knows
    records = []
    try:
        world = World(rank, world_size, torch.device("cpu"), "gloo")
        Trainer(cell, world, HeartbeatWriter(Path(folder) / f"{rank}-{world_size}"), records.append).run()
    finally:
        module.mask_rcnn = built
    return [record for record in records if isinstance(record, EvalRecord)]


def test_any_number_of_ranks_records_every_metric_to_the_last_bit(world, tmp_path):
    found = {}
    for world_size in (1, 2, 3):
        ranks = world(world_size).run(train, str(tmp_path), "mask_map")
        found[world_size] = dict(ranks[0][0].metrics)
        assert ranks[0][0].value == found[world_size]["mask_map"]
        assert all(not records for records in ranks[1:])
    assert found[1] == found[2] == found[3]
    assert set(found[1]) == set(METRICS)
    assert 0.3 < found[1]["mask_map"] <= found[1]["mask_ap50"] <= 1


def gather(rank: int, world_size: int) -> list[bytes]:
    own = bytes([rank]) * (rank * 1000)  # rank 0 has nothing to say
    return all_gather_bytes(connect(), torch.device("cpu"), own)


def test_ranks_hear_bytes_of_any_length_from_each_other(world):
    wanted = [b"", b"\1" * 1000, b"\2" * 2000]
    assert world(3).run(gather) == [wanted] * 3
    assert world(1).run(gather) == [[b""]]


def scattered(images: int) -> tuple[Annotations, list[list[dict]]]:
    """Objects of three categories in images of 50 x 60 pixels, and detections by image, some beside them."""
    random, objects, found = Random(3), [], []  # noqa: S311  not a secret
    for image in range(images):
        results = []
        for _ in range(random.randrange(4)):
            category, box = random.choice([1, 2, 9]), [float(random.randrange(1, 25)) for _ in range(4)]
            left, top, width, height = box
            corners = [left, top, left + width, top, left + width, top + height, left, top + height]
            objects.append(annotation(image, category, box, [corners], int(random.random() < 0.1)))
            moved = [side + random.randrange(3) for side in box]
            results += [(category if random.random() < 0.8 else 2, moved, random.randrange(5) / 4)]
        found.append(_detected(image, results))
    described = [{"id": i, "file_name": "x", "width": 60, "height": 50} for i in range(images)]
    content = {"images": described, "annotations": objects, "categories": [{"id": i} for i in (1, 2, 9)]}
    return Annotations(content, "scattered"), found


def _detected(image: int, results: list) -> list[dict]:
    boxes = np.array([[x, y, x + w, y + h] for _, (x, y, w, h), _ in results], float).reshape(-1, 4)
    masks = np.zeros((len(results), 50, 60), bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int), strict=True):
        mask[top:bottom, left:right] = True
    labels = np.array([[1, 2, 9].index(category) + 1 for category, _, _ in results], int)
    return detections(image, boxes, labels, np.array([score for *_, score in results]), masks, [1, 2, 9])


def whole(annotations: Annotations, results: list[dict]) -> dict[str, float]:
    """COCOeval's own numbers, in one process with all annotations."""
    scores = {}
    for kind, iou, unwanted in (("box", "bbox", "segmentation"), ("mask", "segm", "bbox")):
        truth = annotations.part(annotations.ids)
        selected = [{key: value for key, value in one.items() if key != unwanted} for one in results]
        evaluation = COCOeval(truth, truth.loadRes(selected), iou)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        scores |= {f"{kind}_map": evaluation.stats[0], f"{kind}_ap50": evaluation.stats[1]}
    return scores


@pytest.mark.parametrize("world_size", [1, 5, 40])
def test_matches_put_together_are_cocos_own_evaluation_to_the_last_bit(capsys, world_size):
    annotations, found = scattered(30)
    wanted = whole(annotations, [one for results in found for one in results])
    capsys.readouterr()
    parts = []
    for rank in range(world_size):  # of 40 ranks ten have no image
        own = annotations.ids[rank::world_size]
        results = [one for image in own for one in found[image]]
        parts.append(matched(annotations.part(own), results))
    assert average_precision(annotations.ids, annotations.categories, parts) == wanted
    assert 0.1 < wanted["box_map"] < wanted["box_ap50"] < 0.9
    assert capsys.readouterr().out == ""
