"""Promise: CIFAR's batches are the files' pixels; files that cannot serve are one line; no code is run."""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import tarfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.cli import main
from harness.errors import DataError
from harness.workloads.cifar.cifar import MOMENTS, build_cifar10, build_cifar100
from harness.workloads.cifar.cifar_files import VARIANTS, read_cifar
from harness.workloads.sources.folders import download_archive
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
from tests.harness.workloads.server import Server

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


@pytest.fixture(scope="module")
def draws(root):
    """Corner and mirror of each example over 2 epochs, by brute force against the padded original."""
    workload = build_cifar10(options(data=str(root), **LIMITS), share(batch=100))
    found = []
    originals = np.pad(workload._pixels.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
    for number in range(2):
        generator = torch.Generator().manual_seed(3 * 1_000_003 + number)
        order = torch.randperm(TRAIN, generator=generator)
        shown = np.concatenate([pixels(x) for x, _ in workload.batches(number)]).astype(np.uint8)
        for example, image in islice(zip(order.tolist(), shown, strict=True), 300):
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


def test_every_image_is_a_crop_of_its_padded_original_at_uniform_corners_half_mirrored(draws):
    assert all(draws)
    sure = np.array([fits[0] for fits in draws if len(fits) == 1], dtype=float)
    assert len(sure) > 0.95 * len(draws)
    # means of 600 uniform draws from 0..8 (deviation 2.58) and of coin tosses, within 4 deviations
    assert abs(sure[:, 0].mean() - 4) < 4 * 2.58 / 600**0.5
    assert abs(sure[:, 1].mean() - 4) < 4 * 2.58 / 600**0.5
    assert abs(sure[:, 2].mean() - 0.5) < 4 * 0.5 / 600**0.5
    assert {tuple(pair) for pair in sure[:, :2]} == {(y, x) for y in range(9) for x in range(9)}
    assert abs(np.corrcoef(sure[:, 0], sure[:, 1])[0, 1]) < 0.17


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


URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ROW = 3073


def error(root: Path, variant=VARIANTS[10], **changes) -> str:
    """The one line."""
    asked = options(data=str(root), **{"train_examples": TRAIN, "test_examples": TEST, **changes})
    with pytest.raises(DataError) as raised:
        read_cifar(variant, asked)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_missing_folder_says_where_to_get_the_data_and_where_to_name_a_copy(tmp_path, monkeypatch):
    message = error(tmp_path)
    for part in (
        f"{tmp_path} has no batch files of cifar10 (cifar-10-batches-bin or cifar-10-batches-py)",
        URL,
        "download: true",
        "workload.options.data",
    ):
        assert part in message
    monkeypatch.setenv("KRONSCALE_DATA", str(tmp_path))
    assert "KRONSCALE_DATA" in error("files")


def test_a_truncated_batch_file_is_named(tmp_path):
    path = write_cifar10(tmp_path) / "data_batch_3.bin"
    whole = path.read_bytes()
    for size in (0, len(whole) - 1):
        path.write_bytes(whole[:size])
        message = error(tmp_path)
        assert f"{path} must have {ROW} bytes for each image, got {size} bytes" in message
        assert URL in message


def test_a_file_without_its_last_images_is_not_complete(tmp_path):
    path = write_cifar10(tmp_path) / "data_batch_5.bin"
    path.write_bytes(path.read_bytes()[: -2 * ROW])
    assert f"{path.parent} must have 600 images, got 598" in error(tmp_path)


def test_a_missing_file_of_several_is_named(tmp_path):
    path = write_cifar10(tmp_path) / "data_batch_4.bin"
    path.unlink()
    assert f"{path} cannot be read: No such file" in error(tmp_path)


def test_a_label_beyond_the_classes_is_refused(tmp_path):
    path = write_cifar10(tmp_path) / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[7 * ROW] = 10
    path.write_bytes(content)
    message = error(tmp_path)
    assert f"{path}: labels must be 0 to 9, got 10" in message
    assert URL in message


def test_a_wrong_number_of_classes_is_refused(tmp_path):
    folder = write_cifar10(tmp_path)
    for part in range(1, 6):
        path = folder / f"data_batch_{part}.bin"
        rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, ROW).copy()
        rows[:, 0] %= 2
        path.write_bytes(rows.tobytes())
    message = error(tmp_path)
    assert "data_batch_5.bin must have 10 classes, got 2" in message
    assert URL in message


def test_a_part_of_the_images_has_to_be_asked_for(tmp_path):
    write_cifar100(tmp_path)
    message = error(tmp_path, VARIANTS[100], train_examples=0)
    assert "must have 50000 images, got 600" in message
    assert "workload.options.train_examples: 600" in message


class Exploit:
    """What an unpickler would call."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_a_pickle_that_is_not_the_published_one_is_not_loaded(tmp_path):
    variant, marker = write_python_version(tmp_path), tmp_path / "ran"
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps({b"labels": [1], b"data": Exploit(marker)}))
    found = hashlib.md5(path.read_bytes()).hexdigest()  # noqa: S324  as published
    message = error(tmp_path, variant)
    assert f"{path}: MD5 must be the published {variant.python.checksums[path.name]}, got {found}" in message
    assert "the file was not loaded" in message
    assert URL in message
    assert not marker.exists()


def archive(tmp_path, outside: bool = False) -> bytes:
    folder = write_cifar10(tmp_path / "source")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder, folder.name)
        if outside:
            tar.addfile(tarfile.TarInfo("../outside"))
    return packed.getvalue()


def published(content: bytes):
    checksum = f"md5:{hashlib.md5(content).hexdigest()}"  # noqa: S324  as published
    return replace(VARIANTS[10], archive=VARIANTS[10].archive._replace(checksum=checksum))


def test_a_download_is_checked_unpacked_completely_and_done_once(tmp_path, monkeypatch):
    content = archive(tmp_path)
    server = Server(monkeypatch, {"cifar-10-binary.tar.gz": content})
    root = tmp_path / "new" / "data"
    asked = options(data=str(root), download=True, train_examples=TRAIN, test_examples=TEST)
    train, test = read_cifar(published(content), asked)
    assert (len(train.labels), len(test.labels)) == (TRAIN, TEST)
    read_cifar(published(content), asked)
    download_archive(published(content).archive, root / "cifar-10-batches-bin")
    assert server.asked == [URL]
    assert sorted(path.name for path in root.iterdir()) == [
        ".cifar-10-batches-bin.lock",
        "cifar-10-batches-bin",
    ]
    assert sorted(path.name for path in (root / "cifar-10-batches-bin").iterdir()) == [
        *(f"data_batch_{part}.bin" for part in range(1, 6)),
        "test_batch.bin",
    ]


def test_an_archive_that_would_write_outside_its_folder_leaves_nothing(tmp_path, monkeypatch):
    content = archive(tmp_path, outside=True)
    Server(monkeypatch, {"cifar-10-binary.tar.gz": content})
    root = tmp_path / "data"
    assert "outside" in error(root, published(content), download=True)
    assert [path.name for path in root.iterdir()] == [".cifar-10-batches-bin.lock"]
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (503, "503 Server Error"),
        (b"<html>no</html>", "does not match the known hash: expected md5:c32a1d4ab5d03f1284b67883e8d87530"),
        (OSError(28, "No space left on device"), "no space left, "),
    ],
)
def test_a_failed_download_names_address_folder_and_the_way_out(tmp_path, monkeypatch, answer, reason):
    Server(monkeypatch, {"cifar-10-binary.tar.gz": answer})
    line = error(tmp_path, download=True)
    assert reason in line
    for part in (URL, str(tmp_path), "workload.options.data", "KRONSCALE_DATA"):
        assert part in line
    assert [path.name for path in tmp_path.iterdir()] == [".cifar-10-batches-bin.lock"]


SWEEP = """\
sweep: nodata
workload: {{name: cifar10, options: {{data: {data}, model: resnet20}}}}
target: {{metric: accuracy, at_least: 0.5}}
training: {{global_batch_size: 50, epochs: 1}}
optimizer: {{lr: 0.1}}
methods: [{{name: sgd}}]
grid: {{world_size: [1]}}
repeats: 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher pins CPUs")
@pytest.mark.ranks
def test_a_run_without_its_data_fails_with_that_cause(tmp_path, capsys):
    file = tmp_path / "s.yaml"
    file.write_text(SWEEP.format(data=tmp_path / "nowhere"))
    runs = tmp_path / "runs"
    assert main(["run", "-f", str(file), "--runs", str(runs)]) == 1
    (outcome,) = (path.read_text() for path in runs.glob("nodata/*/attempt-1/outcome.json"))
    assert '"state": "FAILED"' in outcome
    assert f"DataError: {tmp_path}/nowhere has no batch files of cifar10" in outcome
    capsys.readouterr()
    main(["status", "nodata", "--runs", str(runs)])
    assert "has no batch files of cifar10" in " ".join(capsys.readouterr().out.split())
