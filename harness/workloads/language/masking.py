"""BERT's masks and pairs (Devlin et al. 2019, section 3.1 and A.2), from a key of each sequence (no torch).

Masks: 15 % of a sequence's tokens are to be predicted: 80 % of these are replaced by [MASK], 10 % by another
token, and 10 % are unchanged. Every sequence has the same number of them, as in the released code, so that
the mean over a batch's masked tokens is the mean over its sequences, in any world.

Pairs of the next-sentence task: a sequence is a window of the text. It is divided in two at a random line
start inside, and in half of the sequences the second part is replaced by as many tokens from a random place
of another document. As in the paper, a "sentence" is a span of text. Windows are full and may run into the
next document, so nothing is padded; the place of division is never a document's first line, so that what
follows there does continue. Where it lies does not depend on whether the second part is replaced: neither
lengths nor ends tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from harness.errors import DataError
from harness.workloads.language.corpus import Sequences

MASKED = 0.15
REPLACED_BY_MASK, REPLACED_BY_TOKEN = 0.8, 0.1

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Masked(NamedTuple):
    """A batch of masked sequences.

    Attributes:
        inputs: tokens for the model, `[B, C]`.
        positions: where it has to predict, ascending, `[B, k]`.
        targets: the original tokens there, `[B, k]`.
    """

    inputs: Ids
    positions: Ids
    targets: Ids


def masked_count(length: int) -> int:
    """How many of `length` tokens are to be predicted: at least one."""
    return max(1, round(MASKED * length))


def mask(tokens: Ids, keys: Iterable[tuple[int, ...]], mask_id: int, ordinary: Ids) -> Masked:
    """Mask tokens.

    Args:
        tokens: `[B, C]`; not changed.
        keys: seed of each sequence's random numbers.
        mask_id: id of [MASK].
        ordinary: ids of all tokens that are not special, from which replacements are drawn.
    """
    count = masked_count(tokens.shape[1])
    inputs = tokens.copy()
    positions = np.empty((len(tokens), count), dtype=np.int64)
    for row, key in enumerate(keys):
        generator = np.random.default_rng(key)
        positions[row] = np.sort(generator.permutation(tokens.shape[1])[:count])
        draws = generator.random(count)
        others = ordinary[generator.integers(0, len(ordinary), count)]
        masked = np.where(draws < REPLACED_BY_MASK, mask_id, inputs[row, positions[row]])
        inputs[row, positions[row]] = np.where(draws >= 1 - REPLACED_BY_TOKEN, others, masked)
    return Masked(inputs, positions, np.take_along_axis(tokens, positions, axis=1))


RANDOM_SECOND = 0.5
_KEY = 1  # after a sequence's key, so that the pair does not repeat its mask's random numbers


class Pairs(NamedTuple):
    """A batch of pairs.

    Attributes:
        tokens: both parts, `[B, C]`.
        lengths: tokens of the first part, `[B]`.
        is_random: 1 where the second part is from another document, 0 where it is the text's next, `[B]`.
    """

    tokens: Ids
    lengths: Ids
    is_random: Ids


def check_documents(text: Sequences) -> None:
    """Check that a second part from another document exists for every sequence.

    Raises:
        DataError: outside of the longest document there are too few tokens.
    """
    total = len(text.tokens)
    longest = int(np.diff(text.documents, append=total).max())
    if total - longest < text.length - 1:
        raise DataError(
            f"{text.name} has a document of {longest} of its {total} tokens, so that random next sentences "
            f"of up to {text.length - 1} cannot come from others; use more documents (see "
            "workload.options.documents), or next_sentence: false"
        )


def draw_pairs(text: Sequences, indices: Ids, keys: Iterable[tuple[int, ...]]) -> Pairs:
    """The pairs of these sequences.

    Args:
        text: that `check_documents` accepts.
        indices: of the sequences.
        keys: seed of each sequence's random numbers.
    """
    tokens = text.rows(indices)
    lengths, is_random = np.empty(len(tokens), np.int64), np.empty(len(tokens), np.int64)
    for row, (index, key) in enumerate(zip(indices.tolist(), keys, strict=True)):
        generator = np.random.default_rng((*key, _KEY))
        start = index * text.stride
        at_line, places = _divisions(text, start)
        continues = len(places) > 0
        if continues:
            place = int(places[generator.integers(len(places))])
        else:  # every token begins a document
            place = start + int(generator.integers(1, text.length))
        lengths[row] = first = place - start
        is_random[row] = not continues or generator.random() < RANDOM_SECOND
        if is_random[row]:
            second = _elsewhere(text, place, text.length - first, generator, at_line=at_line)
            tokens[row, first:] = text.tokens[second]
    return Pairs(tokens, lengths, is_random)


def _divisions(text: Sequences, start: int) -> tuple[bool, Ids]:
    """Where the window may be divided; and whether these are line starts: without one it may be any token."""
    end = start + text.length
    firsts = _between(text.documents, start + 1, end)
    lines = np.setdiff1d(_between(text.lines, start + 1, end), firsts, assume_unique=True)
    if len(lines):
        return True, lines
    return False, np.setdiff1d(np.arange(start + 1, end), firsts, assume_unique=True)


def _elsewhere(
    text: Sequences, place: int, count: int, generator: np.random.Generator, *, at_line: bool
) -> Ids:
    """`count` places outside of the document of the token before `place`, from a random line or token on.

    The text counts as a circle, so that each line outside has the same probability.
    """
    total = len(text.tokens)
    own = int(np.searchsorted(text.documents, place - 1, "right")) - 1
    begin = int(text.documents[own])
    end = int(text.documents[own + 1]) if own + 1 < len(text.documents) else total
    last = begin + total - count  # a part that begins here ends where the document begins
    if not at_line:
        first = end + int(generator.integers(last + 1 - end))
    else:
        to_the_end, wrapped = (end, min(total, last + 1)), (0, max(0, last + 1 - total))
        (low, high), (_, more) = (
            np.searchsorted(text.lines, span).tolist() for span in (to_the_end, wrapped)
        )
        drawn = int(generator.integers(high - low + more))
        first = int(text.lines[low + drawn if drawn < high - low else drawn - (high - low)])
    places: Ids = (first + np.arange(count)) % total
    return places


def _between(starts: Ids, low: int, high: int) -> Ids:
    """The starts in `[low, high)`."""
    begin, end = np.searchsorted(starts, (low, high))
    return np.asarray(starts[begin:end])
