"""Running means of the factors, kept only by the ranks that invert them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kfac_core.capture import Statistics
from kfac_core.collectives import Communicator
from kfac_core.collectives.packing import pack, unpack
from kfac_core.config import KFACConfig
from kfac_core.grams import Gram, dense, fold, is_finite
from kfac_core.placement import FactorJob, FactorShape, LayerShape, Placement
from kfac_core.scratch import scratch

Key = tuple[int, str]
"""A factor: position of its layer, and `a` or `g`."""


class Factors:
    """The factors that this rank is an inverse worker of.

    A factor travels as one triangle and the number of examples behind it, in one flat buffer cut by owner.
    With that number the mean over ranks is the mean over examples, whatever each rank's batch was.

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
        self._like = like
        self._on_host = like.device.type == "cpu"
        self.jobs = placement.factor_jobs(shapes)
        self.own = [job for job in self.jobs if communicator.rank in job.inverse_workers]
        travelling = [job for job in self.jobs if len({*job.factor_workers, *job.inverse_workers}) > 1]
        self._to_all = [job for job in travelling if len(job.inverse_workers) > 1]
        self._to_one = sorted(
            (job for job in travelling if len(job.inverse_workers) == 1),
            key=lambda job: job.inverse_workers[0],
        )
        self._sizes = [0] * communicator.world_size
        for job in self._to_one:
            self._sizes[job.inverse_workers[0]] += travelling_elements(job)
        self._stored = getattr(torch, config.factor_dtype) if config.factor_dtype else like.dtype
        self.running: dict[Key, Tensor] = {}
        for job in self.own:
            identity = torch.eye(job.shape.dim, device=like.device)
            self.running[job.layer, job.kind] = self.empty(job.shape).copy_(identity)
        self.updates = {key: like.new_zeros(()) for key in self.running}
        self.refused = {key: like.new_zeros(()) for key in self.running}
        self._received: dict[Key, Tensor] = {}

    def exchange(self, statistics: Sequence[Statistics]) -> None:
        """Sum every rank's contributions on the ranks that keep the factor."""
        self._received = {}
        if self._communicator.world_size == 1:
            return
        if self._to_one:
            buffer = self._pack(self._to_one, statistics)
            self._communicator.reduce_parts(buffer, self._sizes)
            self._keep(self._to_one, buffer)
        if self._to_all:
            buffer = self._pack(self._to_all, statistics)
            self._communicator.all_reduce(buffer)
            self._keep(self._to_all, buffer)

    def absorb(self, statistics: Sequence[Statistics]) -> None:
        """Fold the new statistics into the running means: `decay * old + (1 - decay) * new`.

        A layer that no rank has statistics of keeps its factors. So does one whose statistics hold a NaN or
        an infinity: it is counted in `refused`, and no step waits for the device to find out.
        """
        for job in self.own:
            part = self._received.get((job.layer, job.kind))
            if part is not None:
                mean = scratch(self._like, job.shape.blocks, job.shape.dim, job.shape.dim)
                unpack(part[:-1].view(job.shape.blocks, -1), mean)
                if self._on_host:
                    if part[-1] > 0:
                        self._average(job, mean, 1.0 / float(part[-1]))
                else:
                    self._average_masked(job, mean / part[-1].clamp_min(1), part[-1] > 0)
                continue
            seen = statistics[job.layer]
            shares = seen.shares()
            if shares is not None:
                total, scale = shares[job.kind == "g"]
                self._average(job, total, scale / seen.examples)
        self._received = {}

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

    def _average(self, job: FactorJob, total: Gram, scale: float) -> None:
        """Fold `scale * total` into a running mean."""
        if not self._on_host:
            self._average_masked(job, dense(total) * scale, None)
            return
        key = job.layer, job.kind
        running, updates = self.running[key], self.updates[key]
        first = self._config.factor_start == "first" and not updates
        decay = 0.0 if first else self._config.factor_decay
        if running.dtype != self._like.dtype:
            self._average_masked(job, dense(total) * scale, None)
        elif is_finite(total):
            fold(total, (1.0 - decay) * scale, running, decay)
            updates += 1
        else:
            self.refused[key] += 1

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

    def _pack(self, jobs: Sequence[FactorJob], statistics: Sequence[Statistics]) -> Tensor:
        sizes = [travelling_elements(job) for job in jobs]
        buffer = self._like.new_empty(sum(sizes))
        for job, part in zip(jobs, buffer.split(sizes), strict=True):
            shares = statistics[job.layer].shares()
            if shares is None:
                part.zero_()
                continue
            total, scale = shares[job.kind == "g"]
            pack(total, part[:-1].view(job.shape.blocks, -1), scale)
            part[-1] = statistics[job.layer].examples
        return buffer

    def _keep(self, jobs: Sequence[FactorJob], buffer: Tensor) -> None:
        for job, part in zip(jobs, buffer.split([travelling_elements(job) for job in jobs]), strict=True):
            if self._communicator.rank in job.inverse_workers:
                self._received[job.layer, job.kind] = part


def travelling_elements(job: FactorJob) -> int:
    """Elements that a rank hands over for one factor: a triangle, and the number of examples behind it."""
    return job.shape.packed_elements + 1
