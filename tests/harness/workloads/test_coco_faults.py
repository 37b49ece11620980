"""Promise: COCO's files that are missing, damaged or of another kind are one line with what to do."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from harness.errors import DataError
from harness.workloads.sources import files
from tests.harness.workloads.batch_files import torchvision_or_skip
from tests.harness.workloads.coco_folders import coco, write_coco


@pytest.fixture
def root(tmp_path):
    return write_coco(tmp_path / "coco")


def error(root, **changes) -> str:
    with pytest.raises(DataError) as raised:
        list(coco(root, **changes).batches(0))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def edit(root, change, split="train2017"):
    path = root / "annotations" / f"instances_{split}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_what_is_missing_is_named_with_where_to_get_it(root, tmp_path):
    message = error(tmp_path / "nowhere")
    for part in (
        f"{tmp_path}/nowhere/annotations/instances_train2017.json does not exist", "train2017/*.jpg",
        "cocodataset.org", "options.data",
    ):  # fmt: skip
        assert part in message
    assert "instances_train2014.json does not exist" in error(root, year=2014)
    shutil.rmtree(root / "val2017")
    message = error(root)
    assert f"{root}/val2017 does not exist; coco reads val2017/*.jpg: get them from https://coco" in message
    (root / "annotations" / "instances_val2017.json").unlink()
    assert "instances_val2017.json does not exist" in error(root)


@pytest.mark.parametrize("content", [b'{"images": [{"id": 1, "fil', b"", b"\xff\xfe\x00", b"no JSON"])
def test_a_file_that_is_no_json_is_one_line(root, content):
    path = root / "annotations" / "instances_train2017.json"
    path.write_bytes(content)
    message = error(root)
    assert message.startswith(f"{path} must be a file of COCO's instances: the file: Invalid JSON: ")
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
def test_annotations_that_cannot_serve_are_one_line(root, fault):
    change, message = FAULTS[fault]
    edit(root, change)
    found = error(root)
    assert message in found
    assert str(root) in found


def test_a_list_in_place_of_a_mapping_and_an_empty_test_set_are_refused(root):
    (root / "annotations" / "instances_train2017.json").write_text("[1, 2]")
    assert "the file: Input should be an object" in error(root)
    write_coco(root.parent / "other")
    edit(root.parent / "other", lambda c: c.update(images=[], annotations=[]), "val2017")
    assert "instances_val2017.json must have an image, got none" in error(root.parent / "other")


def test_a_test_object_without_a_readable_mask_is_one_line(root):
    edit(root, lambda c: c["annotations"][0].update(segmentation="PPYo1"), "val2017")
    with pytest.raises(DataError, match=r"val2017\.json: image 100 has an object without a readable mask"):
        coco(root).findings()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_a_corrupt_or_missing_image_is_named(root, workers, damage):
    path = root / "train2017" / f"{107:012}.jpg"
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    message = error(root, workers=workers)
    assert message.startswith(f"{path} is not a readable image (")
    assert "copy it again from https://cocodataset.org" in message


def without(library, error):
    def importing(name):
        assert name.split(".")[0] == library
        raise error

    return importing


def test_a_torchvision_that_does_not_load_is_one_line(root, monkeypatch):
    workload = coco(root)
    error = RuntimeError("operator torchvision::nms does not exist\nhere")
    monkeypatch.setattr(files, "import_module", without("torchvision", error))
    with pytest.raises(ModuleNotFoundError) as raised:
        workload.model()
    message = str(raised.value)
    assert "\n" not in message
    assert "pip install 'kronscale[detection]'" in message
    assert "torchvision::nms does not exist here" in message


def test_pycocotools_that_is_missing_is_one_line(root, monkeypatch):
    monkeypatch.setattr(files, "import_module", without("pycocotools", ImportError("No module")))
    with pytest.raises(ModuleNotFoundError, match=r"^workload coco needs pycocotools: pip install 'kron"):
        coco(root)


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
def test_weights_that_do_not_fit_are_one_line(root, content, message):
    torchvision_or_skip()
    if isinstance(content, bytes):
        (root / "resnet18.pth").write_bytes(content)
    elif content is not None:
        torch.save(content, root / "resnet18.pth")
    with pytest.raises(DataError) as raised:
        coco(root, model="maskrcnn_resnet18_fpn", backbone="resnet18.pth").model()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
