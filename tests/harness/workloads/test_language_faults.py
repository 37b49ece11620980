"""Promise: a text, tokenizer or size that cannot serve is one line with what to do."""

from __future__ import annotations

import sys

import pytest

from harness.cli import main
from harness.errors import DataError
from harness.workloads import WORKLOADS
from harness.workloads.language.language import Bert, Gpt
from harness.workloads.models.language import bert, gpt2
from tests.harness.workloads.texts import WORDS, options, share, write_texts, write_tokenizer

WITHOUT_MASK = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]


FAULTS = {
    "no text": (
        lambda folder: (folder / "train.txt").unlink(), {},
        "/train.txt does not exist; put a text file there, name it in workload.options.train_text, or",
    ),
    "no held-out text": (
        lambda folder: (folder / "test.txt").unlink(), {}, "/test.txt does not exist; put a text file there",
    ),
    "a folder as a text": (
        lambda folder: (folder / "books").mkdir(), {"train_text": "books"}, "/books does not exist; put a",
    ),
    "an empty text": (
        lambda folder: (folder / "train.txt").write_text(""), {}, "train.txt must have at least one line",
    ),
    "blank lines": (
        lambda folder: (folder / "test.txt").write_text(" \n\n  \n"), {}, "test.txt must have at least",
    ),
    "no text at all": (
        lambda folder: (folder / "train.txt").write_bytes(b"PNG\xff\xfe" * 40), {},
        "train.txt must be UTF-8 text",
    ),
    "no tokenizer": (
        lambda folder: (folder / "words.json").unlink(), {},
        "/words.json does not exist; name a tokenizer.json in workload.options.tokenizer, or omit the option",
    ),
    "a broken tokenizer": (
        lambda folder: (folder / "words.json").write_text('{"version": "1.0", "model"'), {},
        "/words.json is not a tokenizer.json that the library tokenizers reads (",
    ),
    "another tokenizer": (
        lambda folder: write_tokenizer(folder / "words.json", WITHOUT_MASK), {},
        "/words.json must have the tokens [PAD], [UNK], [CLS], [SEP], [MASK], but has no [MASK]; use another",
    ),
    "too small a vocabulary": (
        lambda folder: None, {"vocabulary": 44},
        "/words.json has ids up to 44, but workload.options.vocabulary=44; use a vocabulary of at least 45",
    ),
    "too short a text": (
        lambda folder: None, {"sequence_length": 400},
        "/test.txt has 300 tokens, fewer than the 398 of one sequence; use a longer text, or a smaller "
        "workload.options.sequence_length",
    ),
    "fewer sequences than asked for": (
        lambda folder: None, {"train_examples": 1000},
        "/train.txt has 162 sequences, but workload.options.train_examples=1000; use 0 for all, "
        "or 1 to 162",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_text_or_tokenizer_that_cannot_serve_is_one_line(fault, tmp_path):
    spoil, changes, message = FAULTS[fault]
    write_texts(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError) as raised:
        Bert(options("bert", tmp_path, **changes), share())
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_batch_beyond_the_text_is_one_line(tmp_path):
    write_texts(tmp_path, train=100)
    with pytest.raises(DataError, match=r"has 9 sequences, fewer than one global batch of 12; use a longer"):
        Gpt(options("gpt", tmp_path), share())


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path, monkeypatch):
    write_texts(tmp_path)
    monkeypatch.setenv("KRONSCALE_CACHE", str(tmp_path / "train.txt" / "below"))
    with pytest.raises(
        DataError, match=r"token ids could not be written to .*Not a directory.*KRONSCALE_CACHE"
    ):
        Gpt(options("gpt", tmp_path), share())


def test_what_failed_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    write_texts(tmp_path)
    (tmp_path / "test.txt").write_text("")
    monkeypatch.setenv("KRONSCALE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError):
        Gpt(options("gpt", tmp_path), share())
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    write_texts(tmp_path)
    assert Gpt(options("gpt", tmp_path), share()).steps_per_epoch == 10


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    write_texts(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name, build in {"bert": bert, "gpt": gpt2}.items():
        with pytest.raises(
            ModuleNotFoundError,
            match=rf"workload {name} needs transformers: pip install 'kronscale\[language\]'",
        ):
            build(options(name, tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"a text as training data needs tokenizers: pip install 'kronscale\[language\]'",
    ):
        Gpt(options("gpt", tmp_path), share())


SWEEP = """\
sweep: text
workload: {{name: {name}, options: {{data: {data}{more}}}}}
target: {{metric: loss, at_most: 3}}
training: {{global_batch_size: 16, epochs: 1}}
optimizer: {{lr: 0.1}}
methods: [{{name: sgd}}]
grid: {{world_size: [1]}}
repeats: 1
"""


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("gpt", "hidden: 100", "hidden=100 must be a multiple of heads=12"),
        ("gpt", "vocabulary: 200", "vocabulary=200 is not allowed; use a value >= 256"),
        ("bert", "vocabulary: 260", "vocabulary=260 is not allowed; use a value >= 261"),
        ("bert", "sequence_length: 3", "sequence_length=3 is not allowed; use a value >= 4"),
        ("gpt", "layers: 0", "layers=0 is not allowed; use a value >= 1"),
        ("gpt", "dropout: 1", "dropout=1.0 is not allowed; use a value in [0, 1)"),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_anything_runs(tmp_path, capsys, name, more, message):
    file = tmp_path / "s.yaml"
    file.write_text(SWEEP.format(name=name, data="embedded", more=f", {more}"))
    assert main(["plan", "-f", str(file)]) == 2
    assert f"{file}:2: workload.options.{message}" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_run_without_its_text_fails_with_that_cause(tmp_path, capsys):
    file, runs = tmp_path / "s.yaml", tmp_path / "runs"
    file.write_text(SWEEP.format(name="gpt", data=tmp_path / "nowhere", more=""))
    assert main(["run", "-f", str(file), "--runs", str(runs)]) == 1
    (outcome,) = (path.read_text() for path in runs.glob("text/*/attempt-1/outcome.json"))
    assert f"DataError: {tmp_path}/nowhere/train.txt does not exist" in outcome
    capsys.readouterr()


def test_the_number_of_sequences_is_known_where_the_options_say_it():
    for name in ("bert", "gpt"):
        description = WORKLOADS[name]
        assert description.examples({}) == 0
        assert description.examples({"train_examples": 70}) == 70
        assert description.examples({"data": "synthetic"}) == 8192
