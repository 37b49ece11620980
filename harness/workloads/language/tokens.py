"""Lines of text as token ids, by a tokenizer that is given or trained (no torch).

Lines are encoded one by one, stripped, with one line end behind each; blank ones are left out. A trained
tokenizer is a byte-level BPE (Radford et al. 2019): it knows every text, and the same text makes the same one
on any machine. (The library's WordPiece trainer numbers letters in an order that differs from run to run.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LINES_AT_ONCE = 4096  # enough for the library's threads, little to hold

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Vocabulary:
    """What is known of the ids.

    Attributes:
        specials: ids of the tokens that the task needs, by name.
        ordinary: ids of all tokens that are no special ones, ascending.
    """

    specials: Mapping[str, int]
    ordinary: Ids


def train_tokenizer(lines: Iterable[str], size: int, specials: tuple[str, ...]) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens: `specials`, the 256 bytes, then merges by frequency."""
    library()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415  optional

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer=trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
        DataError: the file is missing, or no tokenizer.
    """
    library()
    from tokenizers import Tokenizer  # noqa: PLC0415  optional

    if not path.is_file():
        raise DataError(
            f"{path} is not there; name a tokenizer.json in workload.options.tokenizer, or leave it "
            f"out to have one trained on the training text"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        said = " ".join(str(error).split())
        raise DataError(
            f"{path}: no tokenizer.json that the library tokenizers reads ({said}); get another copy, or "
            f"leave workload.options.tokenizer out to have one trained"
        ) from None


def vocabulary_of(tokenizer: Tokenizer, specials: tuple[str, ...], where: str, size: int) -> Vocabulary:
    """The ids of a tokenizer.

    Args:
        tokenizer: given or trained.
        specials: tokens that the task needs.
        where: the tokenizer's file, for errors.
        size: rows of the model's embedding.

    Raises:
        DataError: a special token is missing, or an id has no row.
    """
    known = tokenizer.get_vocab(with_added_tokens=True)
    missing = [name for name in specials if name not in known]
    if missing:
        raise DataError(
            f"{where}: has no token {', '.join(missing)}; use a tokenizer with all of {', '.join(specials)}, "
            f"as the workload needs them"
        )
    largest = max(known.values())
    if largest >= size:
        raise DataError(
            f"{where}: ids up to {largest}, but workload.options.vocabulary={size}; "
            f"use a vocabulary of at least {largest + 1}"
        )
    added = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    named = {known[name] for name in specials}
    ordinary = sorted(set(known.values()) - added - named)
    if not ordinary:
        raise DataError(f"{where}: has special tokens alone; get another copy")
    return Vocabulary({name: known[name] for name in specials}, np.array(ordinary, dtype=np.int64))


def encode(tokenizer: Tokenizer, lines: Iterable[str]) -> Iterator[Ids]:
    """The ids of the lines, some thousand lines at a time, without special tokens around them."""
    for block in _encoded(tokenizer, lines):
        yield np.fromiter((index for line in block for index in line), dtype=np.int64)


def encode_each(tokenizer: Tokenizer, lines: Iterable[str]) -> Iterator[list[int]]:
    """The ids of one line after the other, without special tokens around them."""
    for block in _encoded(tokenizer, lines):
        yield from block


def _encoded(tokenizer: Tokenizer, lines: Iterable[str]) -> Iterator[list[list[int]]]:
    rest = iter(lines)
    while block := list(islice(rest, _LINES_AT_ONCE)):
        yield [line.ids for line in tokenizer.encode_batch_fast(block, add_special_tokens=False)]


def library() -> str:
    """Version of the library `tokenizers`.

    Raises:
        ModuleNotFoundError: it is not installed, and which extra has it.
    """
    try:
        import tokenizers  # noqa: PLC0415  an optional extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a text as training data needs the extra language: pip install 'kronscale[language]'"
        ) from None
    return str(tokenizers.__version__)
