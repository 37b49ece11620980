"""The texts of a language workload as sequences of token ids: read once, kept in a cache (no torch).

What training a tokenizer and encoding take is paid by the first rank that asks; the others wait for it and
find the result, on this and on later starts. Ids lie in files that are mapped into memory, not read.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import DataError
from harness.workloads.cards.language import SYNTHETIC_TEST, SYNTHETIC_TRAIN
from harness.workloads.cards.vision import EMBEDDED, SYNTHETIC
from harness.workloads.language.tokens import (
    Ids,
    Vocabulary,
    encode,
    library,
    read_tokenizer,
    train_tokenizer,
    vocabulary_of,
)
from harness.workloads.sources.cache import cached, file_stamp
from harness.workloads.sources.folders import data_folder, how_to_point

_FORMAT = "1"  # raise it when what lies in the cache changes


@dataclass(frozen=True)
class Sequences:
    """A row of tokens cut into sequences of `length`, each beginning `stride` after the one before.

    Attributes:
        tokens: all ids, in the text's order; what does not fill a sequence at the end is never shown.
        count: how many sequences there are.
    """

    tokens: np.ndarray[Any, Any]
    length: int
    stride: int
    count: int

    def rows(self, numbers: Ids) -> Ids:
        """The sequences of these numbers, `[len(numbers), length]`."""
        found: Ids = self.tokens[numbers[:, None] * self.stride + np.arange(self.length)].astype(np.int64)
        return found


@dataclass(frozen=True)
class Corpus:
    """What is learned, what is held out, and their ids."""

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
        return _made_up(options, specials, length, stride)
    texts = {option: _text(options, option) for option in ("train_text", "test_text")}
    given = data_folder(options["data"]) / options["tokenizer"] if options["tokenizer"] else None
    tokenizer = read_tokenizer(given) if given is not None else None
    stamps = [text.stamp for text in texts.values()]
    stamps.append(file_stamp(given) if given is not None else f"{options['vocabulary']} {specials}")

    def prepare(folder: Path) -> None:
        used = tokenizer or train_tokenizer(texts["train_text"].lines(), options["vocabulary"], specials)
        used.save(str(folder / "tokenizer.json"))
        for option, text in texts.items():
            with (folder / option).open("wb") as file:
                for ids in encode(used, text.lines()):
                    ids.astype(np.uint32).tofile(file)

    key = hashlib.sha256("\n".join([_FORMAT, library(), *stamps]).encode()).hexdigest()[:24]
    folder = cached(f"text-{key}", prepare, "token ids")
    where = str(given or folder / "tokenizer.json")
    vocabulary = vocabulary_of(
        tokenizer or read_tokenizer(folder / "tokenizer.json"), specials, where, options["vocabulary"]
    )
    train, test = (
        _cut(_mapped(folder / option), length, stride, options[examples], text.name, examples)
        for (option, text), examples in zip(texts.items(), ("train_examples", "test_examples"), strict=True)
    )
    return Corpus(train, test, vocabulary)


@dataclass(frozen=True)
class _Text:
    """A text by name; `stamp` is another one when its content is."""

    name: str
    stamp: str
    open: Callable[[], Any]

    def lines(self) -> Iterator[str]:
        found = False
        try:
            with self.open() as file:
                for line in file:
                    if stripped := line.strip():
                        found = True
                        yield stripped + "\n"
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name}: no UTF-8 text: {error.reason} at byte {error.start} of a part"
            ) from None
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read: {error.strerror or error}") from None
        if not found:
            raise DataError(f"{self.name}: has no text in it; put one line of text or more there")


def _text(options: Mapping[str, Any], option: str) -> _Text:
    if options["data"] == EMBEDDED:
        packed = files("harness.workloads").joinpath(
            "embedded", "wikitext-2", f"{option.removesuffix('_text')}.txt.xz"
        )
        path = Path(str(packed))
        return _Text(str(path), _content_stamp(path), lambda: lzma.open(path, "rt", encoding="utf-8"))
    path = data_folder(options["data"]) / options[option]
    if not path.is_file():
        raise DataError(
            f"{path} is not there; put a text file there, name it in workload.options.{option}, "
            f"{how_to_point(options['data'])}"
        )
    return _Text(str(path), file_stamp(path), lambda: path.open(encoding="utf-8"))


def _content_stamp(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _mapped(path: Path) -> np.ndarray[Any, Any]:
    return np.memmap(path, dtype=np.uint32, mode="r")


def _cut(
    tokens: np.ndarray[Any, Any], length: int, stride: int, wanted: int, name: str, option: str
) -> Sequences:
    there = (len(tokens) - length) // stride + 1
    if there < 1:
        raise DataError(
            f"{name}: {len(tokens)} tokens, fewer than the {length} of one sequence; use a longer text, or a "
            f"smaller workload.options.sequence_length"
        )
    if there < wanted:
        raise DataError(
            f"{name}: makes {there} sequences, but workload.options.{option}={wanted}; use 0 for all, or "
            f"1 to {there}"
        )
    return Sequences(tokens, length, stride, wanted or there)


def _made_up(options: Mapping[str, Any], specials: tuple[str, ...], length: int, stride: int) -> Corpus:
    """Random ids: nothing to learn, the same work."""
    draws = np.random.default_rng(0)
    ordinary = np.arange(len(specials), options["vocabulary"])
    counts = options["train_examples"] or SYNTHETIC_TRAIN, options["test_examples"] or SYNTHETIC_TEST
    train, test = (
        Sequences(draws.choice(ordinary, (count - 1) * stride + length), length, stride, count)
        for count in counts
    )
    return Corpus(train, test, Vocabulary({name: index for index, name in enumerate(specials)}, ordinary))
