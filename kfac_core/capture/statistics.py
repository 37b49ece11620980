"""Sums of outer products that the hooks collect between two factor updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kfac_core.kernels.grams import Gram, dense
from kfac_core.kernels.packing import Packed, packed


@dataclass(frozen=True)
class Call:
    """Sums over a layer's calls in one backward pass; several calls of one module count as positions."""

    task: int
    a_gram: Gram | Packed
    g_gram: Gram | Packed
    examples: int
    positions: float
    batch: int

    def merge(self, call: Call) -> Call:
        """Both calls of one pass; an example in only one of them has fewer positions."""
        examples = max(self.examples, call.examples)
        seen = self.positions * self.examples + call.positions * call.examples
        return Call(
            self.task,
            _sum(Share(self.a_gram, 1.0), Share(call.a_gram, 1.0)).gram,
            _sum(Share(self.g_gram, 1.0), Share(call.g_gram, 1.0)).gram,
            examples,
            seen / examples,
            max(self.batch, call.batch),
        )


class Share(NamedTuple):
    """`scale * gram`: a rank's contribution to a factor, before division by the examples of all ranks."""

    gram: Gram | Packed
    scale: float


class Statistics:
    """One layer's sums over the backward passes since the last `Capture.clear`.

    Attributes:
        examples: examples in the sums on this rank; fewer than the batch where only part of it counts.
        pending_calls: calls whose gradient has not arrived.
    """

    def __init__(self, loss_reduction: str) -> None:
        self.examples = self.pending_calls = self._batch = 0
        self._reduction = loss_reduction
        self._a_share: Share | None = None  # sum over passes of (sum of a aT) / S^2
        self._g_share: Share | None = None  # sum over passes of S (sum of g gT)
        self._open: Call | None = None

    def add(self, call: Call) -> None:
        """Add one call; its grams are not modified, as a retained graph may use them again."""
        if self._open is not None and self._open.task == call.task:
            self._open = self._open.merge(call)
        else:
            self._close()
            self._open = call

    def shares(self) -> tuple[Share, Share] | None:
        """This rank's contributions to (A, G); None without statistics.

        With a mean loss, an example's own gradient is B times what it contributes to the mean's, so that G
        is scaled by B^2.
        """
        self._close()
        if self._a_share is None or self._g_share is None:
            return None
        scale = float(self._batch) ** 2 if self._reduction == "mean" else 1.0
        return self._a_share, Share(self._g_share.gram, self._g_share.scale * scale)

    def share(self, kind: Literal["a", "g"]) -> Share | None:
        """This rank's contribution to A or G; None without statistics."""
        shares = self.shares()
        return shares[kind == "g"] if shares is not None else None

    def _close(self) -> None:
        """Scale the current pass by its positions, which are known only when it is over."""
        if self._open is None:
            return
        call, self._open = self._open, None
        self._a_share = _sum(self._a_share, Share(call.a_gram, 1.0 / call.positions**2))
        self._g_share = _sum(self._g_share, Share(call.g_gram, call.positions))
        self.examples += call.examples
        self._batch += call.batch


def _sum(before: Share | None, new: Share) -> Share:
    """The sum of both; packed if one of them is."""
    if before is None:
        return new
    if isinstance(before.gram, Packed) or isinstance(new.gram, Packed):
        old, more = packed(before.gram).triangle, packed(new.gram).triangle
        return Share(Packed(_added(old, before.scale, more, new.scale)), 1.0)
    return Share(_added(dense(before.gram), before.scale, dense(new.gram), new.scale), 1.0)


def _added(first: Tensor, first_scale: float, second: Tensor, second_scale: float) -> Tensor:
    return torch.add(first if first_scale == 1.0 else first * first_scale, second, alpha=second_scale)
