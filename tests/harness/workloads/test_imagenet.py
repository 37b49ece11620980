"""Promise: images are shown as torchvision would; those that are missing or damaged are one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

from harness.errors import DataError
from harness.workloads.imagenet.image_folders import SOURCE, list_images
from harness.workloads.imagenet.imagenet import DEVIATION, MEAN, build, centre_view, random_box, training_view
from harness.workloads.models import cifar_resnet, imagenet_resnet
from harness.workloads.sources.files import read_image
from harness.workloads.sources.folders import data_folder
from kfac_core import KFAC, KFACConfig
from tests.harness.workloads.batch_files import options, share, torchvision_or_skip
from tests.harness.workloads.image_folders import CLASSES, SIDE, TEST_EACH, TRAIN_EACH, imagenet, write_images

COUNT = CLASSES * TRAIN_EACH


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("imagenet"))


def draws_of(number):
    return Random(str(number))  # noqa: S311  not a secret


def test_test_images_are_the_middle_of_each_image(root):
    """By definition: the shorter side is 8/7 of the view, the view lies in the middle."""
    seen = [pair for batch in imagenet(root)._test_batches() for pair in zip(*batch, strict=True)]
    paths = sorted((root / "val").rglob("*.JPEG"))
    assert len(seen) == len(paths) == CLASSES * TEST_EACH
    for (x, y), path in zip(seen, paths, strict=True):
        image = Image.open(path).convert("RGB")
        short = round(SIDE / 0.875)
        scale = short / min(image.size)
        image = image.resize([max(short, int(side * scale + 1e-9)) for side in image.size], Image.BILINEAR)
        left, top = (round((side - SIDE) / 2) for side in image.size)
        view = np.asarray(image, dtype=np.float64)[top : top + SIDE, left : left + SIDE] / 255
        wanted = (view - MEAN) / DEVIATION
        assert np.allclose(x.permute(1, 2, 0).numpy(), wanted, atol=1e-5)
        assert path.parent.name.endswith(str(int(y)))


def test_torchvision_shows_the_same(root):
    vision = torchvision_or_skip()
    functional, transforms = vision.transforms.functional, vision.transforms
    theirs = vision.datasets.ImageFolder(str(root / "train"))
    ours = list_images(root / "train", CLASSES, "")
    assert list(zip(ours.paths, ours.labels, strict=True)) == theirs.samples
    middle = transforms.Compose([transforms.Resize(37), transforms.CenterCrop(32)])
    for index, (image, _) in enumerate(theirs):
        assert np.array_equal(
            centre_view(read_image(ours.paths[index], SOURCE), 32), np.asarray(middle(image))
        )
        left, top, width, height = random_box(image.width, image.height, draws_of(index))
        cropped = functional.resized_crop(image, top, left, height, width, [SIDE, SIDE])
        draws = draws_of(index)
        view = training_view(image, SIDE, draws)
        repeated = draws_of(index)
        random_box(image.width, image.height, repeated)
        if repeated.random() < 0.5:
            cropped = functional.hflip(cropped)
        assert np.array_equal(view, np.asarray(cropped))


def test_crops_are_distributed_as_torchvisions(root):
    boxes = np.array([random_box(400, 300, draws) for draws in map(draws_of, range(4000))], dtype=float)
    left, top, width, height = boxes.T
    area, aspect = width * height / (400 * 300), width / height
    assert ((left >= 0) & (top >= 0) & (left + width <= 400) & (top + height <= 300)).all()
    assert 0.075 < area.min() < 0.09
    assert ((aspect > 0.74) & (aspect < 1.35)).all()
    vision = torchvision_or_skip()
    torch.manual_seed(0)
    crop = vision.transforms.RandomResizedCrop
    theirs = np.array(
        [crop.get_params(torch.empty(3, 300, 400), crop(1).scale, crop(1).ratio) for _ in range(4000)],
        dtype=float,
    )
    for mine, other in zip((top, left, height, width), theirs.T, strict=True):
        # means of 4,000 draws each, within four deviations of their difference
        assert abs(mine.mean() - other.mean()) < 4 * mine.std() * (2 / 4000) ** 0.5


def test_an_image_too_long_for_a_crop_gives_its_middle():
    assert random_box(1000, 10, draws_of(0)) == ((1000 - 13) // 2, 0, 13, 10)


def test_batches_lie_as_asked(root):
    for channels_last in (True, False):
        x, _ = next(imagenet(root, channels_last=channels_last).batches(0))
        assert x.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_the_right_class_among_the_five_highest_scores_counts_for_top_5():
    asked = options("imagenet", data="synthetic", image_size=32, classes=7, train_examples=20)
    workload = build(asked, share(batch=14))
    ranks = torch.arange(14) % 7  # how many classes score higher than the right one
    labels = workload._labels
    scores = torch.stack(
        [
            torch.arange(7.0).roll(int(label) + 1 + int(rank))
            for label, rank in zip(labels, ranks, strict=True)
        ]
    )
    assert [
        int((row > row[label]).sum()) for row, label in zip(scores, labels, strict=True)
    ] == ranks.tolist()
    sums, count = workload.evaluate(lambda images: scores)
    assert (sums["accuracy"], sums["top5_accuracy"], count) == (2, 10, 14)


def test_a_limited_set_takes_as_many_of_every_class(root):
    workload = imagenet(root, train_examples=12, test_examples=3)
    assert np.bincount(workload._train.labels).tolist() == [4] * 3
    assert np.bincount(workload._test.labels).tolist() == [1] * 3


@pytest.mark.slow
def test_synthetic_batches_need_no_files_and_train(tmp_path):
    asked = options("imagenet", data="synthetic", image_size=64, classes=7, train_examples=20)
    workload = build(asked, share(batch=4))
    torch.manual_seed(0)
    model = workload.model()
    batches = list(workload.batches(0, first_step=2))
    assert (len(batches), workload.steps_per_epoch, batches[0][0].shape) == (3, 5, (4, 3, 64, 64))
    loss = workload.loss(model, batches[0])
    loss.backward()
    assert abs(float(loss.detach()) - np.log(7)) < 1.5  # nothing is learned yet
    with torch.no_grad():
        assert workload.evaluate(model.eval())[1] == 4


def test_kfac_computes_the_same_with_channels_last():
    gradients = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = cifar_resnet(20, 10, 8).double()
        kfac = KFAC(model, KFACConfig.sc20(factor_update_steps=1, inverse_update_steps=1), lr=0.1)
        x = torch.randn(8, 3, 32, 32, dtype=torch.float64).contiguous(memory_format=form)
        torch.nn.functional.cross_entropy(model(x), torch.arange(8)).backward()
        kfac.step()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],  # torchvision's documentation
)
def test_resnets_have_the_parameters_of_torchvisions(depth, parameters):
    ours = imagenet_resnet(depth, 1000)
    assert sum(p.numel() for p in ours.parameters()) == parameters


@pytest.mark.parametrize("depth", [50, 152])
def test_resnets_compute_what_torchvisions_compute(depth):
    vision, ours = torchvision_or_skip(), imagenet_resnet(depth, 1000)
    theirs = getattr(vision.models, f"resnet{depth}")()
    # within a block torchvision registers the shortcut last, as here; so both list the same tensors
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "parameters", "side"), [("densenet201", 20_013_928, 64), ("inception_v3", 23_834_568, 299)]
)  # torchvision's documentation: 20,013,928 and, with the auxiliary classifier's 3.3 million, 27,161,264
def test_other_networks_come_from_torchvision(name, parameters, side):
    torchvision_or_skip()
    asked = options("imagenet", data="synthetic", model=name, image_size=0 if side == 299 else side)
    workload = build(asked, share(batch=2))
    model = workload.model()
    assert sum(p.numel() for p in model.parameters()) == parameters
    x, y = next(workload.batches(0))
    assert x.shape == (2, 3, side, side)
    workload.loss(model, (x, y)).backward()


@pytest.mark.slow
def test_the_embedded_images_are_those_of_the_archive_and_are_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KRONSCALE_CACHE", str(tmp_path))
    asked = options("imagenet", data="embedded", classes=10, image_size=32, augment=False, workers=0)
    first, again = (build(asked, share(0, 1, 100)) for _ in range(2))
    with tarfile.open("harness/workloads/embedded/cifar10.tar.xz") as archive:
        names = sorted(name for name in archive.getnames() if name.startswith("test/"))
        classes = sorted({name.split("/")[1] for name in names})
        images = [Image.open(archive.extractfile(name)).convert("RGB") for name in names]
    shown, labels = (torch.cat(part) for part in zip(*first._test_batches(), strict=True))
    want = np.stack([centre_view(image, 32) for image in images]).transpose(0, 3, 1, 2) / 255.0
    moments = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, DEVIATION))
    mean, deviation = moments
    torch.testing.assert_close(shown.double(), (torch.from_numpy(want) - mean) / deviation, atol=1e-5, rtol=0)
    assert [classes[label] for label in labels] == [name.split("/")[1] for name in names]
    seen = torch.cat([label for _, label in again.batches(0)])
    assert torch.equal(seen.bincount(), torch.full((10,), 200))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [
        Path(first._train.paths[0]).parents[2].name
    ]


@pytest.fixture
def fresh(tmp_path):
    return write_images(tmp_path / "imagenet")


def error(fresh, **changes) -> str:
    with pytest.raises(DataError) as raised:
        list(imagenet(fresh, **changes).batches(0))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_missing_folder_says_what_is_read_and_where_to_get_it(tmp_path, fresh, monkeypatch):
    message = error(tmp_path / "nowhere")
    for part in (f"{tmp_path}/nowhere/train does not exist", "image-net.org", "val/<class>", "options.data"):
        assert part in message
    shutil.rmtree(fresh / "val")
    assert f"{fresh}/val does not exist" in error(fresh)
    monkeypatch.setenv("KRONSCALE_DATA", str(tmp_path / "other"))
    assert str(data_folder("files")) == str(tmp_path / "other")


def test_a_wrong_number_of_classes_is_refused(fresh):
    assert "must have 1000 folders of classes, got 3" in error(fresh, classes=1000)
    (fresh / "val" / "n00000002").rename(fresh / "val" / ".gone")
    shutil.rmtree(fresh / "val" / ".gone")
    assert f"{fresh}/val must have 3 folders of classes, got 2" in error(fresh)


def test_a_class_without_images_and_missing_images_are_refused(fresh):
    message = error(fresh, train_examples=25)
    assert "must have 25 images, got 24" in message
    assert "workload.options.train_examples: 24" in message
    for path in (fresh / "train" / "n00000001").iterdir():
        path.rename(path.with_suffix(".txt"))
    assert "n00000001 has no image" in error(fresh)


@pytest.mark.parametrize(("damage", "workers"), [("cut", 0), ("noise", 0), ("gone", 2)])
def test_a_corrupt_jpeg_is_named(fresh, workers, damage):
    path = fresh / "train" / "n00000002" / "0020.JPEG"
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "noise": os.urandom(999)}[damage])
    message = error(fresh, workers=workers)
    assert message.startswith(f"{path} is not a readable image")
    assert "copy it again" in message


class TestStaging:
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path, monkeypatch):
        self.place = tmp_path / "node"
        monkeypatch.setenv("KRONSCALE_STAGING", "$NODE_DISK")
        monkeypatch.setenv("NODE_DISK", str(self.place))

    def test_data_is_copied_once_and_read_there(self, fresh):
        first = imagenet(fresh)._train.paths
        shutil.rmtree(fresh)  # a second copy could not be made
        assert imagenet(fresh)._train.paths == first
        assert all(path.startswith(f"{self.place}/kronscale-imagenet-") for path in first)
        assert len(list(imagenet(fresh).batches(0))) == 2

    def test_ranks_of_a_node_share_one_copy(self, fresh):
        program = (
            "import sys; from pathlib import Path; from harness.workloads.sources.folders import staged; "
            "print(staged(Path(sys.argv[1]), ('train', 'val')))"
        )
        ranks = [
            subprocess.Popen([sys.executable, "-c", program, str(fresh)], stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        told = {rank.communicate(timeout=60)[0] for rank in ranks}
        assert len(told) == 1
        assert len([path for path in self.place.iterdir() if path.is_dir()]) == 1

    def test_an_archive_is_unpacked(self, fresh):
        whole = sorted(path.split("train/")[1] for path in imagenet(fresh)._train.paths)
        shutil.rmtree(self.place)
        for part in ("train", "val"):
            subprocess.run(
                ["tar", "-C", str(fresh / part), "-cf", str(fresh / f"{part}.tar"), "."], check=True
            )
            shutil.rmtree(fresh / part)
        assert sorted(path.split("train/")[1] for path in imagenet(fresh)._train.paths) == whole

    def test_an_archive_without_a_place_to_unpack_it_says_so(self, fresh, monkeypatch):
        monkeypatch.delenv("KRONSCALE_STAGING")
        (fresh / "train").rename(fresh / "train.tar.d")
        (fresh / "train.tar").touch()
        assert "KRONSCALE_STAGING" in error(fresh)

    def test_a_full_disk_is_said_and_given_back(self, fresh, small_disk):
        small_disk(self.place, 24)
        message = error(fresh)
        assert f"a local copy of {fresh} could not be written to {self.place}: no space left, 0.0" in message
        assert "KRONSCALE_STAGING" in message
        assert [path.name for path in self.place.iterdir() if path.is_dir()] == []

    def test_a_copy_that_was_killed_is_made_anew(self, fresh):
        done = imagenet(fresh)._train.paths[0].split("/train/")[0]
        Path(done).rename(f"{done}.unfinished")
        (fresh / "train" / "n00000000" / "0000.JPEG").unlink()
        assert len(imagenet(fresh, train_examples=23)._train.paths) == 23
