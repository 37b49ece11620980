"""Sums of outer products that the hooks collect between two factor updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kfac_core.capture.forward_pass import ForwardPass
from kfac_core.capture.loss_terms import LossTerms
from kfac_core.kernels.grams import Gram, dense
from kfac_core.kernels.packing import Packed, packed


@dataclass(frozen=True)
class Call:
    """Sums over one call of a layer in a backward pass; several calls of one module count as positions.

    Attributes:
        task: of the backward pass.
        forward: the forward pass that the call belongs to.
        rows: in both sums.
        examples: that the layer itself counts in them.
        batch: that the layer counts in all; more where only part of the batch counts.
    """

    task: int
    forward: ForwardPass
    a_gram: Gram | Packed
    g_gram: Gram | Packed
    rows: int
    examples: int
    batch: int


class Share(NamedTuple):
    """`scale * gram`: a rank's contribution to a factor, before `factor_scale` of all ranks."""

    gram: Gram | Packed
    scale: float


class Statistics:
    """One layer's sums over the backward passes since the last `Capture.clear`.

    Args:
        layer: its position, by which loss terms may be stated.

    Attributes:
        rows: rows in the sums on this rank.
        pending_calls: calls whose gradient has not arrived.
    """

    def __init__(self, loss_reduction: str, loss_terms: LossTerms, layer: int) -> None:
        self.rows = self.pending_calls = 0
        self._layer = layer
        self._reduction, self._loss_terms = loss_reduction, loss_terms
        self._a_gram: Gram | Packed | None = None
        self._g_gram: Gram | Packed | None = None
        self._own: dict[int, tuple[int, int]] = {}  # by pass, where only the layer itself counts

    def add(self, call: Call) -> None:
        """Add one call; its grams are not modified, as a retained graph may use them again.

        A pass without examples adds nothing, also of a layer that does not see the batch, as one of
        positions.
        """
        if call.forward.is_empty:
            return
        if not self._loss_terms.count(call.task, call.forward):
            examples, batch = self._own.get(call.task, (0, 0))
            self._own[call.task] = max(examples, call.examples), max(batch, call.batch)
        self._a_gram, self._g_gram = _sum(self._a_gram, call.a_gram), _sum(self._g_gram, call.g_gram)
        self.rows += call.rows

    @property
    def terms(self) -> float:
        """This rank's loss terms whose gradients would be in the sums, also if the layer saw none of them."""
        return self._loss_terms.totals(self._layer)[0] + sum(examples for examples, _ in self._own.values())

    def shares(self) -> tuple[Share, Share] | None:
        """This rank's contributions to (A, G); None without statistics.

        With a mean loss, a loss term's own gradient is N times what it contributes to the mean's, so that G
        is scaled by N^2.
        """
        if self._a_gram is None or self._g_gram is None:
            return None
        own = self._loss_terms.of_all_passes(sum(batch for _, batch in self._own.values()))
        terms = self._loss_terms.totals(self._layer)[1] + own
        return Share(self._a_gram, 1.0), Share(
            self._g_gram, float(terms) ** 2 if self._reduction == "mean" else 1.0
        )

    def share(self, kind: Literal["a", "g"]) -> Share | None:
        """This rank's contribution to A or G; None without statistics."""
        shares = self.shares()
        return shares[kind == "g"] if shares is not None else None


def factor_scale(kind: Literal["a", "g"], terms: float, rows: float) -> float:
    """What the sums of all ranks are multiplied by, from all their loss terms N and rows M.

    A is multiplied by 1 / (N S max(S, 1)) and G by max(S, 1) / N, with S = M / N positions a term. The
    product, 1 / (N M), is the definition. For S >= 1 the two are those of SC20; below, as of an expert that
    sees a part of the tokens, A is the mean over the rows that there are, whose number varies.
    """
    more = max(rows / terms, 1.0)
    return 1.0 / (rows * more) if kind == "a" else more / terms


def factor_scales(kind: str, terms: Tensor, rows: Tensor) -> Tensor:
    """`factor_scale` of many factors on the device; 0 where there are no rows, or no loss terms."""
    more = (rows / terms).clamp_min_(1)
    scale = (rows * more).reciprocal_() if kind == "a" else more.div_(terms)
    return torch.where(rows.minimum(terms) > 0, scale, 0)


def _sum(before: Gram | Packed | None, new: Gram | Packed) -> Gram | Packed:
    """The sum of both; packed if one of them is."""
    if before is None:
        return new
    if isinstance(before, Packed) or isinstance(new, Packed):
        return Packed(torch.add(packed(before).triangle, packed(new).triangle))
    return torch.add(dense(before), dense(new))
