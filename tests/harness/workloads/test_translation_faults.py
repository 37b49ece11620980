"""Promise: files, options and downloads that cannot serve translation are one line with what to do."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import urllib.error
import urllib.request

import pytest

from harness.cli import main
from harness.errors import DataError
from harness.workloads import WORKLOADS
from harness.workloads.sources.download import Published
from harness.workloads.translation import multi30k_files
from harness.workloads.translation.multi30k_files import PUBLISHED, SOURCE
from tests.harness.workloads.sentences import TRAIN, translation, write_pairs
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
        "/train.en is not there, nor train.en.gz; both languages of both parts are needed",
    ),
    "a missing part": (
        lambda folder: [(folder / f"val.{side}").unlink() for side in ("de", "en")], {},
        "/val.de is not there",
    ),
    "another language": (lambda folder: None, {"source": "fr"}, "/train.fr is not there, nor train.fr.gz"),
    "a shorter side": (
        lambda folder: (folder / "train.de").write_text("w1\nw2\n"), {},
        f"/train.de has 2 lines, train.en {TRAIN}; each line has its translation in the same line of the",
    ),
    "an empty file": (lambda folder: (folder / "val.en").write_text(""), {}, "/val.en: has no text in it"),
    "blank lines alone": (lambda folder: (folder / "val.en").write_text("\n \n"), {}, "val.en: has no text"),
    "an empty line": (
        lambda folder: edited(folder, "train.en", 7, b" \t"), {},
        "/train.en: line 7 is empty; leave that line",
    ),
    "no text at all": (
        lambda folder: edited(folder, "val.de", 3, b"Stra\xdfe"), {},
        "/val.de: no UTF-8 text: invalid continuation byte in line 3",
    ),
    "a cut gzip": (
        lambda folder: zipped(folder, "train.de", lambda packed: packed[:-20]), {},
        "/train.de.gz: cut short or damaged: Compressed file ended before the end-of-stream marker",
    ),
    "a damaged gzip": (
        lambda folder: zipped(folder, "val.en", lambda packed: packed[:40] + b"\0\0\0\0" + packed[44:]), {},
        "/val.en.gz: cut short or damaged: ",
    ),
    "no gzip": (
        lambda folder: zipped(folder, "val.en", lambda packed: b"<html>" + packed), {},
        "/val.en.gz: cut short or damaged: Not a gzipped file",
    ),
    "an empty gzip": (lambda folder: zipped(folder, "val.en", lambda _: b""), {}, "/val.en.gz: has no text"),
    "another tokenizer": (
        lambda folder: write_tokenizer(folder / "words.json", ["[PAD]", "[UNK]", *WORDS]), {},
        "/words.json: has no token [BOS], [EOS]; use a tokenizer with all of [PAD], [BOS], [EOS]",
    ),
    "long sentences alone": (
        lambda folder: None, {"longest": 1},
        "/train.de: no pair has at most 1 tokens a side; use a larger workload.options.longest",
    ),
    "fewer pairs than asked for": (
        lambda folder: None, {"test_examples": 32},
        "/val.de: 31 pairs, but workload.options.test_examples=32; use 0 for all, or 1 to 31",
    ),
    "less than a batch": (
        lambda folder: None, {"train_examples": 11},
        "there are 11 training pairs, fewer than one global batch of 12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_cannot_serve_are_one_line(fault, tmp_path):
    spoil, changes, said = FAULTS[fault]
    write_pairs(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError) as refused:
        translation(tmp_path, **changes)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


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
    ("more", "target", "said"),
    [
        ("feed_forward: 0", LOSS, "workload.options.feed_forward=0 is not allowed; use a value >= 1"),
        ("longest: 0", LOSS, "workload.options.longest=0 is not allowed; use a value >= 1"),
        ("vocabulary: 258", LOSS, "workload.options.vocabulary=258 is not allowed; use a value >= 259"),
        (
            "label_smoothing: 1",
            LOSS,
            "workload.options.label_smoothing=1.0 is not allowed; use a value in [0, 1)",
        ),
        ("target: de", LOSS, "workload.options.target='de' is the source too; name two languages"),
        ("hidden: 100", LOSS, "workload.options.hidden=100 is not a multiple of heads=8"),
        ("layers: 2", BLEU, "target.metric='bleu' needs workload.options.bleu: true, which takes time"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(tmp_path, capsys, more, target, said):
    file = tmp_path / "s.yaml"
    file.write_text(SWEEP.format(data="files", more=f", {more}", target=target))
    assert main(["plan", "-f", str(file)]) == 2
    assert f"{file}:{2 if target == LOSS else 3}: {said}" in capsys.readouterr().err


def test_nothing_is_embedded_and_the_number_of_pairs_is_known_where_the_options_say_it():
    card = WORKLOADS["multi30k"]
    with pytest.raises(ValueError, match=r"data='embedded' has no parallel text; use files, synthetic or a"):
        card.examples({"data": "embedded"})
    assert card.examples({}) == 0
    assert card.examples({"train_examples": 70}) == 70
    assert card.examples({"data": "synthetic"}) == 8192


@pytest.mark.parametrize(("missing", "bleu"), [("tokenizers", False), ("sacrebleu.metrics.bleu", True)])
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, missing, bleu):
    write_pairs(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the extra language: pip install 'kronscale"):
        translation(tmp_path, bleu=bleu)


class Server:
    """What urlopen finds at an address: the files of a folder, gzipped."""

    def __init__(self, monkeypatch, folder, broken=None):
        self.asked = []
        packed = {
            f"{part}.{side}.gz": gzip.compress((folder / f"{part}.{side}").read_bytes(), mtime=0)
            for part in ("train", "val")
            for side in ("de", "en")
        }

        def urlopen(url, timeout):
            self.asked.append(url)
            if broken and url.endswith(broken[0]):
                if isinstance(broken[1], Exception):
                    raise broken[1]
                return io.BytesIO(broken[1])
            return io.BytesIO(packed[url.rpartition("/")[2]])

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        monkeypatch.setattr(
            multi30k_files,
            "PUBLISHED",
            [
                Published(file.url, hashlib.sha256(packed[name]).hexdigest(), "sha256")
                for file in PUBLISHED
                if (name := file.url.rpartition("/")[2]) in packed
            ],
        )


def test_a_download_is_checked_whole_and_done_once(tmp_path, monkeypatch):
    source, root = tmp_path / "source", tmp_path / "new" / "data"
    source.mkdir()
    write_pairs(source)
    server = Server(monkeypatch, source)
    for _ in range(2):
        mine = translation(root, tokenizer="", vocabulary=270, download=True)
        assert len(mine._text.train.numbers) == TRAIN
    assert len(server.asked) == 4
    assert sorted(path.name for path in root.iterdir()) == [".multi30k.lock", "multi30k"]
    assert sorted(path.name for path in (root / "multi30k").iterdir()) == [
        "train.de.gz", "train.en.gz", "val.de.gz", "val.en.gz",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (urllib.error.URLError(OSError(-2, "Name or service not known")), "Name or service not known"),
        (b"<html>no</html>", "SHA256 of what came is"),
    ],
)
def test_a_failed_download_names_the_file_and_leaves_nothing(tmp_path, monkeypatch, answer, said):
    source, root = tmp_path / "source", tmp_path / "data"
    source.mkdir()
    write_pairs(source)
    Server(monkeypatch, source, ("val.de.gz", answer))
    with pytest.raises(DataError) as refused:
        translation(root, tokenizer="", vocabulary=270, download=True)
    line = str(refused.value)
    for part in (said, "/data/task1/raw/val.de.gz could not be brought to", str(root), "KRONSCALE_DATA"):
        assert part in line
    assert [path.name for path in root.iterdir()] == [".multi30k.lock"]


def test_a_missing_folder_says_where_to_get_the_data(tmp_path):
    with pytest.raises(DataError) as refused:
        translation(tmp_path / "nowhere")
    said = str(refused.value)
    for part in (
        f"{tmp_path}/nowhere/multi30k is not there",
        "train.de",
        SOURCE,
        "workload.options.download",
    ):
        assert part in said


def test_published_files_are_of_one_commit_and_in_four_languages():
    names = {file.url.rpartition("/")[2] for file in PUBLISHED}
    assert names == {f"{part}.{side}.gz" for part in ("train", "val") for side in ("de", "en", "fr", "cs")}
    assert len({file.url.rpartition("/")[0] for file in PUBLISHED}) == 1
    assert {len(file.digest) for file in PUBLISHED} == {64}
