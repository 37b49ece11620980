"""Promise: data that is missing, damaged, foreign or hostile is one line with what to do; no code is run."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import requests

from harness.cli import main
from harness.errors import DataError
from harness.workloads.cifar.cifar_files import VARIANTS, read_cifar
from harness.workloads.sources.folders import download_archive
from tests.harness.workloads.batch_files import (
    TEST,
    TRAIN,
    options,
    write_cifar10,
    write_cifar100,
    write_python_version,
)
from tests.harness.workloads.server import Server

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
    for size in (0, 1, 40, len(whole) // 2 + 1, len(whole) - 1):
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


def test_a_file_of_cifar100_is_refused_as_one_of_cifar10(tmp_path):
    other = write_cifar100(tmp_path) / "train.bin"
    path = write_cifar10(tmp_path) / "data_batch_1.bin"
    path.write_bytes(other.read_bytes())
    assert "not a batch file of cifar10" in error(tmp_path)


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

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "exploit",
    [
        lambda marker: Exploit(os.system, f"touch {marker}"),
        lambda marker: Exploit(eval, f"open({str(marker)!r}, 'w')"),
        lambda marker: Exploit(Path.touch, marker),
        lambda marker: Exploit(np.save, str(marker), np.zeros(1)),
        lambda marker: Exploit(getattr, "text", "upper"),
        lambda marker: np.array([Exploit(os.system, f"touch {marker}")], dtype=object),
    ],
    ids=["system", "eval", "method", "numpy", "getattr", "object array"],
)
@pytest.mark.parametrize("name", ["data_batch_1", "test_batch"])
def test_a_pickle_that_is_not_the_published_one_is_not_loaded(tmp_path, exploit, protocol, name):
    variant, marker = write_python_version(tmp_path), tmp_path / "ran"
    path = tmp_path / "cifar-10-batches-py" / name
    path.write_bytes(pickle.dumps({b"labels": [1], b"data": exploit(marker)}, protocol=protocol))
    found = hashlib.md5(path.read_bytes()).hexdigest()  # noqa: S324  as published
    message = error(tmp_path, variant)
    assert f"{path}: MD5 must be the published {variant.python.checksums[name]}, got {found}" in message
    assert "the file was not loaded" in message
    assert URL in message
    assert not list(tmp_path.glob("ran*"))


def test_any_change_of_a_pickle_is_found(tmp_path):
    variant, path = write_python_version(tmp_path), tmp_path / "cifar-10-batches-py" / "data_batch_3"
    whole = path.read_bytes()
    changed = bytes([whole[400] ^ 1])
    for content in (b"", whole[:-1], whole + b".", whole[:400] + changed + whole[401:]):
        path.write_bytes(content)
        assert f"{path}: MD5 must be the published" in error(tmp_path, variant)


def test_small_files_of_the_python_version_are_not_the_published_ones(tmp_path):
    write_python_version(tmp_path)
    assert "MD5 must be the published c99cafc152244af753f735de768cd75f" in error(tmp_path)


def test_a_pickle_in_the_binary_version_is_not_loaded(tmp_path):
    path, marker = write_cifar10(tmp_path) / "data_batch_1.bin", tmp_path / "ran"
    path.write_bytes(pickle.dumps(Exploit(os.system, f"touch {marker}")))
    assert "not a batch file of cifar10" in error(tmp_path)
    assert not marker.exists()


def test_every_file_of_the_python_version_has_a_checksum():
    for variant in VARIANTS.values():
        python = variant.python
        assert set(python.checksums) == {*python.train, python.test}
        assert {len(checksum) for checksum in python.checksums.values()} == {32}


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
        (requests.ConnectionError("Name or service not known"), "Name or service not known"),
        (503, "503 Server Error"),
        (requests.Timeout("timed out"), "timed out"),
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
