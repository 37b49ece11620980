"""Promise: images that are missing, damaged or do not fit on a disk are one line with what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import DataError
from harness.workloads.sources import files
from harness.workloads.sources.files import data_folder
from tests.harness.workloads.image_folders import imagenet, write_images


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "imagenet")


def error(root, **changes) -> str:
    with pytest.raises(DataError) as raised:
        list(imagenet(root, **changes).batches(0))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_missing_folder_says_what_is_read_and_where_to_get_it(tmp_path, root, monkeypatch):
    message = error(tmp_path / "nowhere")
    for part in (f"{tmp_path}/nowhere/train does not exist", "image-net.org", "val/<class>", "options.data"):
        assert part in message
    shutil.rmtree(root / "val")
    assert f"{root}/val does not exist" in error(root)
    monkeypatch.setenv("KRONSCALE_DATA", str(tmp_path / "other"))
    assert str(data_folder("files")) == str(tmp_path / "other")


def test_a_wrong_number_of_classes_is_refused(root):
    assert "must have 1000 folders of classes, got 3" in error(root, classes=1000)
    (root / "val" / "n00000002").rename(root / "val" / ".gone")
    shutil.rmtree(root / "val" / ".gone")
    assert f"{root}/val must have 3 folders of classes, got 2" in error(root)


def test_a_class_without_images_and_missing_images_are_refused(root):
    message = error(root, train_examples=25)
    assert "must have 25 images, got 24" in message
    assert "workload.options.train_examples: 24" in message
    for path in (root / "train" / "n00000001").iterdir():
        path.rename(path.with_suffix(".txt"))
    assert "n00000001 has no image" in error(root)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "gone"])
def test_a_corrupt_jpeg_is_named(root, workers, damage):
    path = root / "train" / "n00000002" / "0020.JPEG"
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        path.write_bytes(
            {"cut": content[: len(content) // 2], "empty": b"", "noise": os.urandom(999)}[damage]
        )
    message = error(root, workers=workers)
    assert message.startswith(f"{path} is not a readable image")
    assert "copy it again" in message


class TestStaging:
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path, monkeypatch):
        self.place = tmp_path / "node"
        monkeypatch.setenv("KRONSCALE_STAGING", "$NODE_DISK")
        monkeypatch.setenv("NODE_DISK", str(self.place))

    def test_data_is_copied_once_and_read_there(self, root):
        first = imagenet(root)._train.paths
        shutil.rmtree(root)  # a second copy could not be made
        assert imagenet(root)._train.paths == first
        assert all(path.startswith(f"{self.place}/kronscale-imagenet-") for path in first)
        assert len(list(imagenet(root).batches(0))) == 2

    def test_ranks_of_a_node_share_one_copy(self, root):
        program = (
            "import sys; from pathlib import Path; from harness.workloads.sources.folders import staged; "
            "print(staged(Path(sys.argv[1]), ('train', 'val')))"
        )
        ranks = [
            subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        told = {rank.communicate(timeout=60)[0] for rank in ranks}
        assert len(told) == 1
        assert len([path for path in self.place.iterdir() if path.is_dir()]) == 1

    def test_an_archive_is_unpacked(self, root):
        whole = sorted(path.split("train/")[1] for path in imagenet(root)._train.paths)
        shutil.rmtree(self.place)
        for part in ("train", "val"):
            subprocess.run(["tar", "-C", str(root / part), "-cf", str(root / f"{part}.tar"), "."], check=True)
            shutil.rmtree(root / part)
        assert sorted(path.split("train/")[1] for path in imagenet(root)._train.paths) == whole

    def test_an_archive_without_a_place_to_unpack_it_says_so(self, root, monkeypatch):
        monkeypatch.delenv("KRONSCALE_STAGING")
        (root / "train").rename(root / "train.tar.d")
        (root / "train.tar").touch()
        assert "KRONSCALE_STAGING" in error(root)

    def test_a_full_disk_is_said_and_given_back(self, root, small_disk):
        small_disk(self.place, 24)
        message = error(root)
        assert f"a local copy of {root} could not be written to {self.place}: no space left, 0.0" in message
        assert "KRONSCALE_STAGING" in message
        assert [path.name for path in self.place.iterdir() if path.is_dir()] == []

    def test_a_copy_that_was_killed_is_made_anew(self, root):
        done = imagenet(root)._train.paths[0].split("/train/")[0]
        Path(done).rename(f"{done}.unfinished")
        (root / "train" / "n00000000" / "0000.JPEG").unlink()
        assert len(imagenet(root, train_examples=23)._train.paths) == 23


def test_a_torchvision_that_does_not_load_is_one_line(root, monkeypatch):
    def failing(name):
        assert name == "torchvision"
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(files, "import_module", failing)
    workload = imagenet(root, model="densenet201")
    with pytest.raises(ModuleNotFoundError) as raised:
        workload.model()
    message = str(raised.value)
    assert "\n" not in message
    assert "pip install 'kronscale[vision]'" in message
    assert "operator torchvision::nms does not exist" in message
