"""Promise: `data check` names what is missing or damaged; `data prepare` lays published files out."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from harness.cli import main
from harness.workloads.imagenet.image_folders import DEVKIT, TRAIN_TAR, VALIDATION_TAR
from tests.harness.workloads.batch_files import write_cifar10
from tests.harness.workloads.coco_folders import CATEGORIES, TRAINABLE, write_coco

NAMES = ("n00000003", "n00000001", "n00000002")  # classes 1, 2, 3: ids are not in the order of names
TRUTH = (2, 1, 3, 3, 1)  # class of each validation image
TRAIN_EACH = 4
SMALL = ["--option", "classes=3", "--option", f"train_examples={3 * TRAIN_EACH}"]


def jpeg(shade: int) -> bytes:
    written = io.BytesIO()
    Image.fromarray(np.full((8, 9, 3), shade, np.uint8)).save(written, "JPEG")
    return written.getvalue()


def packed(files: dict[str, bytes], mode: str = "w") -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return written.getvalue()


def meta() -> bytes:
    """`meta.mat` of three classes and a synset above them, which has children and is no class."""
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height")
    rows = [(number, name, "a", "b", 0, [], 0) for number, name in enumerate(NAMES, 1)]
    rows.append((4, "n00000004", "a", "b", 3, [1, 2, 3], 1))
    table = np.array([tuple(row) for row in rows], [(field, "O") for field in fields])
    written = io.BytesIO()
    savemat(written, {"synsets": table.reshape(-1, 1)})
    return written.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """ImageNet's three archives as published, with three classes."""
    trains = {
        f"{name}.tar": packed({f"{name}_{k}.JPEG": jpeg(10 * k) for k in range(TRAIN_EACH)}) for name in NAMES
    }
    (tmp_path / TRAIN_TAR).write_bytes(packed(trains))
    images = {f"ILSVRC2012_val_{k:08}.JPEG": jpeg(k) for k in range(1, len(TRUTH) + 1)}
    (tmp_path / VALIDATION_TAR).write_bytes(packed(images))
    kit = {
        f"{DEVKIT}/data/meta.mat": meta(),
        f"{DEVKIT}/data/ILSVRC2012_validation_ground_truth.txt": "".join(f"{k}\n" for k in TRUTH).encode(),
    }
    (tmp_path / f"{DEVKIT}.tar.gz").write_bytes(packed(kit, "w:gz"))
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(verb: str, name: str, folder: Path, *words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["data", verb, name, "--data", str(folder), *words])
        got = capsys.readouterr()
        return code, " ".join((got.out + got.err).split())

    return run


def test_the_published_archives_become_folders_of_classes(root, call):
    code, text = call("prepare", "imagenet", root)
    assert code == 0
    assert "3 classes unpacked" in text
    assert "5 images sorted" in text
    for number, label in enumerate(TRUTH, 1):
        name = f"ILSVRC2012_val_{number:08}.JPEG"
        assert (root / "val" / NAMES[label - 1] / name).read_bytes() == jpeg(number)
    assert len(list((root / "train").glob("n*/*.JPEG"))) == 3 * TRAIN_EACH
    code, text = call("check", "imagenet", root, *SMALL, "--all")
    assert code == 0, text
    assert f"all {3 * TRAIN_EACH} images read" in text
    assert "all 5 images read" in text


def test_validation_images_that_lie_flat_are_named_and_sorted_and_repeating_continues(root, call):
    call("prepare", "imagenet", root)
    (root / VALIDATION_TAR).unlink()
    for path in list((root / "val").glob("n*/*.JPEG"))[:3]:
        path.rename(root / "val" / path.name)
    code, text = call("check", "imagenet", root, *SMALL)
    assert code == 1
    assert "has images that are in no folder of a class" in text
    assert "3 images sorted" in call("prepare", "imagenet", root)[1]
    assert "0 classes unpacked" in (again := call("prepare", "imagenet", root)[1])
    assert "0 images sorted" in again
    assert call("check", "imagenet", root, *SMALL)[0] == 0


def test_an_image_in_the_wrong_class_is_named_and_stays(root, call):
    call("prepare", "imagenet", root)
    name = "ILSVRC2012_val_00000001.JPEG"
    wrong = root / "val" / NAMES[2] / name
    (root / "val" / NAMES[1] / name).rename(wrong)
    code, text = call("prepare", "imagenet", root)
    assert code == 2
    assert f"{wrong} must lie in {NAMES[1]}" in text
    assert wrong.is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / f"{DEVKIT}.tar.gz").unlink(), "get the kit from"),
        (
            lambda root: (root / TRAIN_TAR).write_bytes((root / TRAIN_TAR).read_bytes()[:3000]),
            "cannot be unpacked",
        ),
        (
            lambda root: (root / f"{DEVKIT}.tar.gz").write_bytes(
                packed({f"{DEVKIT}/data/meta.mat": b"no matrix", f"{DEVKIT}/{_TRUTH}": b"1\n"}, "w:gz")
            ),
            "meta.mat is damaged",
        ),
        (
            lambda root: (root / f"{DEVKIT}.tar.gz").write_bytes(
                packed({f"{DEVKIT}/data/meta.mat": meta(), f"{DEVKIT}/{_TRUTH}": b"1\n4\n"}, "w:gz")
            ),
            "line 2: must be the number of a class",
        ),
        (
            lambda root: (root / f"{DEVKIT}.tar.gz").write_bytes(
                packed({f"{DEVKIT}/data/meta.mat": meta(), f"{DEVKIT}/{_TRUTH}": b"1\n"}, "w:gz")
            ),
            "is not one of the 1 validation images",
        ),
    ],
    ids=["no kit", "cut tar", "damaged kit", "a parent", "too few"],
)
def test_what_is_missing_or_damaged_stops_the_preparation(root, call, change, message):
    change(root)
    code, text = call("prepare", "imagenet", root)
    assert code == 2
    assert message in text


_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"


def test_shards_hold_the_files_and_a_damaged_one_is_found(root, call):
    assert call("prepare", "imagenet", root, "--shards")[0] == 0
    with tarfile.open(root / "val.tar") as shard:
        content = {member.name: shard.extractfile(member).read() for member in shard}  # type: ignore[union-attr]
    assert content == {
        f"{NAMES[label - 1]}/ILSVRC2012_val_{k:08}.JPEG": jpeg(k) for k, label in enumerate(TRUTH, 1)
    }
    digest = hashlib.sha256((root / "val.tar").read_bytes()).hexdigest()
    assert (root / "val.tar.sha256").read_text() == f"{digest}  val.tar\n"
    assert "was there" in call("prepare", "imagenet", root, "--shards")[1]
    shutil.rmtree(root / "val")
    code, text = call("check", "imagenet", root, *SMALL)
    assert code == 0
    assert "to be staged" in text
    (root / "val.tar").write_bytes((root / "val.tar").read_bytes()[:-1] + b"x")
    code, text = call("check", "imagenet", root, *SMALL)
    assert code == 1
    assert "has the SHA-256" in text


def test_a_damaged_image_a_missing_class_and_missing_images_are_faults(root, call):
    call("prepare", "imagenet", root)
    image = next((root / "train").glob("n*/*.JPEG"))
    image.write_bytes(image.read_bytes()[:100])
    code, text = call("check", "imagenet", root, *SMALL, "--all")
    assert code == 1
    assert f"1 of {3 * TRAIN_EACH} images that were read are damaged" in text
    image.unlink()
    assert "must have 12 images, got 11" in call("check", "imagenet", root, *SMALL)[1]
    (root / "val" / NAMES[0]).rename(root / "val" / "n00000009")
    text = call("check", "imagenet", root, "--option", "classes=3", "--option", "train_examples=11")[1]
    assert "n00000003 is a class of only one of train and val" in text


def test_cifar_is_read_whole_and_a_cut_file_is_a_fault(tmp_path, call):
    folder = write_cifar10(tmp_path)
    sizes = ["--option", "train_examples=600", "--option", "test_examples=200"]
    code, text = call("check", "cifar10", tmp_path, *sizes)
    assert code == 0, text
    assert "600 + 200 images of 10 classes" in text
    (folder / "test_batch.bin").write_bytes((folder / "test_batch.bin").read_bytes()[:-5])
    code, text = call("check", "cifar10", tmp_path, *sizes)
    assert code == 1
    assert "it is truncated or not a batch file" in text
    assert "has no batch files of cifar10" in call("check", "cifar10", tmp_path / "nowhere")[1]


def test_coco_names_the_images_that_its_annotations_list_and_the_folder_lacks(tmp_path, call):
    pytest.importorskip("pycocotools")
    write_coco(tmp_path)
    small = ["--option", f"classes={len(CATEGORIES)}", "--option", f"train_examples={TRAINABLE}"]
    code, text = call("check", "coco", tmp_path, *small)
    assert code == 0, text
    next((tmp_path / "val2017").glob("*.jpg")).unlink()
    code, text = call("check", "coco", tmp_path, *small)
    assert code == 1
    assert "1 of 5 images are missing" in text


def test_texts_pairs_and_slices_are_checked(tmp_path, call):
    (tmp_path / "train.txt").write_text("a line\n")
    code, text = call("check", "bert", tmp_path)
    assert code == 1
    assert "test.txt does not exist" in text
    (tmp_path / "test.txt").write_bytes(b"\xff\xfe\n")
    assert "must be UTF-8 text" in call("check", "bert", tmp_path)[1]
    (tmp_path / "test.txt").write_text("a line\n")
    (tmp_path / "more.txt.gz").write_bytes(gzip.compress(b"a line\nanother\n"))
    code, text = call("check", "gpt", tmp_path, "--option", "train_text=m*.gz, train.txt")
    assert code == 0
    assert "more.txt.gz and 1 more: 3 lines" in text
    for name in ("train.de", "train.en", "val.de", "val.en"):
        (tmp_path / name).write_text("ein Satz\n")
    assert "1 pairs" in call("check", "multi30k", tmp_path)[1]
    (tmp_path / "val.en").write_text("one\ntwo\n")
    assert call("check", "multi30k", tmp_path)[0] == 1
    assert "of patients than 10, got 0" in call("check", "brain_mri", tmp_path)[1]


def test_a_sweep_names_its_workloads_and_words_that_mean_nothing_are_refused(tmp_path, call, capsys):
    assert main(["data", "check", "-f", "jobs/sweeps/demo.yaml"]) == 0
    assert "digits: files ok none are needed" in " ".join(capsys.readouterr().out.split())
    assert call("check", "imagnet", tmp_path)[0] == 2
    assert "must be NAME=VALUE" in call("check", "cifar10", tmp_path, "--option", "sides=3")[1]
    said = call("check", "multi30k", tmp_path, "--option", "download=yes")[1]
    assert "download must be true or false, got 'yes'" in said
    assert main(["data", "check", "-f", "jobs/sweeps/demo.yaml", "--option", "classes=3"]) == 2
    assert "is read as it is published" in call("prepare", "cifar10", tmp_path)[1]
