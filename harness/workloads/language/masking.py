"""BERT's masking (Devlin et al. 2019, section 3.1), a matter of seed, epoch and example (no torch).

15 % of a sequence's tokens are to be predicted: 80 % of these are shown as [MASK], 10 % as another token, and
10 % as they are. Every sequence has as many of them, as in the released code, so that the mean over a batch's
masked tokens is the mean over its sequences, however ranks share them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

MASKED = 0.15
SHOWN_AS_MASK, SHOWN_AS_ANOTHER = 0.8, 0.1

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Masked(NamedTuple):
    """A batch of sequences with holes.

    Attributes:
        shown: what the model sees, `[B, C]`.
        places: where it has to predict, ascending, `[B, k]`.
        wanted: what stood there, `[B, k]`.
    """

    shown: Ids
    places: Ids
    wanted: Ids


def masked_count(length: int) -> int:
    """How many of `length` tokens are to be predicted, at least one."""
    return max(1, round(MASKED * length))


def mask(tokens: Ids, keys: Iterable[tuple[int, ...]], mask_id: int, ordinary: Ids) -> Masked:
    """Hide tokens.

    Args:
        tokens: `[B, C]`, left as they are.
        keys: what each sequence's draws depend on; equal keys, equal draws.
        mask_id: id of [MASK].
        ordinary: ids of all tokens that are no special ones; what is shown instead comes from here.
    """
    count = masked_count(tokens.shape[1])
    shown = tokens.copy()
    places = np.empty((len(tokens), count), dtype=np.int64)
    for row, key in enumerate(keys):
        draws = np.random.default_rng(key)
        places[row] = np.sort(draws.permutation(tokens.shape[1])[:count])
        fate = draws.random(count)
        others = ordinary[draws.integers(0, len(ordinary), count)]
        hidden = np.where(fate < SHOWN_AS_MASK, mask_id, shown[row, places[row]])
        shown[row, places[row]] = np.where(fate >= 1 - SHOWN_AS_ANOTHER, others, hidden)
    return Masked(shown, places, np.take_along_axis(tokens, places, axis=1))
