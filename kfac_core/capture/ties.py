"""Joins the statistics of an embedding and of the output layer that shares its weight.

Each use k is a Kronecker product U_k x W_k of a factor over the words and one over the features. Their sum is
none; the product with the same partial traces is

    A = sum_k U_k tr(W_k) / t        G = sum_k W_k tr(U_k)        t = sum_k tr(U_k) tr(W_k)

It has the trace of the sum, does not depend on how a use's scale is split between its factors, and is a use's
own block where there is no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from kfac_core.capture.statistics import Share, Statistics
from kfac_core.kernels.grams import dense, trace
from kfac_core.kernels.packing import Packed


class JoinedStatistics(Statistics):
    """The final contribution of this rank to A and G, as of one loss term and row a rank."""

    def __init__(self, a: Tensor | None, g: Tensor | None) -> None:
        self.rows, self.pending_calls = int(a is not None), 0
        self._shares = (Share(a, 1.0), Share(g, 1.0)) if a is not None and g is not None else None

    @property
    def terms(self) -> float:
        """One, if there are any."""
        return float(self.rows)

    def shares(self) -> tuple[Share, Share] | None:
        """As they are."""
        return self._shares

    def share(self, kind: Literal["a", "g"]) -> Share | None:
        """One of them."""
        return None if self._shares is None else self._shares[kind == "g"]


def joined(
    ties: Sequence[tuple[Statistics, Statistics]], like: Tensor, all_reduce: Callable[[Tensor], object]
) -> list[JoinedStatistics]:
    """Of each embedding and its head, by the traces of all ranks: every rank calls it.

    `like` has the dtype and device of the sums.
    """
    uses = [(_factors(embedding, 0), _factors(head, 1)) for embedding, head in ties]
    numbers = like.new_zeros(len(ties), 8)  # two traces and the rows of either use; loss terms, ranks
    for row, tie, both in zip(numbers, ties, uses, strict=True):
        for place, (statistics, factors) in enumerate(zip(tie, both, strict=True)):
            if factors is not None:
                row[3 * place], row[3 * place + 1] = trace(factors[0]), trace(factors[1])
                row[3 * place + 2].fill_(statistics.rows)
        row[6].fill_(max(statistics.terms for statistics in tie))
        row[7].fill_(any(factors is not None for factors in both))
    all_reduce(numbers)
    return [_joined(row, both) for row, both in zip(numbers, uses, strict=True)]


def _factors(statistics: Statistics, words: int) -> tuple[Tensor, Tensor] | None:
    """The factors over the words and over the features; the words are a use's inputs (0) or outputs (1)."""
    shares = statistics.shares()
    if shares is None:
        return None
    both = []
    for share in shares:
        assert not isinstance(share.gram, Packed)  # noqa: S101  a tie's are not packed before they are joined
        both.append(dense(share.gram) * share.scale)
    return both[words], both[1 - words]


def _joined(numbers: Tensor, uses: Sequence[tuple[Tensor, Tensor] | None]) -> JoinedStatistics:
    """This rank's part of A and G from the numbers of all ranks."""
    traces = numbers[:6].view(2, 3)
    terms, ranks = numbers[6], numbers[7]
    words, features, rows = traces.unbind(1)
    weights = torch.where(rows * terms > 0, 1 / (rows * terms), 0)
    total = (weights * words * features).sum().clamp_min(torch.finfo(numbers.dtype).tiny)
    of_words, of_features = weights * features / total * ranks, weights * words * ranks
    a: Tensor | None = None
    g: Tensor | None = None
    for place, use in enumerate(uses):
        if use is not None:
            new_a, new_g = use[0] * of_words[place], use[1] * of_features[place]
            a, g = (new_a, new_g) if a is None or g is None else (a + new_a, g + new_g)
    return JoinedStatistics(a, g)
