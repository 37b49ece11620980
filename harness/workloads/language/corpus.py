"""Texts of a language workload as sequences of token ids, kept in the cache (no torch).

One rank trains the tokenizer and encodes the texts, a few thousand lines at a time; the others wait, and
later runs read the result. Lines are encoded one by one. Files of ids are memory-mapped, and so are the
places at which lines begin, so that no process holds a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import DataError
from harness.workloads.cards.card import SYNTHETIC
from harness.workloads.cards.language import SYNTHETIC_TEST, SYNTHETIC_TRAIN
from harness.workloads.language.text_files import Line, Text, find_text
from harness.workloads.sources.tokenizer import Ids, Tokenizer, Vocabulary, encode_blocks, encode_once

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
    with (
        (folder / option).open("wb") as tokens,
        (folder / f"{option}.lines").open("wb") as line_starts,
        (folder / f"{option}.documents").open("wb") as document_starts,
    ):
        for block, encoded in encode_blocks(tokenizer, lines):
            starts, first = [], []
            for line, ids in zip(block, encoded, strict=True):
                begins |= line.begins_document
                if ids:
                    starts.append(place)
                    first += [place] if begins else []
                    begins, place = False, place + len(ids)
            np.fromiter((index for ids in encoded for index in ids), np.uint32).tofile(tokens)
            np.array(starts, np.int64).tofile(line_starts)
            np.array(first, np.int64).tofile(document_starts)


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
    if count < wanted:
        raise DataError(
            f"{text.name} has {count} sequences, but workload.options.{examples}={wanted}; use 0 for all, or "
            f"1 to {count}"
        )
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
