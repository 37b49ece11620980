"""Promise: annotations are read entry by entry, as json reads them whole, and a rank does not hold them."""

from __future__ import annotations

import json
import tracemalloc
from random import Random

import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from harness.errors import DataError
from harness.workloads.coco import json_lists
from harness.workloads.coco.annotations import Annotations, read_annotations
from harness.workloads.coco.json_lists import lists, parse
from harness.workloads.coco.scores import average_precision, detections, matched, truth_of
from tests.harness.workloads.coco_folders import TEST, annotation, coco, write_coco

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools'

CONTENT = {
    "info": {"about": "[1, 2}", "nested": {"list": [1, [2]]}},
    "numbers": [1, -2.5e-3, 12345678901234567890, True, None],
    "empty": [],
    "text": ["Zürich 'ß' 漢字", 'quoted "\\" and \n', ""],
    "records": [{"a": [[1.5, 2], []], "b": {"c": "]"}}, {}],
    "last": 7,
}


def read(buffer) -> dict:
    """Every list, by `parse` of where its entries stand."""
    return {key: [parse(buffer, start, stop) for _, start, stop in found] for key, found in lists(buffer)}


@pytest.mark.parametrize("window", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("layout", [{}, {"indent": 3}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_entries_are_those_of_json_however_the_file_is_cut(monkeypatch, window, layout):
    monkeypatch.setattr(json_lists, "WINDOW_BYTES", window)
    text = json.dumps(CONTENT, **layout).encode()
    wanted = {key: value for key, value in CONTENT.items() if isinstance(value, list)}
    for buffer in (text, b"\xef\xbb\xbf" + text, b" \n" + text + b"\r\n "):
        assert read(buffer) == wanted
    assert [key for key, _ in lists(text)] == list(wanted)  # entries that nobody asks for are skipped


def test_a_file_that_is_cut_anywhere_or_goes_on_is_refused(monkeypatch):
    monkeypatch.setattr(json_lists, "WINDOW_BYTES", 16)
    text = json.dumps(CONTENT).encode()
    for end in range(len(text)):
        with pytest.raises(ValueError, match="at byte"):
            read(text[:end])
    for wrong in (text + b"}", text.replace(b"[1,", b"[1"), text.replace(b'"numbers":', b'"numbers"')):
        with pytest.raises(ValueError, match="at byte"):
            read(wrong)


def test_an_entry_without_an_end_is_given_up_before_the_file_is_held(monkeypatch):
    monkeypatch.setattr(json_lists, "WINDOW_BYTES", 64)
    monkeypatch.setattr(json_lists, "LARGEST_ENTRY_BYTES", 1000)
    asked = []

    class Watched(bytes):
        def __getitem__(self, part):
            asked.append(part.stop - part.start if part.start is not None else part.stop)
            return bytes(self)[part]

    with pytest.raises(ValueError, match="Unterminated string"):
        read(Watched(b'{"images": ["' + b"x" * 100_000))
    assert max(asked) <= 4 * 1000


def large(images: int, objects: int) -> dict:
    """Annotations in no order of their images, with polygons as long as COCO's."""
    random = Random(0)  # noqa: S311  not a secret
    entries = [
        annotation(random.randrange(images), 3, [1, 2, 30, 40], [[random.random() * 60 for _ in range(40)]])
        for _ in range(objects)
    ]
    described = [{"id": i, "file_name": f"{i:012}.jpg", "width": 64, "height": 64} for i in range(images)]
    return {"images": described, "annotations": entries, "categories": [{"id": 3}]}


def test_a_rank_holds_where_objects_stand_and_not_the_objects(tmp_path):
    images, objects = 400, 4000
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(large(images, objects)))
    read_annotations(path, 1, "")  # what is loaded once
    tracemalloc.start()
    try:
        annotations = read_annotations(path, 1, "")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100 * images + 32 * objects < path.stat().st_size / 10
    wanted = large(images, objects)["annotations"]
    for number in (0, 17, images - 1):
        mine = [entry | {"id": place} for place, entry in enumerate(wanted, 1) if entry["image_id"] == number]
        assert annotations.entries(number) == mine


def test_names_beyond_ascii_are_read(tmp_path):
    content = large(1, 1)
    content["images"][0]["file_name"] = "Zürich 漢字.jpg"
    for ascii_only in (True, False):
        text = json.dumps(content, ensure_ascii=ascii_only).encode()
        assert Annotations(text, "x", 1).file_name(0) == "Zürich 漢字.jpg"


@pytest.mark.parametrize("change", ["cut", "other"])
def test_a_file_that_changes_during_a_run_is_one_line(tmp_path, change):
    root = write_coco(tmp_path / "coco")
    workload = coco(root)
    path = root / "annotations" / "instances_train2017.json"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(300) if change == "cut" else file.write(b"x" * size)
    with pytest.raises(DataError) as raised:
        list(workload.batches(0))
    assert str(raised.value).startswith(f"{path} has changed since it was opened, or ")
    assert "\n" not in str(raised.value)


def test_a_test_object_without_a_readable_mask_is_one_line(tmp_path):
    root = write_coco(tmp_path / "coco")
    path = root / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["segmentation"] = "PPYo1"
    path.write_text(json.dumps(content))
    with pytest.raises(
        DataError, match=r"instances_val2017\.json: image 100 has an object without a readable"
    ):
        coco(root).findings()


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
    return Annotations.of(content, "scattered", 3), found


def _detected(image: int, results: list) -> list[dict]:
    import numpy as np

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
        truth = COCO()
        truth.dataset = annotations.coco(annotations.ids)
        truth.createIndex()
        selected = [{key: value for key, value in one.items() if key != unwanted} for one in results]
        evaluation = COCOeval(truth, truth.loadRes(selected), iou)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        scores |= {f"{kind}_map": evaluation.stats[0], f"{kind}_ap50": evaluation.stats[1]}
    return scores


@pytest.mark.parametrize("world_size", [1, 2, 5, 40])
def test_matches_put_together_are_cocos_own_evaluation_to_the_last_bit(capsys, world_size):
    annotations, found = scattered(30)
    wanted = whole(annotations, [one for results in found for one in results])
    capsys.readouterr()
    parts = []
    for rank in range(world_size):  # of 40 ranks ten have no image
        own = annotations.ids[rank::world_size]
        results = [one for image in own for one in found[image]]
        parts.append(matched(truth_of(annotations.coco(own)), results))
    assert average_precision(annotations.ids, annotations.categories, parts) == wanted
    assert 0.1 < wanted["box_map"] < wanted["box_ap50"] < 0.9
    assert capsys.readouterr().out == ""


def test_a_rank_reads_the_truth_of_its_own_test_images_alone(tmp_path, monkeypatch):
    root, read = write_coco(tmp_path / "coco"), []
    workloads = [coco(root, rank, 2) for rank in range(2)]
    for workload in workloads:
        entries = workload._test.annotations.entries
        monkeypatch.setattr(
            workload._test.annotations, "entries", lambda n, of=entries: read.append(n) or of(n)
        )
        workload.findings()
        workload.findings()
    assert sorted(read) == [100 + 7 * place for place in range(TEST)]
    assert read[:3] == [100, 114, 128]
