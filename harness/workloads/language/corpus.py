"""The text of a language workload as sequences of token ids, kept in the cache (no torch).

It is one file or many, read line by line. A line is a sentence, as in BERT's published pre-processing, or a
paragraph. Documents are separated by empty lines, or begin with a title as in WikiText.

One rank trains the tokenizer and encodes the texts, a few thousand lines at a time; the others wait, and
later runs read the result. Lines are encoded one by one. Files of ids are memory-mapped, and so are the
places at which lines begin, so that no process holds a text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.errors import DataError
from harness.workloads.description import EMBEDDED, SYNTHETIC
from harness.workloads.language import EMPTY_LINES, SYNTHETIC_TEST, SYNTHETIC_TRAIN, TITLES
from harness.workloads.sources.files import check_enough, read_lines
from harness.workloads.sources.folders import EMBEDDED_FOLDER, data_folder, file_stamp, how_to_point
from harness.workloads.sources.tokenizer import Ids, Tokenizer, Vocabulary, encode, encode_once

_TITLE = re.compile(r"= (?!= ).* =")  # WikiText's ` = Homarus gammarus = `; sections have more signs
_PATTERN = re.compile(r"[*?\[]")


class Line(NamedTuple):
    """A line that is not blank, stripped, with a line end; and whether it is its document's first."""

    text: str
    begins_document: bool


@dataclass(frozen=True)
class Text:
    """Text files, one after another; each begins a new document.

    Attributes:
        documents: how documents are told apart, `empty_lines` or `titles`.
    """

    paths: tuple[Path, ...]
    documents: str

    @property
    def name(self) -> str:
        """The files, for messages."""
        first = str(self.paths[0])
        return first if len(self.paths) == 1 else f"{first} and {len(self.paths) - 1} more"

    @property
    def stamp(self) -> str:
        """Changes with the content of a file, and with how documents are told apart."""
        return "\n".join([self.documents, *map(_stamp, self.paths)])

    def lines(self) -> Iterator[Line]:
        """All lines, streamed.

        Raises:
            DataError: a file is not text, damaged, or has no line.
        """
        for path in self.paths:
            empty = True
            for line in self._lines_of(path):
                empty = False
                yield line
            if empty:
                raise DataError(f"{path} must have at least one line of text")

    def _lines_of(self, path: Path) -> Iterator[Line]:
        begins = True
        for line in read_lines(path):
            if line:
                begins |= self.documents == TITLES and _TITLE.fullmatch(line) is not None
                yield Line(line + "\n", begins)
                begins = False
            else:
                begins |= self.documents == EMPTY_LINES


def find_text(options: Mapping[str, Any], option: str) -> Text:
    """The files that the option `train_text` or `test_text` names, in their order; patterns are sorted.

    Raises:
        DataError: a file is missing or named twice, or no file matches a pattern.
    """
    if options["data"] == EMBEDDED:
        name = f"{option.removesuffix('_text')}.txt.xz"
        return Text((EMBEDDED_FOLDER / "wikitext-2" / name,), TITLES)
    folder, found = data_folder(options["data"]), list[Path]()
    for name in filter(None, map(str.strip, options[option].split(","))):
        paths = sorted(folder.glob(name)) if _PATTERN.search(name) else [folder / name]
        files = [path for path in paths if path.is_file()]
        if not files:
            raise DataError(
                f"{folder / name} does not exist; put a text file there, name it in "
                f"workload.options.{option}, {how_to_point(options['data'])}"
            )
        found += files
    twice = next((path for number, path in enumerate(found) if path in found[:number]), None)
    if twice is not None:
        raise DataError(
            f"{twice} is named twice in workload.options.{option}={options[option]!r}; name it once"
        )
    if not found:
        raise DataError(f"workload.options.{option}={options[option]!r} names no file; name one or more")
    return Text(tuple(found), options.get("documents", EMPTY_LINES))


def _stamp(path: Path) -> str:
    """Of an embedded file the content: an installation may give it any time."""
    if path.is_relative_to(EMBEDDED_FOLDER):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return file_stamp(path)


Starts = np.ndarray[Any, np.dtype[np.int64]]
"""Places in a text, ascending, of the tokens at which something begins."""


@dataclass(frozen=True)
class Sequences:
    """A text cut into `count` sequences of `length` tokens, each beginning `stride` after the one before.

    Attributes:
        name: of the text, for messages.
        tokens: all ids in the text's order; those after the last complete sequence are not used.
        lines: where each line begins.
        documents: where each document begins.
    """

    name: str
    tokens: np.ndarray[Any, Any]
    length: int
    stride: int
    count: int
    lines: Starts
    documents: Starts

    def rows(self, indices: Ids) -> Ids:
        """The sequences of these indices, `[len(indices), length]`."""
        rows: Ids = self.tokens[indices[:, None] * self.stride + np.arange(self.length)].astype(np.int64)
        return rows


@dataclass(frozen=True)
class Corpus:
    """Training and held-out sequences, and the ids in them."""

    train: Sequences
    test: Sequences
    vocabulary: Vocabulary


def read_corpus(options: Mapping[str, Any], specials: tuple[str, ...], length: int, stride: int) -> Corpus:
    """The sequences that the options ask for.

    Raises:
        DataError: a text or tokenizer is missing, damaged or does not fit, or the cache cannot be written.
        ModuleNotFoundError: the library `tokenizers` is not installed.
    """
    if options["data"] == SYNTHETIC:
        return _synthetic(options, specials, length, stride)
    texts = {option: find_text(options, option) for option in ("train_text", "test_text")}

    def write(folder: Path, tokenizer_of: Any) -> None:
        tokenizer = tokenizer_of(line.text for line in texts["train_text"].lines())
        for option, text in texts.items():
            _write(folder, option, tokenizer, text.lines())

    stamps = [text.stamp for text in texts.values()]
    folder, _, vocabulary = encode_once("text", options, specials, stamps, write)
    train, test = (
        _sequences(folder, option, text, length, stride, options[examples], examples)
        for (option, text), examples in zip(texts.items(), ("train_examples", "test_examples"), strict=True)
    )
    return Corpus(train, test, vocabulary)


def _write(folder: Path, option: str, tokenizer: Tokenizer, lines: Iterable[Line]) -> None:
    """Ids, and where lines and documents begin; a line without a token begins nothing."""
    place, begins = 0, False
    lines, texts = tee(lines)
    with (
        (folder / option).open("wb") as tokens,
        (folder / f"{option}.lines").open("wb") as line_starts,
        (folder / f"{option}.documents").open("wb") as document_starts,
    ):
        for line, ids in zip(lines, encode(tokenizer, (line.text for line in texts)), strict=True):
            begins |= line.begins_document
            if ids:
                start = np.int64(place).tobytes()
                tokens.write(np.array(ids, np.uint32).tobytes())
                line_starts.write(start)
                document_starts.write(start if begins else b"")
                begins, place = False, place + len(ids)


def _sequences(
    folder: Path, option: str, text: Text, length: int, stride: int, wanted: int, examples: str
) -> Sequences:
    path = folder / option
    tokens = np.memmap(path, np.uint32, "r") if path.stat().st_size else np.empty(0, np.uint32)
    count = (len(tokens) - length) // stride + 1
    if count < 1:
        raise DataError(
            f"{text.name} has {len(tokens)} tokens, fewer than the {length} of one sequence; use a longer "
            f"text, or a smaller workload.options.sequence_length"
        )
    check_enough(text.name, "sequences", count, examples, wanted)
    lines, documents = (
        np.memmap(folder / f"{option}.{kind}", np.int64, "r") for kind in ("lines", "documents")
    )
    return Sequences(text.name, tokens, length, stride, wanted or count, lines, documents)


def _synthetic(options: Mapping[str, Any], specials: tuple[str, ...], length: int, stride: int) -> Corpus:
    """Random ids: nothing to learn, the same work."""
    generator = np.random.default_rng(0)
    ordinary = np.arange(len(specials), options["vocabulary"])
    counts = options["train_examples"] or SYNTHETIC_TRAIN, options["test_examples"] or SYNTHETIC_TEST
    train, test = (_random_text(generator, ordinary, length, stride, count) for count in counts)
    return Corpus(train, test, Vocabulary({name: index for index, name in enumerate(specials)}, ordinary))


def _random_text(
    generator: np.random.Generator, ordinary: Ids, length: int, stride: int, count: int
) -> Sequences:
    tokens = generator.choice(ordinary, (count - 1) * stride + length)
    every = max(1, length // 4), 2 * length  # tokens of a line and of a document
    lines, documents = (np.arange(0, len(tokens), step) for step in every)
    return Sequences("synthetic text", tokens, length, stride, count, lines, documents)
