"""Promise: CIFAR's batches are the files' pixels; each example comes once an epoch, in any world, resumed."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from harness.workloads.cifar.cifar import MOMENTS, build_cifar10, build_cifar100
from harness.workloads.cifar.cifar_files import VARIANTS, read_cifar
from tests.harness.workloads.batch_files import (
    TEST,
    TRAIN,
    options,
    python2_pickle,
    share,
    torchvision_or_skip,
    write_cifar10,
    write_cifar100,
    write_python_version,
)

LIMITS = {"train_examples": TRAIN, "test_examples": TEST}
MEAN, DEVIATION = (np.array(values).reshape(3, 1, 1) for values in MOMENTS[10])


def independently(folder, names, label_bytes=1):
    """The files as their authors' page describes them: 1,024 red bytes, then green, then blue, row by row."""
    images, labels = [], []
    for name in names:
        content = (folder / name).read_bytes()
        for start in range(0, len(content), label_bytes + 3072):
            row = list(content[start + label_bytes : start + label_bytes + 3072])
            planes = [row[:1024], row[1024:2048], row[2048:]]
            images.append([[plane[32 * y : 32 * y + 32] for y in range(32)] for plane in planes])
            labels.append(content[start + label_bytes - 1])
    return np.array(images, dtype=np.float64), np.array(labels)


def pixels(images: torch.Tensor) -> np.ndarray:
    """Bytes again from what a model is fed."""
    return np.rint((images.double().numpy() * DEVIATION + MEAN) * 255)


def epoch(world_size, number=0, seed=3, first=0, **changes):
    """Global batches of an epoch, put together from all ranks."""
    shares = [share(rank, world_size, 60, seed) for rank in range(world_size)]
    ranks = [
        list(build_cifar10(options(**LIMITS, **changes), mine).batches(number, first)) for mine in shares
    ]
    return [
        (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        for parts in zip(*ranks, strict=True)
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    write_cifar10(folder)
    write_cifar100(folder)
    return folder


@pytest.fixture
def folder(root):
    return root / "cifar-10-batches-bin"


def test_batches_hold_the_pixels_and_labels_of_the_files(root, folder):
    images, labels = independently(folder, [f"data_batch_{part}.bin" for part in range(1, 6)])
    by_bytes = {image.astype(np.uint8).tobytes(): label for image, label in zip(images, labels, strict=True)}
    seen = {}
    for x, y in epoch(1, data=str(root), augment=False):
        for image, label in zip(pixels(x), y, strict=True):
            seen[image.astype(np.uint8).tobytes()] = int(label)
    assert seen == by_bytes
    assert len(seen) == TRAIN


def test_test_images_are_those_of_the_file(root, folder):
    images, labels = independently(folder, ["test_batch.bin"])
    workload = build_cifar10(options(data=str(root), **LIMITS), share())
    assert np.array_equal(workload._test[0].numpy(), images)
    assert np.array_equal(workload._test[1].numpy(), labels)


def test_fine_labels_are_those_of_cifar100(root):
    images, labels = independently(root / "cifar-100-binary", ["train.bin"], 2)
    workload = build_cifar100(options("cifar100", data=str(root), **LIMITS), share())
    assert np.array_equal(workload._pixels.numpy(), images)
    assert np.array_equal(workload._labels.numpy(), labels)
    assert workload.model()(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_the_batches_folder_itself_is_a_folder_of_data_too(folder):
    assert len(build_cifar10(options(data=str(folder), **LIMITS), share())._labels) == TRAIN


def test_the_variable_names_the_folder_without_being_part_of_the_cell(root, monkeypatch):
    monkeypatch.setenv("KRONSCALE_DATA", str(root))
    assert len(build_cifar10(options(**LIMITS), share())._labels) == TRAIN


@pytest.mark.parametrize("classes", [10, 100])
def test_the_python_version_holds_the_same_images_as_the_binary_version(root, tmp_path, classes):
    asked = options(f"cifar{classes}", **LIMITS)
    binary = read_cifar(VARIANTS[classes], {**asked, "data": str(root)})
    python = read_cifar(write_python_version(tmp_path, classes), {**asked, "data": str(tmp_path)})
    for images, others in zip(binary, python, strict=True):
        assert np.array_equal(images.pixels, others.pixels)
        assert np.array_equal(images.labels, others.labels)


def test_torchvision_reads_the_same(tmp_path):
    vision = torchvision_or_skip()

    class Unchecked(vision.datasets.CIFAR10):
        """Without the published checksums, which small files do not have."""

        train_list = [[name, None] for name, _ in vision.datasets.CIFAR10.train_list]
        test_list = [["test_batch", None]]
        meta = {"filename": "batches.meta", "key": "label_names", "md5": None}

    names = {b"label_names": [b"%d" % label for label in range(10)]}
    variant = write_python_version(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "batches.meta").write_bytes(python2_pickle(names))
    theirs = Unchecked(tmp_path)
    ours, _ = read_cifar(variant, options(data=str(tmp_path), **LIMITS))
    assert np.array_equal(ours.pixels.transpose(0, 2, 3, 1), theirs.data)
    assert ours.labels.tolist() == theirs.targets


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_example_comes_once_an_epoch_and_in_the_same_global_batches(root, world_size):
    alone, together = epoch(1, data=str(root)), epoch(world_size, data=str(root))
    assert len(together) == TRAIN // 60
    for (x, y), (also_x, also_y) in zip(alone, together, strict=True):
        assert torch.equal(x, also_x)  # augmentation too is a matter of the example
        assert torch.equal(y, also_y)
    plain = epoch(world_size, data=str(root), augment=False)
    assert len({image.tobytes() for x, _ in plain for image in pixels(x)}) == TRAIN


def test_what_does_not_fill_a_batch_waits_for_another_epoch(root):
    mine = build_cifar10(options(data=str(root), **LIMITS, augment=False), share(batch=90))
    images = [image.tobytes() for x, _ in mine.batches(0) for image in pixels(x)]
    assert mine.steps_per_epoch == 6
    assert len(images) == len(set(images)) == 540


@pytest.mark.parametrize("first", [1, 7, 10])
def test_a_resumed_epoch_goes_on_where_it_was_left(root, first):
    whole, rest = epoch(2, data=str(root)), epoch(2, data=str(root), first=first)
    assert len(rest) == 10 - first
    for (x, y), (also_x, also_y) in zip(whole[first:], rest, strict=True):
        assert torch.equal(x, also_x)
        assert torch.equal(y, also_y)


def test_epochs_and_seeds_differ_and_repeat_themselves(root):
    def first(number, seed):
        return epoch(1, number, seed, data=str(root))[0][0]

    assert torch.equal(first(4, 3), first(4, 3))
    assert not torch.equal(first(4, 3), first(5, 3))
    assert not torch.equal(first(4, 3), first(4, 2))


@torch.no_grad()
def test_ranks_share_the_test_images(root):
    counts, total = [], 0.0
    for rank in range(3):
        workload = build_cifar10(options(data=str(root), **LIMITS), share(rank, 3, 60))
        torch.manual_seed(0)
        model = workload.model().eval()
        sums, count = workload.evaluate(model)
        counts.append(count)
        total += sums["loss"]
    alone = build_cifar10(options(data=str(root), **LIMITS), share())
    sums, count = alone.evaluate(model)
    assert (sum(counts), count) == (TEST, TEST)
    assert total == pytest.approx(sums["loss"], rel=1e-5)


@pytest.fixture(scope="module")
def draws(root):
    """Corner and mirror of each example over 4 epochs, by brute force against the padded original."""
    workload = build_cifar10(options(data=str(root), **LIMITS), share(batch=100))
    found = []
    originals = np.pad(workload._pixels.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
    for number in range(4):
        generator = torch.Generator().manual_seed(3 * 1_000_003 + number)
        order = torch.randperm(TRAIN, generator=generator)
        shown = np.concatenate([pixels(x) for x, _ in workload.batches(number)]).astype(np.uint8)
        for example, image in islice(zip(order.tolist(), shown, strict=True), 150):
            fits = [
                (top, left, mirrored)
                for top in range(9)
                for left in range(9)
                for mirrored in (False, True)
                if np.array_equal(
                    image[:, :, ::-1] if mirrored else image,
                    originals[example, :, top : top + 32, left : left + 32],
                )
            ]
            found.append(fits)
    return found


def test_every_image_is_a_crop_of_its_padded_original(draws):
    assert all(draws)


def test_corners_are_uniform_and_half_is_mirrored(draws):
    sure = np.array([fits[0] for fits in draws if len(fits) == 1], dtype=float)
    assert len(sure) > 0.95 * len(draws)
    # means of 600 uniform draws from 0..8 (deviation 2.58) and of coin tosses, within 4 deviations
    assert abs(sure[:, 0].mean() - 4) < 4 * 2.58 / 600**0.5
    assert abs(sure[:, 1].mean() - 4) < 4 * 2.58 / 600**0.5
    assert abs(sure[:, 2].mean() - 0.5) < 4 * 0.5 / 600**0.5
    assert {tuple(pair) for pair in sure[:, :2]} == {(y, x) for y in range(9) for x in range(9)}
    assert abs(np.corrcoef(sure[:, 0], sure[:, 1])[0, 1]) < 0.17


def test_without_it_images_come_as_they_are(root):
    workload = build_cifar10(options(data=str(root), **LIMITS, augment=False), share())
    x, _ = next(workload.batches(0))
    known = {image.tobytes() for image in workload._pixels.numpy()}
    assert all(image.astype(np.uint8).tobytes() in known for image in pixels(x))


def test_label_smoothing_is_that_of_the_definition(root):
    workload = build_cifar10(options(data=str(root), **LIMITS, label_smoothing=0.1), share())
    scores, y = torch.randn(5, 10, dtype=torch.float64), torch.tensor([1, 4, 9, 0, 2])
    logs = scores.log_softmax(1)
    wanted = -(0.9 * logs[torch.arange(5), y] + 0.1 * logs.mean(1)).mean()
    assert float(workload.loss(lambda _: scores, (scores, y))) == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # He et al. 2016, table 6: 0.27, 0.46, 0.85 and 1.7 million
    [
        ("resnet8", 75_290),  # not in the paper; counted layer by layer for n = 1, shortcuts without weights
        ("resnet20", 0.27e6),
        ("resnet32", 0.46e6),
        ("resnet56", 0.85e6),
        ("resnet110", 1.7e6),
        ("vgg16", 14.7e6),
    ],
)
def test_networks_have_the_published_number_of_parameters(root, name, parameters):
    model = build_cifar10(options(data=str(root), **LIMITS, model=name), share()).model()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.02)


def test_synthetic_images_have_the_size_of_the_real_ones():
    workload = build_cifar10(options(data="synthetic", train_examples=1000, test_examples=30), share())
    x, y = next(workload.batches(0))
    assert (x.shape, y.shape, workload.steps_per_epoch) == ((50, 3, 32, 32), (50,), 20)
    assert len(workload._test[1]) == 30


def test_a_limited_set_takes_as_many_of_every_class():
    workload = build_cifar10(options(data="embedded", train_examples=105, test_examples=20), share())
    counts = torch.bincount(workload._labels)
    assert (int(counts.sum()), int(counts.min()), int(counts.max())) == (105, 10, 11)
    assert torch.bincount(workload._test[1]).tolist() == [2] * 10
