"""Tokenizers, given or trained, and texts encoded by them (no torch).

A trained tokenizer is a byte-level BPE (Radford et al. 2019): it encodes any text, and the same text trains
the same tokenizer on any machine. (The library's WordPiece trainer numbers letters in an order that varies.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from harness.errors import DataError
from harness.workloads.sources.files import import_extra
from harness.workloads.sources.folders import cached, data_folder, file_stamp

_FORMAT = "2"  # of the folders with token ids; increase it with every change
_LINES_AT_ONCE = 4096  # enough for the library's threads, with little memory

Tokenizer = Any  # of the optional library tokenizers

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer.

    Attributes:
        specials: ids of the special tokens that the workload needs, by name.
        ordinary: ids of all tokens that are not special, ascending.
    """

    specials: Mapping[str, int]
    ordinary: Ids


class TokenIds(NamedTuple):
    """A folder of token ids, and the tokenizer that encoded them."""

    folder: Path
    tokenizer: Tokenizer
    vocabulary: Vocabulary


def encode_once(
    kind: str,
    options: Mapping[str, Any],
    specials: tuple[str, ...],
    stamps: Iterable[str],
    write: Callable[[Path, Callable[[Iterable[str]], Tokenizer]], None],
) -> TokenIds:
    """Token ids from the cache, written there if they are not in it.

    Args:
        kind: begins the folder's name.
        options: of the workload; `tokenizer` names a given tokenizer, and without it one is trained.
        specials: tokens that the workload needs.
        stamps: of the texts, which change with their content.
        write: writes the ids into a folder; its other argument makes the tokenizer from the training lines.

    Raises:
        DataError: the tokenizer is missing, damaged or does not fit, or the cache cannot be written.
    """
    given = data_folder(options["data"]) / options["tokenizer"] if options["tokenizer"] else None
    tokenizer = read_tokenizer(given) if given is not None else None
    made_from = file_stamp(given) if given is not None else f"{options['vocabulary']} {specials}"
    parts = [_FORMAT, tokenizers_library().__version__, *stamps, made_from]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]

    def prepare(folder: Path) -> None:
        def tokenizer_of(lines: Iterable[str]) -> Tokenizer:
            used = tokenizer or train_tokenizer(lines, options["vocabulary"], specials)
            used.save(str(folder / "tokenizer.json"))
            return used

        write(folder, tokenizer_of)

    folder = cached(f"{kind}-{key}", prepare, "token ids")
    used = tokenizer or read_tokenizer(folder / "tokenizer.json")
    where = str(given or folder / "tokenizer.json")
    return TokenIds(folder, used, vocabulary_of(used, specials, where, options["vocabulary"]))


def train_tokenizer(lines: Iterable[str], size: int, specials: tuple[str, ...]) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens: `specials`, the 256 bytes, then merges by frequency."""
    library = tokenizers_library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer=trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
        DataError: the file is missing, or not a tokenizer.
    """
    library = tokenizers_library()
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; name a tokenizer.json in workload.options.tokenizer, or omit the option "
            f"to train one on the training text"
        )
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path} is not a tokenizer.json that the library tokenizers reads ({reason}); get another copy, "
            f"or omit workload.options.tokenizer to train one"
        ) from None


def vocabulary_of(tokenizer: Tokenizer, specials: tuple[str, ...], where: str, size: int) -> Vocabulary:
    """The ids of a tokenizer.

    Args:
        tokenizer: given or trained.
        specials: tokens that the workload needs.
        where: the tokenizer's file, for error messages.
        size: rows of the model's embedding.

    Raises:
        DataError: a special token is missing, or an id is beyond the embedding.
    """
    known = tokenizer.get_vocab(with_added_tokens=True)
    missing = [name for name in specials if name not in known]
    if missing:
        raise DataError(
            f"{where} must have the tokens {', '.join(specials)}, but has no {', '.join(missing)}; use "
            f"another tokenizer"
        )
    largest = max(known.values())
    if largest >= size:
        raise DataError(
            f"{where} has ids up to {largest}, but workload.options.vocabulary={size}; "
            f"use a vocabulary of at least {largest + 1}"
        )
    added = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    named = {known[name] for name in specials}
    ordinary = sorted(set(known.values()) - added - named)
    if not ordinary:
        raise DataError(f"{where} has only special tokens; get another copy")
    return Vocabulary({name: known[name] for name in specials}, np.array(ordinary, dtype=np.int64))


def encode(tokenizer: Tokenizer, lines: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each line, without special tokens."""
    remaining = iter(lines)
    while block := list(islice(remaining, _LINES_AT_ONCE)):
        yield from (line.ids for line in tokenizer.encode_batch_fast(block, add_special_tokens=False))


def tokenizers_library() -> ModuleType:
    """The optional library `tokenizers`."""
    return import_extra("tokenizers", "a text as training data", "language")
