"""Promise: data that is missing, damaged, foreign or hostile is one line with what to do; no code is run."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import tarfile
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.cli import main
from harness.errors import DataError
from harness.workloads.cifar.files import VARIANTS, read_cifar
from harness.workloads.cifar.plain_pickle import read_plain
from harness.workloads.sources import download
from tests.harness.workloads.batch_files import TEST, TRAIN, change, options, write_cifar10, write_cifar100

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"


def refusal(root: Path, classes: int = 10, variant=None, **changes) -> str:
    """The one line."""
    asked = options(data=str(root), **{"train_examples": TRAIN, "test_examples": TEST, **changes})
    with pytest.raises(DataError) as refused:
        read_cifar(variant or VARIANTS[classes], asked)
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_a_missing_folder_says_where_to_get_the_data_and_where_to_name_a_copy(tmp_path, monkeypatch):
    said = refusal(tmp_path)
    for part in (
        f"{tmp_path}/cifar-10-batches-py is not there",
        URL,
        "download: true",
        "workload.options.data",
    ):
        assert part in said
    monkeypatch.setenv("KRONSCALE_DATA", str(tmp_path))
    assert "KRONSCALE_DATA" in refusal("files")


def test_a_batch_file_that_is_cut_short_is_named(tmp_path):
    path = write_cifar10(tmp_path) / "data_batch_3"
    whole = path.read_bytes()
    for size in (0, 1, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        said = refusal(tmp_path)
        assert f"{path}: cut short or damaged after {size} bytes" in said


def test_a_damaged_byte_is_a_line_and_no_traceback(tmp_path):
    path = write_cifar10(tmp_path) / "data_batch_1"
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    for place in generator.integers(0, 400, 200):
        path.write_bytes(whole[:place] + bytes([generator.integers(256)]) + whole[place + 1 :])
        try:
            read_cifar(VARIANTS[10], options(data=str(tmp_path), train_examples=TRAIN, test_examples=TEST))
        except DataError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda batch: batch.pop(b"labels"), "has no labels; expected a batch file of cifar10"),
        (lambda batch: batch[b"labels"].pop(), "120 images with 119 labels"),
        (lambda batch: batch[b"labels"].__setitem__(7, 10), "labels from 0 to 10, allowed are 0 to 9"),
        (lambda batch: batch.update({b"data": batch[b"data"][:, :-1]}), "[120, 3071], not uint8"),
        (lambda batch: batch.update({b"data": [1, 2]}), "data is list"),
    ],
)  # fmt: skip
def test_another_kind_of_file_is_refused(tmp_path, edit, said):
    path = write_cifar10(tmp_path) / "data_batch_2"
    change(path, edit)
    assert f"{path}: " in refusal(tmp_path)
    assert said in refusal(tmp_path)
    assert URL in refusal(tmp_path)


def test_a_wrong_number_of_classes_is_refused(tmp_path):
    folder = write_cifar10(tmp_path)
    for part in range(1, 6):
        change(folder / f"data_batch_{part}", lambda batch: batch.update({b"labels": [0, 1] * 60}))
    assert "2 classes in data_batch_1 and its like, 10 expected of cifar10" in refusal(tmp_path)


def test_a_part_of_the_images_has_to_be_asked_for(tmp_path):
    write_cifar100(tmp_path)
    said = refusal(tmp_path, 100, train_examples=0)
    assert "600 images, 50000 expected" in said
    assert "workload.options.train_examples: 600" in said


class Exploit:
    """What an unpickler that admits every name would call."""

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
def test_a_batch_file_with_code_is_refused_and_nothing_runs(tmp_path, exploit, protocol):
    path, marker = write_cifar10(tmp_path) / "data_batch_1", tmp_path / "ran"
    path.write_bytes(pickle.dumps({b"labels": [1], b"data": exploit(marker)}, protocol=protocol))
    assert "while it is read, which was not run" in refusal(tmp_path)
    assert not list(tmp_path.glob("ran*"))


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_of_every_protocol_is_read_as_pickle_reads_it(tmp_path, protocol):
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = {b"data": rows, b"labels": [1, 2, 3], "text": ["a", b"b"], b"turned": np.asfortranarray(rows)}
    (tmp_path / "file").write_bytes(pickle.dumps(content, protocol=protocol))
    read = read_plain(tmp_path / "file")
    for key, value in content.items():
        assert np.array_equal(read.get(key, read.get(key.encode() if isinstance(key, str) else key)), value)


class Server:
    """What urlopen finds at an address."""

    def __init__(self, monkeypatch, answer):
        self.asked = []

        def urlopen(url, timeout):
            self.asked.append(url)
            if isinstance(answer, Exception):
                raise answer
            return io.BytesIO(answer)

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)


def archive(tmp_path) -> bytes:
    folder = write_cifar10(tmp_path / "source")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder, folder.name)
        extra = tarfile.TarInfo("../outside")
        tar.addfile(extra)
    return packed.getvalue()


def published(content: bytes):
    md5 = hashlib.md5(content).hexdigest()  # noqa: S324  as published
    return replace(VARIANTS[10], published=VARIANTS[10].published._replace(digest=md5))


def test_a_download_is_checked_unpacked_whole_and_done_once(tmp_path, monkeypatch):
    content = archive(tmp_path)
    server = Server(monkeypatch, content)
    root = tmp_path / "new" / "data"
    asked = options(data=str(root), download=True, train_examples=TRAIN, test_examples=TEST)
    train, test = read_cifar(published(content), asked)
    assert (len(train.labels), len(test.labels)) == (TRAIN, TEST)
    read_cifar(published(content), asked)
    download.download_archive(published(content).published, root, "cifar-10-batches-py", ("test_batch",))
    assert server.asked == [URL]
    assert sorted(path.name for path in root.iterdir()) == [
        ".cifar-10-batches-py.lock",
        "cifar-10-batches-py",
    ]
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (urllib.error.URLError(OSError(-2, "Name or service not known")), "Name or service not known"),
        (urllib.error.HTTPError(URL, 503, "Service Unavailable", None, None), "Service Unavailable"),
        (TimeoutError("timed out"), "timed out"),
        (b"<html>no</html>", "MD5 of what came is"),
        (OSError(28, "No space left on device"), "no space left; "),
    ],
)
def test_a_failed_download_names_address_folder_and_the_way_out(tmp_path, monkeypatch, answer, said):
    Server(monkeypatch, answer)
    line = refusal(tmp_path, download=True)
    assert said in line
    for part in (URL, str(tmp_path), "workload.options.data", "KRONSCALE_DATA"):
        assert part in line
    assert [path.name for path in tmp_path.iterdir()] == [".cifar-10-batches-py.lock"]


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
def test_a_run_without_its_data_fails_with_that_cause(tmp_path, capsys):
    file = tmp_path / "s.yaml"
    file.write_text(SWEEP.format(data=tmp_path / "nowhere"))
    runs = tmp_path / "runs"
    assert main(["run", "-f", str(file), "--runs", str(runs)]) == 1
    (outcome,) = (path.read_text() for path in runs.glob("nodata/*/attempt-1/outcome.json"))
    assert '"state": "FAILED"' in outcome
    assert f"DataError: {tmp_path}/nowhere/cifar-10-batches-py is not there" in outcome
    capsys.readouterr()
    main(["status", "nodata", "--runs", str(runs)])
    assert "is not there" in " ".join(capsys.readouterr().out.split())
