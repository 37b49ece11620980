"""Texts of a language workload as sequences of token ids, kept in the cache (no torch).

One rank trains the tokenizer and encodes the texts; the others wait, and later runs read the result. Lines
are encoded one by one, stripped, each with a line end; blank lines are dropped. Files of ids are memory-
mapped.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import DataError
from harness.workloads.cards.card import EMBEDDED, SYNTHETIC
from harness.workloads.cards.language import SYNTHETIC_TEST, SYNTHETIC_TRAIN
from harness.workloads.sources.cache import file_stamp
from harness.workloads.sources.data_folder import EMBEDDED_FOLDER, data_folder, how_to_point
from harness.workloads.sources.tokenizer import Ids, Tokenizer, Vocabulary, encode, encode_once


@dataclass(frozen=True)
class Sequences:
    """A text cut into `count` sequences of `length` tokens, each beginning `stride` after the one before.

    Attributes:
        tokens: all ids in the text's order; those after the last complete sequence are not used.
    """

    tokens: np.ndarray[Any, Any]
    length: int
    stride: int
    count: int

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
    texts = {option: _text(options, option) for option in ("train_text", "test_text")}

    def write(folder: Path, tokenizer_of: Callable[[Iterable[str]], Tokenizer]) -> None:
        tokenizer = tokenizer_of(texts["train_text"].lines())
        for option, text in texts.items():
            with (folder / option).open("wb") as file:
                for ids in encode(tokenizer, text.lines()):
                    ids.astype(np.uint32).tofile(file)

    stamps = [text.stamp for text in texts.values()]
    folder, _, vocabulary = encode_once("text", options, specials, stamps, write)
    train, test = (
        _sequences(
            np.memmap(folder / option, np.uint32, "r"), length, stride, options[examples], text.name, examples
        )
        for (option, text), examples in zip(texts.items(), ("train_examples", "test_examples"), strict=True)
    )
    return Corpus(train, test, vocabulary)


@dataclass(frozen=True)
class _Text:
    """A text file; `stamp` changes with its content."""

    name: str
    stamp: str
    open: Callable[[], Any]

    def lines(self) -> Iterator[str]:
        empty = True
        try:
            with self.open() as file:
                for line in file:
                    if stripped := line.strip():
                        empty = False
                        yield stripped + "\n"
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name} must be UTF-8 text: {error.reason} at byte {error.start} of a block"
            ) from None
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror or error}") from None
        if empty:
            raise DataError(f"{self.name} must have at least one line of text")


def _text(options: Mapping[str, Any], option: str) -> _Text:
    if options["data"] == EMBEDDED:
        path = EMBEDDED_FOLDER / "wikitext-2" / f"{option.removesuffix('_text')}.txt.xz"
        stamp = hashlib.sha256(path.read_bytes()).hexdigest()
        return _Text(str(path), stamp, lambda: lzma.open(path, "rt", encoding="utf-8"))
    path = data_folder(options["data"]) / options[option]
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; put a text file there, name it in workload.options.{option}, "
            f"{how_to_point(options['data'])}"
        )
    return _Text(str(path), file_stamp(path), lambda: path.open(encoding="utf-8"))


def _sequences(
    tokens: np.ndarray[Any, Any], length: int, stride: int, wanted: int, name: str, option: str
) -> Sequences:
    count = (len(tokens) - length) // stride + 1
    if count < 1:
        raise DataError(
            f"{name} has {len(tokens)} tokens, fewer than the {length} of one sequence; use a longer text, "
            f"or a smaller workload.options.sequence_length"
        )
    if count < wanted:
        raise DataError(
            f"{name} has {count} sequences, but workload.options.{option}={wanted}; use 0 for all, or "
            f"1 to {count}"
        )
    return Sequences(tokens, length, stride, wanted or count)


def _synthetic(options: Mapping[str, Any], specials: tuple[str, ...], length: int, stride: int) -> Corpus:
    """Random ids: nothing to learn, the same work."""
    generator = np.random.default_rng(0)
    ordinary = np.arange(len(specials), options["vocabulary"])
    counts = options["train_examples"] or SYNTHETIC_TRAIN, options["test_examples"] or SYNTHETIC_TEST
    train, test = (
        Sequences(generator.choice(ordinary, (count - 1) * stride + length), length, stride, count)
        for count in counts
    )
    return Corpus(train, test, Vocabulary({name: index for index, name in enumerate(specials)}, ordinary))
