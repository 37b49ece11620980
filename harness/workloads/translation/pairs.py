"""Pairs of sentences as token ids: encoded once, kept in a cache (no torch).

One vocabulary serves both languages: a given tokenizer, or a byte-level BPE trained on both sides of the
training text. Training pairs with more than `longest` tokens on a side are left out, as is usual in
translation: cut ones would teach half a sentence for a whole one. Held-out pairs are all kept, and whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import DataError
from harness.workloads.cards.language import SYNTHETIC_TEST, SYNTHETIC_TRAIN
from harness.workloads.cards.translation import SPECIALS
from harness.workloads.cards.vision import SYNTHETIC
from harness.workloads.language.tokens import (
    Ids,
    Vocabulary,
    encode_each,
    library,
    read_tokenizer,
    train_tokenizer,
    vocabulary_of,
)
from harness.workloads.sources.cache import cached, file_stamp
from harness.workloads.sources.folders import data_folder
from harness.workloads.translation.multi30k_files import Files, find_files, read_part

MADE_UP_TOKENS = (5, 22)  # of a made-up sentence; a caption has twelve words
_FORMAT = "1"  # raise it when what lies in the cache changes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sentences:
    """Sentences of token ids, without marks around them.

    Attributes:
        tokens: all ids, one sentence after another.
        starts: where each begins, and where the last one ends, `[N + 1]`.
    """

    tokens: Array
    starts: Ids

    @property
    def lengths(self) -> Ids:
        """Tokens of each, `[N]`."""
        return np.diff(self.starts)

    def padded(self, numbers: Ids, width: int, padding: int) -> Ids:
        """The sentences of these numbers, `[len(numbers), width]`, with padding behind."""
        places = np.arange(width)
        inside = places < self.lengths[numbers][:, None]
        found = np.full(inside.shape, padding, dtype=np.int64)
        found[inside] = self.tokens[(self.starts[numbers][:, None] + places)[inside]]
        return found


@dataclass(frozen=True)
class Pairs:
    """Sentence n of the target is the translation of sentence n of the source.

    Attributes:
        numbers: of the pairs that count, ascending.
    """

    source: Sentences
    target: Sentences
    numbers: Ids


@dataclass(frozen=True)
class ParallelText:
    """What is learned, what is held out, their ids, and the way back to text.

    Attributes:
        written: the text of a sentence's ids.
        references: the held-out translations, by number.
    """

    train: Pairs
    test: Pairs
    vocabulary: Vocabulary
    written: Callable[[Sequence[int]], str]
    references: Callable[[], list[str]]


def read_pairs(options: Mapping[str, Any]) -> ParallelText:
    """The pairs that the options ask for.

    Raises:
        DataError: a file or tokenizer is missing, damaged or does not fit, or the cache cannot be written.
        ModuleNotFoundError: the library `tokenizers` is not installed.
    """
    if options["data"] == SYNTHETIC:
        return _made_up(options)
    train_files, test_files = find_files(options)
    given = data_folder(options["data"]) / options["tokenizer"] if options["tokenizer"] else None
    tokenizer = read_tokenizer(given) if given is not None else None
    stamps = [file_stamp(path) for path in (*train_files, *test_files)]
    stamps.append(file_stamp(given) if given is not None else f"{options['vocabulary']} {SPECIALS}")

    def prepare(folder: Path) -> None:
        parts = {"train": read_part(train_files), "test": read_part(test_files)}
        used = tokenizer or train_tokenizer(chain(*parts["train"]), options["vocabulary"], SPECIALS)
        used.save(str(folder / "tokenizer.json"))
        for part, sides in parts.items():
            for side, lines in zip(Files._fields, sides, strict=True):
                ids = list(encode_each(used, lines))
                starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
                np.save(folder / f"{part}.{side}.starts.npy", starts)
                np.save(folder / f"{part}.{side}.tokens.npy", np.fromiter(chain(*ids), np.uint32, starts[-1]))

    key = hashlib.sha256("\n".join([_FORMAT, library(), *stamps]).encode()).hexdigest()[:24]
    folder = cached(f"pairs-{key}", prepare, "token ids")
    used = tokenizer or read_tokenizer(folder / "tokenizer.json")
    where = str(given or folder / "tokenizer.json")
    vocabulary = vocabulary_of(used, SPECIALS, where, options["vocabulary"])
    return ParallelText(
        _limited(_kept(folder, "train"), options, "train_examples", train_files, options["longest"]),
        _limited(_kept(folder, "test"), options, "test_examples", test_files, None),
        vocabulary,
        written=lambda ids: str(used.decode(list(ids))),
        references=lambda: read_part(test_files)[1],
    )


def _kept(folder: Path, part: str) -> tuple[Sentences, Sentences]:
    source, target = (
        Sentences(
            np.load(folder / f"{part}.{side}.tokens.npy", mmap_mode="r"),
            np.load(folder / f"{part}.{side}.starts.npy"),
        )
        for side in Files._fields
    )
    return source, target


def _limited(
    sides: tuple[Sentences, Sentences],
    options: Mapping[str, Any],
    option: str,
    files: Files,
    longest: int | None,
) -> Pairs:
    """The first pairs of at most `longest` tokens a side, as many as `option` asks for."""
    lengths = np.maximum(sides[0].lengths, sides[1].lengths)
    numbers = np.flatnonzero(lengths <= longest) if longest is not None else np.arange(len(lengths))
    wanted = options[option] or len(numbers)
    if not len(numbers):
        raise DataError(
            f"{files.source}: no pair has at most {longest} tokens a side; use a larger "
            f"workload.options.longest"
        )
    if len(numbers) < wanted:
        short = "" if longest is None else f" of at most {longest} tokens a side"
        raise DataError(
            f"{files.source}: {len(numbers)} pairs{short}, but workload.options.{option}={wanted}; use 0 for "
            f"all, or 1 to {len(numbers)}"
        )
    return Pairs(*sides, numbers[:wanted])


def _made_up(options: Mapping[str, Any]) -> ParallelText:
    """No language: the target is the source reversed, which is to be learned as a translation is."""
    draws = np.random.default_rng(0)
    shortest, longest = (min(tokens, options["longest"]) for tokens in MADE_UP_TOKENS)
    ordinary = np.arange(len(SPECIALS), options["vocabulary"])

    def pairs(count: int) -> Pairs:
        lengths = draws.integers(shortest, longest, count, endpoint=True)
        starts = np.cumsum([0, *lengths], dtype=np.int64)
        # a tenth of the tokens makes nearly half of the text (0.1^(1/3) = 0.46), as in a language
        source = ordinary[(len(ordinary) * draws.random(starts[-1]) ** 3).astype(np.int64)]
        place = np.arange(starts[-1])
        target = source[np.repeat(starts[:-1] + starts[1:] - 1, lengths) - place]
        return Pairs(Sentences(source, starts), Sentences(target, starts), np.arange(count))

    train = pairs(options["train_examples"] or SYNTHETIC_TRAIN)
    test = pairs(options["test_examples"] or SYNTHETIC_TEST)

    def written(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def references() -> list[str]:
        sentences = np.split(test.target.tokens, test.target.starts[1:-1])
        return [written(sentence.tolist()) for sentence in sentences]

    vocabulary = Vocabulary({name: index for index, name in enumerate(SPECIALS)}, ordinary)
    return ParallelText(train, test, vocabulary, written, references)
