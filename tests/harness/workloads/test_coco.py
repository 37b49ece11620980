"""Promise: images and objects are those of COCO's files, each once an epoch, in any world, by any workers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coding

from harness.workloads.coco.annotations import Annotations
from harness.workloads.coco.scenes import SIDE, digit_scenes, run_lengths
from harness.workloads.digits.digits import split_digits
from tests.harness.workloads.batch_files import options, torchvision_or_skip
from tests.harness.workloads.coco_folders import (
    CATEGORIES,
    EMPTY,
    SLIVERS,
    TEST,
    TRAIN,
    TRAINABLE,
    coco,
    equal,
    lengths,
    write_coco,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools'


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def scenes():
    return digit_scenes()


def epoch(root, world_size=1, number=0, first=0, **changes):
    """Global batches of an epoch, put together from all ranks, as (image, target) of each example."""
    ranks = [
        list(coco(root, rank, world_size, **changes).batches(number, first)) for rank in range(world_size)
    ]
    return [
        [pair for images, targets in parts for pair in zip(images, targets, strict=True)]
        for parts in zip(*ranks, strict=True)
    ]


def examples(root, **changes):
    """Every training example in the order of image ids."""
    workload = coco(root, augment=False, **changes)
    order = torch.randperm(TRAINABLE, generator=torch.Generator().manual_seed(3 * 1_000_003)).tolist()
    seen = [pair for batch in epoch(root, augment=False, **changes) for pair in batch]
    return {workload._train_ids[place]: pair for place, pair in zip(order, seen, strict=True)}


def plain_reading(root):
    """Image, boxes, labels and masks by the file's own words; masks by pycocotools' own decoding."""
    content = json.loads((root / "annotations" / "instances_train2017.json").read_text())
    for image in content["images"]:
        w, h = image["width"], image["height"]
        boxes, labels, masks = [], [], []
        for entry in content["annotations"]:
            left, top, width, height = entry["bbox"]
            if entry["image_id"] != image["id"] or entry["iscrowd"] or not (width and height):
                continue
            boxes.append([max(left, 0), max(top, 0), min(left + width, w), min(top + height, h)])
            labels.append(CATEGORIES.index(entry["category_id"]) + 1)
            coded = coding.frPyObjects(entry["segmentation"], h, w)
            decoded = coding.decode(coded)
            masks.append(decoded.any(2) if decoded.ndim == 3 else decoded)
        pixels = np.asarray(Image.open(root / "train2017" / image["file_name"]).convert("RGB"))
        yield image["id"], pixels, boxes, labels, masks


def test_images_and_objects_are_those_of_the_files(root):
    seen, checked = examples(root), 0
    for number, pixels, boxes, labels, masks in plain_reading(root):
        if number not in seen:
            assert number in (100 + 7 * EMPTY, 100 + 7 * SLIVERS)
            continue
        image, target = seen[number]
        assert torch.equal(image, torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float() / 255)
        assert torch.equal(target["boxes"], torch.tensor(boxes))
        assert target["labels"].tolist() == labels
        assert np.array_equal(target["masks"].numpy(), np.array(masks))
        assert (target["masks"].dtype, target["labels"].dtype) == (torch.uint8, torch.int64)
        checked += len(labels)
    assert len(seen) == TRAINABLE == TRAIN - 2
    assert checked > 30


def test_masks_of_polygons_lie_where_their_corners_say(root):
    """Without pycocotools: a square of whole numbers covers exactly its pixels."""
    image, target = examples(root)[100]
    assert target["boxes"][0].tolist() == [5, 6, 17, 18.5]
    rows, columns = target["masks"][0].nonzero().T
    assert (columns.min(), columns.max(), rows.min()) == (5, 16, 6)
    assert rows.max() in (17, 18)
    assert target["masks"].shape[1:] == image.shape[1:]


def test_a_mirrored_example_is_the_mirror_image_of_everything(root):
    plain, mirrored = examples(root), 0
    for number in range(3):
        for batch in epoch(root, number=number):
            for image, target in batch:
                same = [pair for pair in plain.values() if equal(pair[0], image)]
                other = [pair for pair in plain.values() if equal(pair[0].flip(2), image)]
                assert len(same) + len(other) == 1
                wanted = (same or other)[0][1]
                if same:
                    assert equal(target, wanted)
                    continue
                mirrored += 1
                assert torch.equal(target["masks"], wanted["masks"].flip(2))
                width = image.shape[2]
                left, top, right, bottom = wanted["boxes"].T
                boxes = torch.stack([width - right, top, width - left, bottom], 1)
                assert torch.equal(target["boxes"], boxes)
                assert torch.equal(target["labels"], wanted["labels"])
    assert 8 < mirrored < 28  # of 36


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_image_comes_once_an_epoch_and_in_the_same_global_batches(root, world_size):
    together = epoch(root, world_size)
    assert equal(together, epoch(root))
    assert len({image.numpy().tobytes() for batch in together for image, _ in batch}) == TRAINABLE


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_neither_order_nor_views(root, workers):
    assert equal(epoch(root, workers=workers), epoch(root))


def test_a_resumed_epoch_goes_on_where_it_was_left(root):
    whole = epoch(root, 2, 3, batch=4)
    assert equal(epoch(root, 2, 3, first=2, batch=4), whole[2:])
    assert epoch(root, 2, 3, first=len(whole), batch=4) == []


def test_epochs_differ_repeat_themselves_and_leave_the_global_generator_alone(root):
    before = torch.get_rng_state()
    assert equal(epoch(root, number=1), epoch(root, number=1, workers=1))
    assert not equal(epoch(root, number=1), epoch(root, number=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_year_and_parts_are_as_asked_for(root, tmp_path):
    assert len(coco(root)._test_ids) == TEST
    assert coco(root, test_examples=2)._test_ids == [100, 107]
    assert coco(root, train_examples=7).steps_per_epoch == 1
    older = write_coco(tmp_path / "older", 2014)
    assert equal(epoch(older, year=2014), epoch(root))


def test_torchvision_leaves_out_the_same_images(root):
    """Its reference's rule, written out: no annotation, or none with a box of more than a pixel."""
    content = json.loads((root / "annotations" / "instances_train2017.json").read_text())
    kept = []
    for image in sorted(content["images"], key=lambda entry: entry["id"]):
        boxes = [one["bbox"] for one in content["annotations"] if one["image_id"] == image["id"]]
        if boxes and not all(any(side <= 1 for side in box[2:]) for box in boxes):
            kept.append(image["id"])
    assert coco(root)._train_ids == kept


@pytest.mark.slow
class TestScenes:
    def test_no_digit_is_in_both_parts_and_every_pixel_is_its_digits(self, scenes):
        (train, _), (test, _) = split_digits()
        seen = {digit.numpy().tobytes() for digit in train}
        assert not [digit for digit in test if digit.numpy().tobytes() in seen]
        for pictures, digits in zip(scenes, (train, test), strict=True):
            for entry in pictures.content["annotations"][:40]:
                mask = coding.decode(coding.frPyObjects(entry["segmentation"], SIDE, SIDE)).astype(bool)
                left, top, width, height = entry["bbox"]
                ink = digits[entry["source"], 0].numpy() >= 0.25
                ink = ink[ink.any(1).nonzero()[0][0] : ink.any(1).nonzero()[0][-1] + 1]
                ink = ink[:, ink.any(0).nonzero()[0][0] : ink.any(0).nonzero()[0][-1] + 1]
                times = width // ink.shape[1]
                assert times in (2, 3, 4)
                there = mask[top : top + height, left : left + width]
                assert np.array_equal(there, ink.repeat(times, 0).repeat(times, 1))
                assert mask.sum() == there.sum() == entry["area"]

    def test_categories_are_the_digits_and_all_occur(self, scenes):
        for pictures, (_, digits) in zip(scenes, split_digits(), strict=True):
            for entry in pictures.content["annotations"]:
                assert entry["category_id"] % 10 == digits[entry["source"]]
            assert {entry["category_id"] for entry in pictures.content["annotations"]} == set(range(1, 11))

    def test_digits_do_not_touch_and_scenes_repeat_themselves(self, scenes):
        train, _ = scenes
        again, _ = digit_scenes()
        assert train.content == again.content
        assert all(np.array_equal(*pair) for pair in zip(train.pixels, again.pixels, strict=True))
        annotations = Annotations(train.content, "scenes")
        assert len(annotations.trainable()) == len(annotations.ids) == 400
        for number in annotations.ids[:50]:
            objects = annotations.objects(number)
            assert objects.masks.sum(0).max() == 1
            outside = annotations_ground(train.pixels[number], objects.masks.any(0))
            assert len(outside) == 1

    def test_run_lengths_are_pycocotools(self):
        draws = np.random.default_rng(0)
        for mask in [draws.random((7, 5)) < 0.4, np.ones((3, 4), bool), np.zeros((3, 4), bool)]:
            coded = run_lengths(mask)
            assert coded == lengths(mask)
            decoded = coding.decode(coding.frPyObjects(coded, *mask.shape))
            assert np.array_equal(decoded.astype(bool), mask)

    def test_they_need_no_folder_and_ranks_share_them(self):
        workload = coco("embedded", classes=10, train_examples=0, batch=8)
        images, targets = next(workload.batches(0))
        assert (workload.steps_per_epoch, images[0].shape) == (50, (3, SIDE, SIDE))
        halves = [
            next(coco("embedded", rank, 2, 8, classes=10, train_examples=0).batches(0)) for rank in (0, 1)
        ]
        assert equal(halves[0][0] + halves[1][0], images)
        assert equal(halves[0][1] + halves[1][1], targets)


def annotations_ground(pixels, masked):
    """Colours outside of all masks; faint ink, below the threshold, is not painted."""
    return {tuple(colour) for colour in pixels[~masked].tolist()}


def test_synthetic_batches_have_cocos_shapes_and_need_no_files():
    workload = coco("synthetic", classes=80, train_examples=20, batch=2, min_size=64, max_size=128)
    batches = list(workload.batches(0, first_step=7))
    assert (workload.steps_per_epoch, len(batches)) == (10, 3)
    images, targets = batches[0]
    assert [tuple(image.shape) for image in images] == [(3, 64, 85)] * 2
    assert targets[0]["boxes"].shape == (7, 4)
    assert targets[0]["masks"].shape == (7, 64, 85)
    assert 1 <= int(targets[0]["labels"].min()) <= int(targets[0]["labels"].max()) <= 80


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"year": 2015}, "year=2015 is not allowed; use 2014 or 2017"),
        ({"classes": 3}, "train_examples=0 means COCO's 117,266; with classes=3 give their number"),
        ({"data": "embedded"}, "classes=80 is not allowed with data='embedded', scenes of digits; use 10"),
        ({"max_size": 700}, "max_size=700 must be at least min_size=800"),
        ({"train_examples": 200_000}, "train_examples=200000 is not allowed; use 0 for all, or 1 to 117266"),
        ({"trainable_layers": 6}, "trainable_layers=6 is not allowed; use 0 to 5"),
        ({"width": 0.0}, "width=0.0 is not allowed"),
        ({"workers": -1}, "workers=-1 is not allowed; use a value >= 0"),
    ],
)
def test_options_that_no_data_could_serve_are_refused_at_planning(changes, message):
    from harness.workloads import WORKLOADS

    with pytest.raises(ValueError, match=message.split("=", maxsplit=1)[0]) as raised:
        WORKLOADS["coco"].examples(options("coco", **changes))
    assert message in str(raised.value)


def test_an_epoch_is_what_the_description_says():
    from harness.workloads import WORKLOADS

    examples_of = WORKLOADS["coco"].examples
    assert (examples_of({}), examples_of({"year": 2014})) == (117_266, 82_081)
    assert examples_of({"data": "embedded", "classes": 10}) == 400
    assert examples_of({"classes": 3, "train_examples": 12}) == 12


def test_torchvision_takes_a_batch(root):
    torchvision_or_skip()
    small = {"model": "maskrcnn_resnet18_fpn", "width": 0.125, "min_size": 64, "max_size": 96}
    workload = coco(root, batch=3, proposals=50, sampled_boxes=16, **small)
    model = workload.model()
    loss = workload.loss(model, next(workload.batches(0)))
    loss.backward()
    assert 1 < float(loss.detach()) < 10
    with torch.no_grad():
        assert workload.evaluate(model.eval()) == ({}, TEST)
    assert set(workload.score([workload.findings()])) == set(workload.pooled_metrics)
