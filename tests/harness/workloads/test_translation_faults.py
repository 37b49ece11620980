"""Promise: files, options and downloads that cannot serve translation are one line with what to do."""

from __future__ import annotations

import gzip
import hashlib
import sys

import pytest
import requests

from harness.cli import main
from harness.errors import DataError
from harness.workloads import WORKLOADS
from harness.workloads.translation import pairs as sentence_files
from harness.workloads.translation.pairs import PUBLISHED, SOURCE
from tests.harness.workloads.sentences import TRAIN, translation, write_pairs
from tests.harness.workloads.server import Server
from tests.harness.workloads.texts import WORDS, write_tokenizer


def zipped(folder, name, spoil):
    """The file `name` gzipped, its bytes changed."""
    plain = folder / name
    (folder / f"{name}.gz").write_bytes(spoil(gzip.compress(plain.read_bytes(), mtime=0)))
    plain.unlink()


def edited(folder, name, line, text):
    lines = (folder / name).read_bytes().split(b"\n")
    lines[line - 1] = text
    (folder / name).write_bytes(b"\n".join(lines))


FAULTS = {
    "a missing side": (
        lambda folder: (folder / "train.en").unlink(), {},
        "/train.en nor train.en.gz exists; both languages are needed",
    ),
    "a missing part": (
        lambda folder: [(folder / f"val.{side}").unlink() for side in ("de", "en")], {},
        "/val.de nor val.de.gz exists",
    ),
    "another language": (lambda folder: None, {"source": "fr"}, "/train.fr nor train.fr.gz exists"),
    "a shorter side": (
        lambda folder: (folder / "train.de").write_text("w1\nw2\n"), {},
        f"/train.de has 2 lines, train.en {TRAIN}; each line needs its translation in the same line of",
    ),
    "an empty file": (lambda folder: (folder / "val.en").write_text(""), {}, "/val.en must have at least"),
    "blank lines alone": (
        lambda folder: (folder / "val.en").write_text("\n \n"), {}, "val.en must have at least one line",
    ),
    "an empty line": (
        lambda folder: edited(folder, "train.en", 7, b" \t"), {},
        "/train.en: line 7 is empty; remove it",
    ),
    "no text at all": (
        lambda folder: edited(folder, "val.de", 3, b"Stra\xdfe"), {},
        "/val.de must be UTF-8 text: invalid continuation byte",
    ),
    "a cut gzip": (
        lambda folder: zipped(folder, "train.de", lambda packed: packed[:-20]), {},
        "/train.de.gz cannot be read: Compressed file ended before the end-of-stream marker",
    ),
    "a damaged gzip": (
        lambda folder: zipped(folder, "val.en", lambda packed: packed[:40] + b"\0\0\0\0" + packed[44:]), {},
        "/val.en.gz cannot be read: ",
    ),
    "no gzip": (
        lambda folder: zipped(folder, "val.en", lambda packed: b"<html>" + packed), {},
        "/val.en.gz cannot be read: Not a gzipped file",
    ),
    "an empty gzip": (lambda folder: zipped(folder, "val.en", lambda _: b""), {}, "/val.en.gz must have at"),
    "another tokenizer": (
        lambda folder: write_tokenizer(folder / "words.json", ["[PAD]", "[UNK]", *WORDS]), {},
        "/words.json must have the tokens [PAD], [BOS], [EOS], but has no [BOS], [EOS]; use another",
    ),
    "long sentences alone": (
        lambda folder: None, {"longest": 1},
        "/train.de: no pair has at most 1 tokens a side; use a larger workload.options.longest",
    ),
    "fewer pairs than asked for": (
        lambda folder: None, {"test_examples": 32},
        "/val.de has 31 pairs, but workload.options.test_examples=32; use 0 for all, or 1 to 31",
    ),
    "less than a batch": (
        lambda folder: None, {"train_examples": 11},
        "there are 11 training pairs, fewer than one global batch of 12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_cannot_serve_are_one_line(fault, tmp_path):
    spoil, changes, message = FAULTS[fault]
    write_pairs(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError) as raised:
        translation(tmp_path, **changes)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_may_be_gzipped_and_in_a_folder_of_their_own(tmp_path):
    plain, inside = tmp_path / "plain", tmp_path / "root" / "multi30k"
    for folder in (plain, inside):
        folder.mkdir(parents=True)
        write_pairs(folder)
    for name in ("train.de", "val.en"):
        zipped(inside, name, lambda packed: packed)
    (inside / "words.json").rename(tmp_path / "root" / "words.json")
    wanted, got = (translation(folder)._text for folder in (plain, tmp_path / "root"))
    for one, other in ((got.train, wanted.train), (got.test, wanted.test)):
        for side in ("source", "target"):
            assert getattr(one, side).tokens.tolist() == getattr(other, side).tokens.tolist()
            assert getattr(one, side).starts.tolist() == getattr(other, side).starts.tolist()


LOSS, BLEU = "loss, at_most: 3", "bleu, at_least: 30"
SWEEP = """\
sweep: pairs
workload: {{name: multi30k, options: {{data: {data}{more}}}}}
target: {{metric: {target}}}
training: {{global_batch_size: 16, epochs: 1}}
optimizer: {{lr: 0.1}}
methods: [{{name: sgd}}]
grid: {{world_size: [1]}}
repeats: 1
"""


@pytest.mark.parametrize(
    ("more", "target", "message"),
    [
        ("feed_forward: 0", LOSS, "workload.options.feed_forward=0 is not allowed; use a value >= 1"),
        ("longest: 0", LOSS, "workload.options.longest=0 is not allowed; use a value >= 1"),
        ("vocabulary: 258", LOSS, "workload.options.vocabulary=258 is not allowed; use a value >= 259"),
        (
            "label_smoothing: 1",
            LOSS,
            "workload.options.label_smoothing=1.0 is not allowed; use a value in [0, 1)",
        ),
        ("target: de", LOSS, "workload.options.target='de' must be another language than source"),
        ("hidden: 100", LOSS, "workload.options.hidden=100 must be a multiple of heads=8"),
        (
            "layers: 2",
            BLEU,
            "target.metric='bleu' needs workload.options.bleu: true",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(tmp_path, capsys, more, target, message):
    file = tmp_path / "s.yaml"
    file.write_text(SWEEP.format(data="files", more=f", {more}", target=target))
    assert main(["plan", "-f", str(file)]) == 2
    assert f"{file}:{2 if target == LOSS else 3}: {message}" in capsys.readouterr().err


def test_nothing_is_embedded_and_the_number_of_pairs_is_known_where_the_options_say_it():
    description = WORKLOADS["multi30k"]
    with pytest.raises(ValueError, match=r"data='embedded' has no parallel text; use files, synthetic or a"):
        description.examples({"data": "embedded"})
    assert description.examples({}) == 0
    assert description.examples({"train_examples": 70}) == 70
    assert description.examples({"data": "synthetic"}) == 8192


@pytest.mark.parametrize(("missing", "bleu"), [("tokenizers", False), ("sacrebleu.metrics.bleu", True)])
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, missing, bleu):
    write_pairs(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=r"needs .*: pip install 'kronscale\[language\]'"):
        translation(tmp_path, bleu=bleu)


def serve(monkeypatch, folder, **broken) -> Server:
    """Publishes the files of a folder, gzipped."""
    packed = {
        f"{split}.{side}.gz": gzip.compress((folder / f"{split}.{side}").read_bytes(), mtime=0)
        for split in ("train", "val")
        for side in ("de", "en")
    }
    published = [
        file._replace(checksum=f"sha256:{hashlib.sha256(packed[file.name]).hexdigest()}")
        for file in PUBLISHED
        if file.name in packed
    ]
    monkeypatch.setattr(sentence_files, "PUBLISHED", published)
    return Server(monkeypatch, {**packed, **broken})


def test_a_download_is_checked_whole_and_done_once(tmp_path, monkeypatch):
    source, root = tmp_path / "source", tmp_path / "new" / "data"
    source.mkdir()
    write_pairs(source)
    server = serve(monkeypatch, source)
    for _ in range(2):
        mine = translation(root, tokenizer="", vocabulary=270, download=True)
        assert len(mine._text.train.indices) == TRAIN
    assert len(server.asked) == 4
    assert sorted(path.name for path in root.iterdir()) == [".multi30k.lock", "multi30k"]
    assert sorted(path.name for path in (root / "multi30k").iterdir()) == [
        "train.de.gz", "train.en.gz", "val.de.gz", "val.en.gz",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (requests.ConnectionError("Name or service not known"), "Name or service not known"),
        (b"<html>no</html>", "SHA256 hash of downloaded file (val.de.gz) does not match"),
    ],
)
def test_a_failed_download_names_the_file_and_leaves_nothing(tmp_path, monkeypatch, answer, message):
    source, root = tmp_path / "source", tmp_path / "data"
    source.mkdir()
    write_pairs(source)
    serve(monkeypatch, source, **{"val.de.gz": answer})
    with pytest.raises(DataError) as raised:
        translation(root, tokenizer="", vocabulary=270, download=True)
    line = str(raised.value)
    for part in (message, "/data/task1/raw could not be written to", str(root), "KRONSCALE_DATA"):
        assert part in line
    assert [path.name for path in root.iterdir()] == [".multi30k.lock"]


def test_a_missing_folder_says_where_to_get_the_data(tmp_path):
    with pytest.raises(DataError) as raised:
        translation(tmp_path / "nowhere")
    message = str(raised.value)
    for part in (
        f"{tmp_path}/nowhere/multi30k does not exist",
        "train.de",
        SOURCE,
        "workload.options.download",
    ):
        assert part in message


def test_published_files_are_of_one_commit_and_in_four_languages():
    names = {file.url.rpartition("/")[2] for file in PUBLISHED}
    assert names == {f"{part}.{side}.gz" for part in ("train", "val") for side in ("de", "en", "fr", "cs")}
    assert len({file.url.rpartition("/")[0] for file in PUBLISHED}) == 1
    assert {len(file.checksum) for file in PUBLISHED} == {len("sha256:") + 64}
