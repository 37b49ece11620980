"""Pairs of sentences as token ids, kept in the cache (no torch).

Both languages share one vocabulary: of a given tokenizer, or of a byte-level BPE trained on both sides of the
training text. Training pairs with more than `longest` tokens on a side are dropped, as is usual in
translation: a truncated pair would teach half a translation. No held-out pair is dropped or truncated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import DataError
from harness.workloads.cards.card import SYNTHETIC
from harness.workloads.cards.language import SYNTHETIC_TEST, SYNTHETIC_TRAIN
from harness.workloads.cards.translation import SPECIALS
from harness.workloads.sources.cache import file_stamp
from harness.workloads.sources.tokenizer import Ids, Tokenizer, Vocabulary, encode_each, encode_once
from harness.workloads.translation.sentence_files import Files, find_files, read_split

SYNTHETIC_TOKENS = (5, 22)  # of a synthetic sentence; a caption has twelve words

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sentences:
    """Sentences as token ids, without begin and end tokens.

    Attributes:
        tokens: all ids, one sentence after another.
        starts: offset of each sentence, and the end of the last one, `[N + 1]`.
    """

    tokens: Array
    starts: Ids

    @property
    def lengths(self) -> Ids:
        """Tokens of each, `[N]`."""
        return np.diff(self.starts)

    def padded(self, indices: Ids, width: int, padding: int) -> Ids:
        """The sentences of these indices, `[len(indices), width]`, followed by padding."""
        columns = np.arange(width)
        inside = columns < self.lengths[indices][:, None]
        rows = np.full(inside.shape, padding, dtype=np.int64)
        rows[inside] = self.tokens[(self.starts[indices][:, None] + columns)[inside]]
        return rows


@dataclass(frozen=True)
class Pairs:
    """Sentence n of the target is the translation of sentence n of the source.

    Attributes:
        indices: of the pairs that are used, ascending.
    """

    source: Sentences
    target: Sentences
    indices: Ids


@dataclass(frozen=True)
class ParallelText:
    """Training and held-out pairs, their ids, and text for BLEU.

    Attributes:
        decode: the text of a sentence's ids.
        references: the held-out translations, by index.
    """

    train: Pairs
    test: Pairs
    vocabulary: Vocabulary
    decode: Callable[[Sequence[int]], str]
    references: Callable[[], list[str]]


def read_pairs(options: Mapping[str, Any]) -> ParallelText:
    """The pairs that the options ask for.

    Raises:
        DataError: a file or tokenizer is missing, damaged or does not fit, or the cache cannot be written.
        ModuleNotFoundError: the library `tokenizers` is not installed.
    """
    if options["data"] == SYNTHETIC:
        return _synthetic(options)
    train_files, test_files = find_files(options)

    def write(folder: Path, tokenizer_of: Callable[[Iterable[str]], Tokenizer]) -> None:
        splits = {"train": read_split(train_files), "test": read_split(test_files)}
        tokenizer = tokenizer_of(chain(*splits["train"]))
        for split, sides in splits.items():
            for side, lines in zip(Files._fields, sides, strict=True):
                ids = list(encode_each(tokenizer, lines))
                starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
                np.save(folder / f"{split}.{side}.starts.npy", starts)
                np.save(
                    folder / f"{split}.{side}.tokens.npy", np.fromiter(chain(*ids), np.uint32, starts[-1])
                )

    stamps = [file_stamp(path) for path in (*train_files, *test_files)]
    folder, tokenizer, vocabulary = encode_once("pairs", options, SPECIALS, stamps, write)
    return ParallelText(
        _limited(_load(folder, "train"), options, "train_examples", train_files, options["longest"]),
        _limited(_load(folder, "test"), options, "test_examples", test_files, None),
        vocabulary,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        references=lambda: read_split(test_files)[1],
    )


def _load(folder: Path, split: str) -> tuple[Sentences, Sentences]:
    source, target = (
        Sentences(
            np.load(folder / f"{split}.{side}.tokens.npy", mmap_mode="r"),
            np.load(folder / f"{split}.{side}.starts.npy"),
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
    indices = np.flatnonzero(lengths <= longest) if longest is not None else np.arange(len(lengths))
    wanted = options[option] or len(indices)
    if not len(indices):
        raise DataError(
            f"{files.source}: no pair has at most {longest} tokens a side; use a larger "
            f"workload.options.longest"
        )
    if len(indices) < wanted:
        short = "" if longest is None else f" of at most {longest} tokens a side"
        raise DataError(
            f"{files.source} has {len(indices)} pairs{short}, but workload.options.{option}={wanted}; use 0 "
            f"for all, or 1 to {len(indices)}"
        )
    return Pairs(*sides, indices[:wanted])


def _synthetic(options: Mapping[str, Any]) -> ParallelText:
    """Random sentences; the target is the source reversed, which can be learned."""
    generator = np.random.default_rng(0)
    shortest, longest = (min(tokens, options["longest"]) for tokens in SYNTHETIC_TOKENS)
    ordinary = np.arange(len(SPECIALS), options["vocabulary"])

    def pairs(count: int) -> Pairs:
        lengths = generator.integers(shortest, longest, count, endpoint=True)
        starts = np.cumsum([0, *lengths], dtype=np.int64)
        # A tenth of the vocabulary is nearly half of the text (0.1^(1/3) = 0.46), as in a language.
        source = ordinary[(len(ordinary) * generator.random(starts[-1]) ** 3).astype(np.int64)]
        target = source[np.repeat(starts[:-1] + starts[1:] - 1, lengths) - np.arange(starts[-1])]
        return Pairs(Sentences(source, starts), Sentences(target, starts), np.arange(count))

    train = pairs(options["train_examples"] or SYNTHETIC_TRAIN)
    test = pairs(options["test_examples"] or SYNTHETIC_TEST)

    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def references() -> list[str]:
        sentences = np.split(test.target.tokens, test.target.starts[1:-1])
        return [decode(sentence.tolist()) for sentence in sentences]

    vocabulary = Vocabulary({name: index for index, name in enumerate(SPECIALS)}, ordinary)
    return ParallelText(train, test, vocabulary, decode, references)
