"""Promise: a text is any number of files, in BERT's published layout or WikiText's."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest

from harness.errors import DataError
from harness.workloads.language.corpus import find_text, read_corpus
from harness.workloads.language.language import Bert
from tests.harness.workloads.texts import independently, options, share, write_texts

PUBLISHED = "w1 w2\nw3\n\n  \nw4 w5 w6\n\nw7\n"  # a sentence a line, documents with empty lines between
WIKITEXT = " = w1 = \n\n w2 w3\n \n = = w4 = = \n \n w5\n = w6 w7 = \n \n w8 = w9\n"


def read(folder: Path, text: str = "part-*.txt", **changes: object):
    asked = options("bert", folder, train_text=text, sequence_length=5, **changes)
    return read_corpus(asked, (), 2, 2).train


@pytest.fixture
def folder(tmp_path):
    write_texts(tmp_path)
    (tmp_path / "part-0.txt").write_text(PUBLISHED)
    (tmp_path / "part-1.txt").write_text("w8 w9\nw10\n")
    return tmp_path


def test_files_follow_each_other_and_empty_lines_or_a_new_file_begin_a_document(folder):
    found = read(folder)
    assert found.tokens.tolist() == [5 + number for number in range(1, 11)]
    assert found.lines.tolist() == [0, 2, 3, 6, 7, 9]
    assert found.documents.tolist() == [0, 3, 6, 7]
    other_way = read(folder, "part-1.txt, part-0.txt")
    assert other_way.tokens.tolist()[:3] == [13, 14, 15]
    assert other_way.documents.tolist() == [0, 3, 6, 9]


def test_titles_begin_the_documents_of_wikitext_and_headings_of_sections_do_not(folder):
    (folder / "wiki.txt").write_text(WIKITEXT)
    (folder / "words.json").write_text((folder / "words.json").read_text().replace('"w39": 44', '"=": 44'))
    found = read(folder, "wiki.txt", documents="titles")
    assert found.lines.tolist() == [0, 3, 5, 10, 11, 15]
    assert found.documents.tolist() == [0, 11]
    assert read(folder, "wiki.txt").documents.tolist() == [0, 3, 5, 10, 15]


def test_compressed_files_hold_the_same_text(folder):
    plain = read(folder).tokens.tolist()
    (folder / "zip-0.txt.gz").write_bytes(gzip.compress(PUBLISHED.encode()))
    (folder / "zip-1.txt.xz").write_bytes(lzma.compress((folder / "part-1.txt").read_bytes()))
    assert read(folder, "zip-*").tokens.tolist() == plain


def test_lines_are_streamed(tmp_path):
    """The first line of an endless file is there before its end."""
    (tmp_path / "a.txt").write_text("w1\n" * 50_000)
    lines = find_text(options("bert", tmp_path, train_text="a.txt"), "train_text").lines()
    assert next(lines).text == "w1\n"
    (tmp_path / "a.txt").write_text("w2\n")  # the rest was not read yet
    assert sum(1 for _ in lines) < 49_999


def test_texts_of_a_repeated_training_are_those_of_one_file(tmp_path):
    write_texts(tmp_path)
    whole = (tmp_path / "train.txt").read_text()
    at = whole.index("\n", len(whole) // 2) + 1
    for name, part in (("a.txt", whole[:at]), ("b.txt", whole[at:])):
        (tmp_path / name).write_text(part)
    one, two = (
        [batch[0].tolist() for batch in Bert(options("bert", tmp_path, train_text=text), share()).batches(0)]
        for text in ("train.txt", "a.txt,b.txt")
    )
    assert one == two
    assert len(independently(tmp_path / "train.txt")) == 1300


FAULTS = {
    "no match": ("none-*.txt", None, "/none-*.txt does not exist; put a text file there, name it in"),
    "one is missing": ("part-0.txt,gone.txt", None, "/gone.txt does not exist; put a text file there"),
    "named twice": ("part-*.txt,part-1.txt", None, "part-1.txt is named twice in workload.options"),
    "no name": (" , ", None, "workload.options.train_text=' , ' names no file; name one or more"),
    "one is empty": ("part-*.txt", ("part-2.txt", b"\n \n"), "part-2.txt must have at least one line of"),
    "one is no text": ("part-*.txt", ("part-2.txt", b"\xff\xfe\x00"), "part-2.txt must be UTF-8 text"),
    "a cut archive": (
        "x.gz", ("x.gz", gzip.compress(b"w1 w2\n" * 900)[:-9]),
        "x.gz cannot be read: Compressed file ended before the end-of-stream marker was reached",
    ),
    "a damaged archive": (
        "x.gz", ("x.gz", gzip.compress(b"w1 " * 99)[:-8] + b"\1" * 8), "x.gz cannot be read: CRC",
    ),
    "no archive": (
        "x.xz", ("x.xz", b"w1 w2\n"), "x.xz cannot be read: Input format not supported by decoder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_cannot_serve_is_one_line(folder, fault):
    named, spoilt, message = FAULTS[fault]
    if spoilt is not None:
        (folder / spoilt[0]).write_bytes(spoilt[1])
    with pytest.raises(DataError) as raised:
        read(folder, named)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
