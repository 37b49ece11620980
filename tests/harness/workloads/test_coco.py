"""Promise: images and objects are those of COCO's files; files that cannot serve are one line."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coding

from harness.errors import DataError
from harness.workloads.coco.annotations import Annotations
from harness.workloads.coco.scenes import SIDE, digit_scenes, run_lengths
from harness.workloads.digits.digits import split_digits
from harness.workloads.sources import files
from tests.harness.workloads.batch_files import torchvision_or_skip
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


@pytest.fixture
def fresh(tmp_path):
    return write_coco(tmp_path / "coco")


def error(fresh, **changes) -> str:
    with pytest.raises(DataError) as raised:
        list(coco(fresh, **changes).batches(0))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def edit(fresh, change, split="train2017"):
    path = fresh / "annotations" / f"instances_{split}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_what_is_missing_is_named_with_where_to_get_it(fresh, tmp_path):
    message = error(tmp_path / "nowhere")
    for part in (
        f"{tmp_path}/nowhere/annotations/instances_train2017.json does not exist", "train2017/*.jpg",
        "cocodataset.org", "options.data",
    ):  # fmt: skip
        assert part in message
    assert "instances_train2014.json does not exist" in error(fresh, year=2014)
    shutil.rmtree(fresh / "val2017")
    message = error(fresh)
    assert f"{fresh}/val2017 does not exist; coco reads val2017/*.jpg: get them from https://coco" in message
    (fresh / "annotations" / "instances_val2017.json").unlink()
    assert "instances_val2017.json does not exist" in error(fresh)


@pytest.mark.parametrize("content", [b'{"images": [{"id": 1, "fil', b"\xff\xfe\x00"])
def test_a_file_that_is_no_json_is_one_line(fresh, content):
    path = fresh / "annotations" / "instances_train2017.json"
    path.write_bytes(content)
    message = error(fresh)
    assert message.startswith(f"{path} is not readable JSON (")
    assert "get it again from https://cocodataset.org" in message


FAULTS = {
    "captions": (
        lambda c: [entry.pop("bbox") for entry in c["annotations"]],
        "annotations[0].bbox: Field required; get it again",
    ),
    "no images": (lambda c: c.pop("images"), "must be a file of COCO's instances: images: Field required"),
    "an image without a size": (lambda c: c["images"][2].pop("width"), "images[2].width: Field required"),
    "a text as an id": (
        lambda c: c["images"][1].update(id="107"), "images[1].id: Input should be a valid integer",
    ),
    "two images of one id": (
        lambda c: c["images"][1].update(id=c["images"][0]["id"]), "images have id 191 more than once",
    ),
    "another number of categories": (
        lambda c: c["categories"].append({"id": 4}),
        "must have 3 categories, got 4; get the annotations of instances, or set workload.options.classes: 4",
    ),
    "an unknown category": (
        lambda c: c["annotations"][3].update(category_id=91),
        "annotations[3].category_id must be listed in categories, got 91",
    ),
    "an unknown image": (
        lambda c: c["annotations"][3].update(image_id=5),
        "annotations[3].image_id must be listed in images, got 5",
    ),
    "half a box": (
        lambda c: c["annotations"][3].update(bbox=[1, 2]),
        "annotations[3].bbox: List should have at least 4 items after validation, not 2",
    ),
    "other categories than the test set": (
        lambda c: [c["categories"][0].update(id=5)]
        + [entry.update(category_id=5) for entry in c["annotations"] if entry["category_id"] == 3],
        "category 3 must be in both this file and ",
    ),
    "too few images": (
        lambda c: c.update(annotations=[e for e in c["annotations"] if e["image_id"] < 170]),
        "instances_train2017.json must have 12 images with objects, got 8; complete them, or set "
        "workload.options.train_examples: 8 to use this part",
    ),
    "a mask of another kind": (
        lambda c: c["annotations"][0].update(segmentation="PPYo1"),
        "image 100 has an object without a readable mask (",
    ),
    "a mask of another size": (
        lambda c: c["annotations"][0].update(segmentation={"size": [3, 4], "counts": [12]}),
        "image 100 has an object without a readable mask (",
    ),
    "another image": (
        lambda c: c["images"][-1].update(width=900, height=700), "must have 900x700 pixels as in ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_annotations_that_cannot_serve_are_one_line(fresh, fault):
    change, message = FAULTS[fault]
    edit(fresh, change)
    found = error(fresh)
    assert message in found
    assert str(fresh) in found


def test_a_list_in_place_of_a_mapping_and_an_empty_test_set_are_refused(fresh):
    (fresh / "annotations" / "instances_train2017.json").write_text("[1, 2]")
    assert "the file: Input should be a valid dictionary" in error(fresh)
    write_coco(fresh.parent / "other")
    edit(fresh.parent / "other", lambda c: c.update(images=[], annotations=[]), "val2017")
    assert "instances_val2017.json must have an image, got none" in error(fresh.parent / "other")


def test_a_test_object_without_a_readable_mask_is_one_line(fresh):
    edit(fresh, lambda c: c["annotations"][0].update(segmentation="PPYo1"), "val2017")
    with pytest.raises(DataError, match=r"val2017\.json: image 100 has an object without a readable mask"):
        coco(fresh).findings()


@pytest.mark.parametrize(("damage", "workers"), [("cut", 0), ("gone", 2)])
def test_a_corrupt_or_missing_image_is_named(fresh, workers, damage):
    path = fresh / "train2017" / f"{107:012}.jpg"
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2])
    message = error(fresh, workers=workers)
    assert message.startswith(f"{path} is not a readable image (")
    assert "copy it again from https://cocodataset.org" in message


def without(library, error):
    def importing(name):
        assert name.split(".")[0] == library
        raise error

    return importing


def test_a_torchvision_that_does_not_load_is_one_line(fresh, monkeypatch):
    workload = coco(fresh)
    error = RuntimeError("operator torchvision::nms does not exist\nhere")
    monkeypatch.setattr(files, "import_module", without("torchvision", error))
    with pytest.raises(ModuleNotFoundError) as raised:
        workload.model()
    message = str(raised.value)
    assert "\n" not in message
    assert "pip install 'kronscale[detection]'" in message
    assert "torchvision::nms does not exist here" in message


def test_pycocotools_that_is_missing_is_one_line(fresh, monkeypatch):
    monkeypatch.setattr(files, "import_module", without("pycocotools", ImportError("No module")))
    with pytest.raises(ModuleNotFoundError, match=r"^workload coco needs pycocotools: pip install 'kron"):
        coco(fresh)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            None,
            "/resnet18.pth does not exist; name a state_dict of torchvision's resnet18 in workload.options",
        ),
        (b"no weights", "/resnet18.pth must have the weights of resnet18 ("),
        (
            {"conv1.weight": torch.zeros(64, 3, 7, 7)},
            "must have the weights of resnet18 (KeyError: 'bn1.weight')",
        ),
    ],
)
def test_weights_that_do_not_fit_are_one_line(fresh, content, message):
    torchvision_or_skip()
    if isinstance(content, bytes):
        (fresh / "resnet18.pth").write_bytes(content)
    elif content is not None:
        torch.save(content, fresh / "resnet18.pth")
    with pytest.raises(DataError) as raised:
        coco(fresh, model="maskrcnn_resnet18_fpn", backbone="resnet18.pth").model()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
