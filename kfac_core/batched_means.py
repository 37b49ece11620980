"""Running means of the factors for a device on which a launch is dear: all factors of a shape together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_core.capture.statistics import factor_scales
from kfac_core.config import KFACConfig
from kfac_core.kernels.grams import Gram, dense
from kfac_core.kernels.packing import unpack
from kfac_core.placement import FactorJob, FactorShape

Key = tuple[int, str]
"""A factor: position of its layer, and `a` or `g`."""

_ELEMENTS = 1 << 23  # averaged at a time, 32 MiB of float32, or one factor if that is larger


class NewMean(NamedTuple):
    """What updates a factor: `scale * gram`, with the others' sum, over all loss terms and rows.

    Attributes:
        gram: this rank's sum of outer products, or None.
        others: other ranks' sum, one triangle, followed by their loss terms and rows; None if the factor is
            this rank's alone, `scale` then is final.
        counts: loss terms and rows of this rank, where there are others.
    """

    job: FactorJob
    gram: Gram | None
    scale: float
    others: Tensor | None = None
    counts: tuple[float, int] = (0, 0)


class BatchedMeans:
    """Running means in one tensor a shape, updated without waiting for the device.

    Attributes:
        running: running mean by factor, `[blocks, n, n]`: views, identity before the first update.
        updates: updates by factor, a view on the device.
        refused: updates that were not finite, by factor, a view on the device.
        counts: updates and refused updates of all factors, `[2, factors]`, in the order of `updates`.
        decay: weight of the old mean in the next update.
        overflowed: not zero where the step's statistics are worthless, and to be dropped without a report.
        stacks: all factors of a shape, `[factors, blocks, n, n]`.
        keys: the factors of a shape, in the order of its stack.
    """

    def __init__(
        self, jobs: Sequence[FactorJob], like: Tensor, stored: torch.dtype, config: KFACConfig
    ) -> None:
        self._config, self._like = config, like
        self.overflowed: Tensor | None = None
        self.decay = 0.0
        self.keys: dict[FactorShape, list[Key]] = {}
        for job in jobs:
            self.keys.setdefault(job.shape, []).append((job.layer, job.kind))
        self.stacks: dict[FactorShape, Tensor] = {}
        self.running: dict[Key, Tensor] = {}
        ordered = [key for keys in self.keys.values() for key in keys]
        self.counts = like.new_zeros(2, len(ordered))
        self.updates = dict(zip(ordered, self.counts[0].unbind(), strict=True))
        self.refused = dict(zip(ordered, self.counts[1].unbind(), strict=True))
        self._first: dict[FactorShape, int] = {}  # of a shape's counts
        self._place: dict[Key, int] = {}  # in the shape's stack
        for shape, keys in self.keys.items():
            stack = like.new_empty(len(keys), shape.blocks, shape.dim, shape.dim, dtype=stored)
            self.stacks[shape] = stack.copy_(torch.eye(shape.dim, device=like.device))
            self.running.update(zip(keys, stack.unbind(), strict=True))
            self._first[shape] = len(self._place)
            self._place.update((key, place) for place, key in enumerate(keys))

    def update(self, news: Sequence[NewMean]) -> None:
        """Update these factors, `decay * old + (1 - decay) * new`, but not with what is not finite."""
        scales = self._scales(news)
        for part in self._parts(news):
            shape = part[0].job.shape
            start = self._place[part[0].job.layer, part[0].job.kind]
            at = self._first[shape] + start
            updates, refused = self.counts[:, at : at + len(part)]
            running = self.stacks[shape][start : start + len(part)]
            mean, present = self._means(part, shape, scales)
            old = running.to(mean.dtype)
            weight: Tensor | float = 1.0 - self.decay
            if self._config.factor_start == "first":
                weight = torch.where(updates == 0, 1.0, weight).to(mean.dtype)[:, None, None, None]
            renewed = torch.lerp(old, mean, weight).to(running.dtype)  # as stored: float16 ends at 65,504
            size = renewed.diagonal(dim1=-2, dim2=-1).sum((-2, -1), dtype=mean.dtype)
            finite = size.abs() < inf
            refusing = finite.logical_not()
            usable = finite if present is None else finite & present
            if self.overflowed is not None:
                usable, refusing = usable & (self.overflowed == 0), refusing & (self.overflowed == 0)
            torch.where(usable[:, None, None, None], renewed, running, out=running)
            updates += usable
            refused += refusing

    def _parts(self, news: Sequence[NewMean]) -> Iterator[list[NewMean]]:
        """Factors that are adjacent in one stack, and either all have other ranks' sums or all have not."""

        def place(new: NewMean) -> int:
            return self._first[new.job.shape] + self._place[new.job.layer, new.job.kind]

        ordered = sorted(news, key=place)
        alike = groupby(
            enumerate(ordered),
            key=lambda entry: (entry[1].job.shape, entry[1].others is None, place(entry[1]) - entry[0]),
        )
        for (shape, *_), entries in alike:
            together = [new for _, new in entries]
            size = max(1, _ELEMENTS // shape.elements)
            yield from (together[start : start + size] for start in range(0, len(together), size))

    def _scales(self, news: Sequence[NewMean]) -> dict[Key, Tensor]:
        """By factor that other ranks contribute to: its scale, 0 where no rank has statistics."""
        found: dict[Key, Tensor] = {}
        for kind in ("a", "g"):
            shared = [new for new in news if new.others is not None and new.job.kind == kind]
            if not shared:
                continue
            counts = torch.stack([new.others[-2:] for new in shared if new.others is not None])
            if any(new.counts[0] for new in shared):
                own = [float(count) for new in shared for count in new.counts]
                torch._foreach_add_(list(counts.flatten().unbind()), own)
            scales = factor_scales(kind, *counts.unbind(1))
            found.update(((new.job.layer, kind), scale) for new, scale in zip(shared, scales, strict=True))
        return found

    def _means(
        self, part: Sequence[NewMean], shape: FactorShape, scales: dict[Key, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """New means `[factors, blocks, n, n]`, and of which there are rows, where ranks may have none."""
        others = [new.others for new in part if new.others is not None]
        if not others:
            mean = torch.stack([_dense(new) for new in part])
            _scale(mean, [new.scale for new in part])
            return mean, None
        mean = self._like.new_empty(len(part), shape.blocks, shape.dim, shape.dim)
        for new, other, place in zip(part, others, mean, strict=True):
            unpack(other[:-2].view(shape.blocks, -1), place)
            if new.gram is not None:
                place.add_(_dense(new), alpha=new.scale)
        scale = torch.stack([scales[new.job.layer, new.job.kind] for new in part])
        return mean.mul_(scale[:, None, None, None]), scale > 0


def _dense(new: NewMean) -> Tensor:
    assert new.gram is not None  # noqa: S101  a factor without other ranks' sum has its own
    return dense(new.gram)


def _scale(means: Tensor, scales: list[float]) -> None:
    """Multiply each of `means` by its scale, which layers of as many positions share."""
    if all(scale == scales[0] for scale in scales):
        means.mul_(scales[0])
    else:
        torch._foreach_mul_(list(means.unbind()), scales)
