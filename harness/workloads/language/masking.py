"""BERT's masking (Devlin et al. 2019, section 3.1) as a function of seed, epoch and example (no torch).

15 % of a sequence's tokens are to be predicted: 80 % of these are replaced by [MASK], 10 % by another token,
and 10 % are unchanged. Every sequence has the same number of them, as in the released code, so that the mean
over a batch's masked tokens is the mean over its sequences, in any world.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

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
