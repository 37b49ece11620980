"""Running means of the factors, kept only by the ranks that invert them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from kfac_core.capture import Share, Statistics
from kfac_core.collectives import Communicator, PendingCollective
from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.kernels.grams import Gram, dense, fold, is_finite, trace
from kfac_core.kernels.packing import Packed, fold_packed, pack, packed_trace, unpack
from kfac_core.kernels.scratch import scratch
from kfac_core.placement import FactorJob, FactorShape, LayerShape, Placement
from kfac_core.placement.buckets import Bucket, buckets, travelling_elements

Key = tuple[int, str]
"""A factor: position of its layer, and `a` or `g`."""


class Factors:
    """The factors that this rank is an inverse worker of.

    A factor travels as one triangle and the number of examples behind it, in flat buffers cut by owner. With
    that number the mean over ranks is the mean over examples, whatever each rank's batch was. What a rank
    itself adds to a factor that only it keeps is never packed.

    Args:
        like: dtype of the statistics (at least float32) and device.

    Attributes:
        running: running mean by factor, `[blocks, n, n]`, identity before the first update.
        refused: by factor, updates left out because a statistic was no finite number; on the device.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        placement: Placement,
        communicator: Communicator,
        config: KFACConfig,
        like: Tensor,
    ) -> None:
        self._communicator = communicator
        self._config = config
        self._names = [shape.name for shape in shapes]
        self._like = like
        self.jobs = placement.factor_jobs(shapes)
        self.own = [job for job in self.jobs if communicator.rank in job.inverse_workers]
        self._alone = [job for job in self.own if not job.travels]
        self._buckets = buckets(self.jobs, communicator.world_size, overlap=config.overlap_factors)
        if config.overlap_factors and self._buckets:
            self._communicator = communicator.apart()
        self._stored = getattr(torch, config.factor_dtype) if config.factor_dtype else like.dtype
        self._in_place = like.is_cpu and self._stored == like.dtype
        self.running: dict[Key, Tensor] = {}
        for job in self.own:
            identity = torch.eye(job.shape.dim, device=like.device)
            self.running[job.layer, job.kind] = self.empty(job.shape).copy_(identity)
        self.updates = {key: like.new_zeros(()) for key in self.running}
        self.refused = {key: like.new_zeros(()) for key in self.running}
        self._complete: set[int] = set()  # layers, and below those whose buckets have left
        self._gone: set[int] = set()
        self._left = 0  # buckets that are packed, or gone
        self._packed: list[_Filled] = []
        self._begun: list[tuple[_Filled, PendingCollective]] = []
        self._arrived: list[tuple[_Filled, PendingCollective]] = []
        self._received: list[_Received] = []

    def hear(self, layer: int, statistics: Sequence[Statistics], *, complete: bool) -> bool:
        """A layer's statistics have grown, for the last time in this step if `complete`.

        Returns:
            Whether a bucket has been packed by it, and may be sent.

        Raises:
            ConfigError: they have left already.
        """
        if layer in self._gone:
            raise ConfigError(
                f"overlap_factors: layer {self._names[layer]} got a gradient after its factors left; have "
                "one backward pass before each KFAC.step(), or put no_sync() of the DistributedDataParallel "
                "that KFAC was given around those before it; or leave overlap_factors out"
            )
        if complete:
            self._complete.add(layer)
        before = self._left
        for bucket in takewhile(lambda bucket: bucket.layers <= self._complete, self._waiting()):
            self._make_ready(bucket, statistics)
            self._gone |= bucket.layers
        return self._left > before

    def pack(self, statistics: Sequence[Statistics]) -> bool:
        """Make the next bucket that has not left ready for the way; returns whether it was the last."""
        for bucket in self._waiting()[:1]:
            self._make_ready(bucket, statistics)
        return not self._waiting()

    def send(self) -> None:
        """Send what has been packed on its way."""
        while self._packed:
            packed = self._packed[0]
            if packed.bucket.sizes is None:
                begun = self._communicator.begin_all_reduce(packed.buffer)
            else:
                begun = self._communicator.reduce_parts(packed.buffer, packed.bucket.sizes)
            self._begun.append((self._packed.pop(0), begun))

    def receive(self) -> bool:
        """Wait for the next bucket, to be absorbed while others are on their way; whether it was the last.

        Ranks have not as much to pack of a bucket as to absorb: one at a time, they hardly wait for each
        other. Where nothing moves before it is waited for, that would be a wait a bucket: all at once then.
        """
        for _ in range(1 if self._communicator.in_background else len(self._begun)):
            if self._begun:
                packed, begun = self._begun.pop(0)
                self._arrived.append((packed, begun))
                begun.arrive()
                self._received += packed.received_by(self._communicator.rank)
        return not self._begun

    def exchange(self) -> None:
        """Send what has been packed, and wait for all that is on its way; what came before is dropped."""
        self._received = []
        self.send()
        while not self.receive():
            pass
        self._end()

    def forget(self) -> None:
        """End a step: drop what has not been absorbed; every rank must, it waits for the others."""
        self._packed = []
        self.exchange()
        self._received = []

    def absorb_alone(self, statistics: Sequence[Statistics]) -> None:
        """Fold in what nobody else adds to: `decay * old + (1 - decay) * new`.

        A layer that no rank has statistics of keeps its factors. So does one whose statistics hold a NaN or
        an infinity: it is counted in `refused`, and no step waits for the device to find out.
        """
        for job in self._alone:
            share = statistics[job.layer].share(job.kind)
            if share is not None:
                self._average(job, _kept(share), share.scale / statistics[job.layer].examples)

    def absorb_received(self, statistics: Sequence[Statistics]) -> None:
        """Fold in, in the same way, what has been received, with this rank's own share."""
        for received in self._received:
            seen = statistics[received.job.layer]
            share = None if received.whole else seen.share(received.job.kind)
            self._absorb(received.job, received.part, share, seen.examples)
        self._received = []

    def _absorb(self, job: FactorJob, part: Tensor, own: Share | None, examples: int) -> None:
        """Fold in what came from other ranks, and this rank's own share where it is not in it yet."""
        key = job.layer, job.kind
        packed, count = part[:-1].view(job.shape.blocks, -1), part[-1]
        if own is not None:
            count = count + examples
        if not self._in_place:
            mean = scratch(self._like, job.shape.blocks, job.shape.dim, job.shape.dim)
            unpack(packed, mean)
            if own is not None:
                fold(_kept(own), own.scale, mean, 1.0)
            self._average_masked(job, mean / count.clamp_min(1), count > 0)
        elif count > 0:
            decay, size = self._decay(key), packed_trace(packed, job.shape.dim)
            if own is not None:
                size += own.scale * trace(_kept(own))
            if self._is_usable(key, size):
                weight = (1.0 - decay) / float(count)
                if own is not None:
                    fold(_kept(own), weight * own.scale, self.running[key], decay)
                    decay = 1.0
                fold_packed(packed, weight, self.running[key], decay)

    def empty(self, shape: FactorShape | None) -> Tensor:
        """Room for a running factor of this shape, or for an update count."""
        if shape is None:
            return self._like.new_empty(())
        return self._like.new_empty(shape.blocks, shape.dim, shape.dim, dtype=self._stored)

    def restore(self, saved: Mapping[Key, Tensor], updates: Mapping[Key, int]) -> None:
        """Take over saved running means and update counts of the factors that this rank keeps."""
        for key, running in self.running.items():
            running.copy_(saved[key])
            self.updates[key].fill_(updates[key])
            self.refused[key].zero_()

    def _average(self, job: FactorJob, total: Gram, scale: float) -> None:
        """Fold `scale * total` into a running mean."""
        key = job.layer, job.kind
        decay = self._decay(key)
        if not self._in_place:
            self._average_masked(job, dense(total) * scale, None)
        elif self._is_usable(key, trace(total)):
            fold(total, (1.0 - decay) * scale, self.running[key], decay)

    def _decay(self, key: Key) -> float:
        """What the next update leaves of a running mean."""
        if self._config.factor_start == "first" and self._in_place and not self.updates[key]:
            return 0.0
        return self._config.factor_decay

    def _is_usable(self, key: Key, size: Tensor) -> bool:
        """Whether an update of this trace has finite elements only (`grams.is_finite`); counts it."""
        finite = math.isfinite(size)
        (self.updates if finite else self.refused)[key] += 1
        return finite

    def _average_masked(self, job: FactorJob, mean: Tensor, present: Tensor | None) -> None:
        """The same without waiting for the device to say whether the mean is finite."""
        key = job.layer, job.kind
        running, updates = self.running[key], self.updates[key]
        new_weight = 1.0 - self._config.factor_decay
        weight = torch.full_like(updates, new_weight)
        if self._config.factor_start == "first":
            weight = torch.where(updates == 0, torch.ones_like(weight), weight)
        renewed = torch.lerp(running.to(mean.dtype), mean, weight).to(running.dtype)
        finite = is_finite(renewed)  # as it would be stored: float16 overflows at 65504
        usable = finite if present is None else finite & present
        running.copy_(torch.where(usable, renewed, running))
        updates += usable
        self.refused[key] += ~finite

    def _waiting(self) -> list[Bucket]:
        """Buckets that have not left."""
        return self._buckets[self._left :]

    def _end(self) -> None:
        """All have come; once the others have what they need of this rank's buffers, begin anew."""
        while self._arrived:
            _, begun = self._arrived.pop(0)
            begun.release()
        self._left = 0
        self._complete.clear()
        self._gone.clear()

    def _make_ready(self, bucket: Bucket, statistics: Sequence[Statistics]) -> None:
        self._packed.append(self._pack(bucket, statistics))
        self._left += 1

    def _pack(self, bucket: Bucket, statistics: Sequence[Statistics]) -> _Filled:
        """What this rank adds to the factors of a bucket that others keep."""
        packed = _Filled(bucket, self._like.new_empty(sum(map(travelling_elements, bucket.jobs))))
        for job, part in packed.parts():
            if job.inverse_workers == (self._communicator.rank,):
                continue  # here the others' will be
            share = statistics[job.layer].share(job.kind)
            if share is None:
                part.zero_()
                continue
            pack(share.gram, part[:-1].view(job.shape.blocks, -1), share.scale)
            part[-1] = statistics[job.layer].examples
        return packed


def _kept(share: Share) -> Gram:
    """The gram of a share that stays on its rank."""
    assert not isinstance(share.gram, Packed)  # noqa: S101  what is packed early leaves
    return share.gram


@dataclass(frozen=True)
class _Received:
    """What came of a factor: the triangle and the number of examples, of all ranks or of the others."""

    job: FactorJob
    part: Tensor
    whole: bool


@dataclass(frozen=True)
class _Filled:
    """A bucket and its buffer."""

    bucket: Bucket
    buffer: Tensor

    def parts(self) -> Iterator[tuple[FactorJob, Tensor]]:
        """Every factor with its place, a view: the triangle, and the number of examples."""
        sizes = [travelling_elements(job) for job in self.bucket.jobs]
        return zip(self.bucket.jobs, self.buffer.split(sizes), strict=True)

    def received_by(self, rank: int) -> list[_Received]:
        """What of it is for a rank that the buffer has arrived at."""
        whole = self.bucket.sizes is None
        return [_Received(job, part, whole) for job, part in self.parts() if rank in job.inverse_workers]
