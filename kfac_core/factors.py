"""Running means of the factors, kept by their inverse workers only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_core.capture import Share, Statistics, factor_scale, factor_scales
from kfac_core.collectives import Communicator, PendingCollective
from kfac_core.config import Execution, KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.grams import Gram, dense, fold, is_finite, trace
from kfac_core.matmul import scratch
from kfac_core.packing import Packed, fold_packed, pack, pack_whole, packed_trace, unpack
from kfac_core.placement import FactorJob, FactorShape, LayerShape, Placement
from kfac_core.placement.balance import Bucket, buckets, sent_elements
from kfac_core.placement.placement import in_group_order


class Factors:
    """The factors that this rank is an inverse worker of.

    A factor is sent as one triangle with its numbers of loss terms and rows, in flat buffers with one part
    per owner. These numbers make the mean over ranks a mean over the world's loss terms, whatever each rank's
    batch, and also of a layer that a rank's batch does not reach. A rank never packs its own contribution to
    a factor that it alone keeps.

    Args:
        like: dtype of the statistics (at least float32) and device.
        execution: factor by factor, or all factors of a shape together (`BatchedMeans`).

    Attributes:
        running: running mean by factor, `[blocks, n, n]`, identity before the first update.
        refused: by factor, updates skipped because a statistic was not finite; on the device.
        batched: the running means by shape, where execution is batched.
        decay: weight of the old mean in the next update.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        placement: Placement,
        communicator: Communicator,
        config: KFACConfig,
        like: Tensor,
        execution: Execution,
    ) -> None:
        self._communicator = self._shared = communicator
        self._config = config
        self._names = [shape.name for shape in shapes]
        self._like = like
        self.jobs = placement.factor_jobs(shapes)
        self.own = [job for job in self.jobs if communicator.rank in job.inverse_workers]
        self._local_jobs = [job for job in self.own if not job.is_sent]
        self._buckets = buckets(self.jobs, communicator.world_size, overlap=config.overlap_factors)
        if config.overlap_factors and self._buckets:
            self._communicator = communicator.duplicate()  # `close` gives it back
        self._stored = getattr(torch, config.factor_dtype) if config.factor_dtype else like.dtype
        self._in_place = self._stored == like.dtype
        decay = config.factor_decay
        self.decay = float(decay) if isinstance(decay, int | float) else 0.0
        self.batched: BatchedMeans | None = None
        if execution is Execution.BATCHED:
            own = in_group_order(self.own, shapes, placement)
            self.batched = BatchedMeans(own, like, self._stored, config)
            self.running, self.updates = self.batched.running, self.batched.updates
            self.refused = self.batched.refused
        else:
            self.running = {}
            for job in self.own:
                identity = torch.eye(job.shape.dim, device=like.device)
                self.running[job.layer, job.kind] = self.empty(job.shape).copy_(identity)
            self.updates = {key: like.new_zeros(()) for key in self.running}
            self.refused = {key: like.new_zeros(()) for key in self.running}
        self._complete: set[int] = set()  # layers whose statistics are complete
        self._sent_layers: set[int] = set()
        self._next_bucket = 0  # of `_buckets`: the first that is not packed
        self._packed: list[_Filled] = []
        self._in_flight: list[tuple[_Filled, PendingCollective]] = []
        self._unreleased: list[PendingCollective] = []
        self._received: list[_Received] = []

    def close(self) -> None:
        """Give back the communicator of the exchanges that overlap; nothing is sent after this."""
        if self._communicator is not self._shared:
            self._communicator.close()
            self._communicator = self._shared

    def on_gradient(self, layer: int, statistics: Sequence[Statistics], *, complete: bool) -> bool:
        """Pack every bucket that this layer's gradient completes; `complete` if it is the layer's last one.

        Returns:
            Whether a bucket was packed and can be sent.

        Raises:
            ConfigError: the layer's factors have already been sent in this step.
        """
        if layer in self._sent_layers:
            raise ConfigError(
                f"overlap_factors: layer {self._names[layer]} got a gradient after its factors were sent; "
                "use one backward pass before each KFAC.step(), or wrap all but the last in no_sync() of the "
                "DistributedDataParallel that KFAC was given, or switch overlap_factors off"
            )
        if complete:
            self._complete.add(layer)
        before = self._next_bucket
        for bucket in takewhile(lambda bucket: bucket.layers <= self._complete, self._unpacked()):
            self._pack_next(bucket, statistics)
            self._sent_layers |= bucket.layers
        return self._next_bucket > before

    def pack(self, statistics: Sequence[Statistics]) -> bool:
        """Pack the next bucket; returns whether it was the last."""
        for bucket in self._unpacked()[:1]:
            self._pack_next(bucket, statistics)
        return not self._unpacked()

    def send(self) -> None:
        """Start the collectives of all packed buckets."""
        while self._packed:
            packed = self._packed[0]
            if packed.bucket.sizes is None:
                pending = self._communicator.all_reduce_async(packed.buffer)
            else:
                pending = self._communicator.reduce_parts(packed.buffer, packed.bucket.sizes)
            self._in_flight.append((self._packed.pop(0), pending))

    def receive(self) -> bool:
        """Wait for the next bucket; returns whether it was the last. Others stay in flight meanwhile.

        Packing and accumulating take each rank a different time, so ranks take turns bucket by bucket. A
        communicator that moves data only while it is waited for receives all buckets at once.
        """
        for _ in range(1 if self._communicator.in_background else len(self._in_flight)):
            if self._in_flight:
                packed, pending = self._in_flight.pop(0)
                self._unreleased.append(pending)
                pending.wait()
                self._received += packed.received_by(self._communicator.rank)
        return not self._in_flight

    def exchange(self) -> None:
        """Send all packed buckets and wait for all in flight; buckets received before are dropped."""
        self._received = []
        self.send()
        while not self.receive():
            pass
        self._reset()

    def discard(self) -> None:
        """End a step: drop what has not been accumulated. Every rank must call this; it waits for peers."""
        self._packed = []
        self.exchange()
        self._received = []

    def accumulate_local(self, statistics: Sequence[Statistics]) -> None:
        """Update factors that no other rank contributes to: `decay * old + (1 - decay) * new`.

        A layer that no rank has statistics of keeps its factors. So does one whose statistics contain a NaN
        or an infinity: `refused` counts it, without waiting for the device.
        """
        if self.batched is not None:
            own = [(job, self._local_mean(job, statistics)) for job in self._local_jobs]
            self.batched.decay = self.decay
            self.batched.update([NewMean(job, *mean) for job, mean in own if mean is not None])
            return
        for job in self._local_jobs:
            mean = self._local_mean(job, statistics)
            if mean is not None:
                self._average(job, *mean)

    def accumulate_received(self, statistics: Sequence[Statistics]) -> None:
        """Update factors in the same way from what was received and this rank's own contribution."""
        if self.batched is not None:
            self.batched.decay = self.decay
            self.batched.update([self._received_mean(each, statistics) for each in self._received])
            self._received = []
            return
        for received in self._received:
            local = None if received.whole else statistics[received.job.layer]
            self._accumulate(received.job, received.part, local)
        self._received = []

    def _local_mean(self, job: FactorJob, statistics: Sequence[Statistics]) -> tuple[Gram, float] | None:
        """The new mean of a factor that is this rank's alone, and its scale; None without statistics."""
        own = statistics[job.layer]
        share = own.share(job.kind)
        if share is None or not own.terms:
            return None
        return _kept(share), share.scale * factor_scale(job.kind, own.terms, own.rows)

    def _received_mean(self, received: _Received, statistics: Sequence[Statistics]) -> NewMean:
        """Other ranks' sum and this rank's contribution, still apart."""
        job, own = received.job, statistics[received.job.layer]
        if received.whole:
            return NewMean(job, None, 0.0, received.part)
        share = own.share(job.kind)
        if share is None:
            return NewMean(job, None, 0.0, received.part, (own.terms, 0))
        return NewMean(job, _kept(share), share.scale, received.part, (own.terms, own.rows))

    def _accumulate(self, job: FactorJob, part: Tensor, local: Statistics | None) -> None:
        """Update a factor from other ranks' sum and this rank's statistics, unless `part` includes them."""
        key = job.layer, job.kind
        packed, (terms, rows) = part[:-2].view(job.shape.blocks, -1), part[-2:].tolist()
        own = None
        if local is not None:
            own, terms, rows = local.share(job.kind), terms + local.terms, rows + local.rows
        if not (rows and terms):
            return
        scale = factor_scale(job.kind, terms, rows)
        if not self._in_place:
            mean = scratch(self._like, job.shape.blocks, job.shape.dim, job.shape.dim)
            unpack(packed, mean)
            if own is not None:
                fold(_kept(own), own.scale, mean, 1.0)
            self._average_masked(job, mean * scale)
        else:
            decay, size = self._decay(key), packed_trace(packed, job.shape.dim)
            if own is not None:
                size += own.scale * trace(_kept(own))
            if self._is_usable(key, size):
                weight = (1.0 - decay) * scale
                if own is not None:
                    fold(_kept(own), weight * own.scale, self.running[key], decay)
                    decay = 1.0
                fold_packed(packed, weight, self.running[key], decay)

    def empty(self, shape: FactorShape | None) -> Tensor:
        """An uninitialised running factor of this shape, or update count."""
        if shape is None:
            return self._like.new_empty(())
        return self._like.new_empty(shape.blocks, shape.dim, shape.dim, dtype=self._stored)

    def restore(self, saved: Mapping[Key, Tensor], updates: Mapping[Key, int]) -> None:
        """Load saved running means and update counts of the factors that this rank keeps."""
        for key, running in self.running.items():
            running.copy_(saved[key])
            self.updates[key].fill_(updates[key])
            self.refused[key].zero_()

    def _average(self, job: FactorJob, total: Gram, scale: float) -> None:
        """Update a running mean with `scale * total`."""
        key = job.layer, job.kind
        decay = self._decay(key)
        if not self._in_place:
            self._average_masked(job, dense(total) * scale)
        elif self._is_usable(key, trace(total)):
            fold(total, (1.0 - decay) * scale, self.running[key], decay)

    def _decay(self, key: Key) -> float:
        """The weight of a running mean in its next update, where the host decides it."""
        if self._config.factor_start == "identity" or not self._in_place:
            return self.decay
        return min(self.decay, 1.0 - float(_least_weight(self.updates[key], self._config)))

    def _is_usable(self, key: Key, size: Tensor) -> bool:
        """Whether an update with this trace is finite (see `grams.is_finite`); counts it either way."""
        finite = math.isfinite(size)
        (self.updates if finite else self.refused)[key] += 1
        return finite

    def _average_masked(self, job: FactorJob, mean: Tensor) -> None:
        """The same without a host synchronisation to learn whether the mean is finite."""
        key = job.layer, job.kind
        running, updates = self.running[key], self.updates[key]
        weight = torch.full_like(updates, 1.0 - self.decay)
        if self._config.factor_start != "identity":
            weight = torch.maximum(weight, _least_weight(updates, self._config))
        renewed = torch.lerp(running.to(mean.dtype), mean, weight).to(running.dtype)
        finite = is_finite(renewed)  # as it would be stored: float16 overflows at 65504
        running.copy_(torch.where(finite, renewed, running))
        updates += finite
        self.refused[key] += ~finite

    def _unpacked(self) -> list[Bucket]:
        return self._buckets[self._next_bucket :]

    def _reset(self) -> None:
        """Wait until peers have read this rank's buffers, then start over with the first bucket."""
        while self._unreleased:
            self._unreleased.pop(0).release()
        self._next_bucket = 0
        self._complete.clear()
        self._sent_layers.clear()

    def _pack_next(self, bucket: Bucket, statistics: Sequence[Statistics]) -> None:
        self._packed.append(self._pack(bucket, statistics))
        self._next_bucket += 1

    def _pack(self, bucket: Bucket, statistics: Sequence[Statistics]) -> _Filled:
        """This rank's contributions to the factors of a bucket that other ranks keep."""
        packed = _Filled(bucket, self._like.new_empty(sum(map(sent_elements, bucket.jobs))))
        if self.batched is not None:
            self._pack_together(packed, statistics)
            return packed
        for job, part in packed.parts():
            if job.inverse_workers == (self._communicator.rank,):
                continue  # receives the others' sum
            share = statistics[job.layer].share(job.kind)
            part[-2], part[-1] = statistics[job.layer].terms, statistics[job.layer].rows
            if share is None:
                part[:-2].zero_()
            else:
                pack(share.gram, part[:-2].view(job.shape.blocks, -1), share.scale)
        return packed

    def _pack_together(self, packed: _Filled, statistics: Sequence[Statistics]) -> None:
        """`_pack`, with one operation for the scales of all factors and two for their numbers."""
        filled: list[tuple[Tensor, float]] = []
        counts: list[tuple[Tensor, float]] = []
        for job, part in packed.parts():
            share = statistics[job.layer].share(job.kind)
            if job.inverse_workers == (self._communicator.rank,):
                continue
            counts += (part[-2:-1], statistics[job.layer].terms), (part[-1:], statistics[job.layer].rows)
            if share is None:
                part[:-2].zero_()
                continue
            pack_whole(share.gram, part[:-2].view(job.shape.blocks, -1))
            if share.scale != 1.0:
                filled.append((part[:-2], share.scale))
        if filled:
            torch._foreach_mul_([part for part, _ in filled], [scale for _, scale in filled])
        if counts:
            torch._foreach_zero_([place for place, _ in counts])
            torch._foreach_add_([place for place, _ in counts], [float(count) for _, count in counts])


def _least_weight(updates: Tensor, config: KFACConfig) -> Tensor:
    """The least weight of the next statistics after so many updates: 1, 1/2, 1/3 ... or 1, 0, 0 ..."""
    return (updates == 0).to(updates.dtype) if config.factor_start == "first" else 1.0 / (updates + 1.0)


def _kept(share: Share) -> Gram:
    """The gram of a share that stays on its rank."""
    assert not isinstance(share.gram, Packed)  # noqa: S101  only grams that are sent are packed early
    return share.gram


@dataclass(frozen=True)
class _Received:
    """A received factor: triangle, loss terms and rows, of all ranks if `whole`, else of the others."""

    job: FactorJob
    part: Tensor
    whole: bool


@dataclass(frozen=True)
class _Filled:
    """A bucket and its buffer."""

    bucket: Bucket
    buffer: Tensor

    def parts(self) -> Iterator[tuple[FactorJob, Tensor]]:
        """Every factor with its view of the buffer: the triangle, then the loss terms and the rows."""
        sizes = [sent_elements(job) for job in self.bucket.jobs]
        return zip(self.bucket.jobs, self.buffer.split(sizes), strict=True)

    def received_by(self, rank: int) -> list[_Received]:
        """The factors in it that `rank` keeps, once the collective is complete."""
        whole = self.bucket.sizes is None
        return [_Received(job, part, whole) for job, part in self.parts() if rank in job.inverse_workers]


# ------------------------------------------------------------
# Running means of the factors for a device on which a launch is dear: all factors of a shape together.


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
            if self._config.factor_start != "identity":
                least = _least_weight(updates, self._config).clamp(min=weight)
                weight = least.to(mean.dtype)[:, None, None, None]
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
