"""Running means of the factors, kept only by the ranks that invert them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_core.capture import Statistics
from kfac_core.collectives import Communicator
from kfac_core.collectives.packing import pack, unpack
from kfac_core.placement import FactorJob, LayerShape, Placement


class Factors:
    """The factors that this rank is an inverse worker of.

    A factor travels as one triangle and the number of examples behind it, in one flat buffer cut by owner.
    With that number the mean over ranks is the mean over examples, whatever each rank's batch was.

    Attributes:
        running: running mean by (layer, kind), `[blocks, n, n]`, identity at the start (SC20).
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        placement: Placement,
        communicator: Communicator,
        like: Tensor,
    ) -> None:
        rank = communicator.rank
        self._communicator = communicator
        self._like = like
        jobs = placement.factor_jobs(shapes)
        self._own = [job for job in jobs if rank in job.inverse_workers]
        travelling = [job for job in jobs if job.factor_workers != job.inverse_workers]
        self._to_all = [job for job in travelling if len(job.inverse_workers) > 1]
        self._to_one = sorted(
            (job for job in travelling if len(job.inverse_workers) == 1),
            key=lambda job: job.inverse_workers[0],
        )
        self._sizes = [0] * communicator.world_size
        for job in self._to_one:
            self._sizes[job.inverse_workers[0]] += _travelling_elements(job)
        self.running: dict[tuple[int, str], Tensor] = {
            (job.layer, job.kind): torch.eye(job.shape.dim, dtype=like.dtype, device=like.device).repeat(
                job.shape.blocks, 1, 1
            )
            for job in self._own
        }
        self._received: dict[tuple[int, str], Tensor] = {}

    def exchange(self, statistics: Sequence[Statistics]) -> None:
        """Sum every rank's contributions on the ranks that keep the factor."""
        self._received = {}
        if self._communicator.world_size == 1:
            return
        rank = self._communicator.rank
        for jobs, to_all in ((self._to_one, False), (self._to_all, True)):
            if not jobs:
                continue
            buffer = self._like.new_zeros(sum(_travelling_elements(job) for job in jobs))
            parts = buffer.split([_travelling_elements(job) for job in jobs])
            for job, part in zip(jobs, parts, strict=True):
                _write(statistics[job.layer], job, part)
            if to_all:
                self._communicator.all_reduce(buffer)
            else:
                self._communicator.reduce_parts(buffer, self._sizes)
            for job, part in zip(jobs, parts, strict=True):
                if rank in job.inverse_workers:
                    self._received[job.layer, job.kind] = part

    def absorb(self, statistics: Sequence[Statistics], decay: float) -> None:
        """Fold the new statistics into the running means: `decay * old + (1 - decay) * new`.

        A layer that no rank has statistics of keeps its factors.
        """
        for job in self._own:
            running = self.running[job.layer, job.kind]
            part = self._received.get((job.layer, job.kind))
            if part is None:
                mean = _local_mean(statistics[job.layer], job.kind)
                if mean is not None:
                    running.lerp_(mean, 1 - decay)
                continue
            examples = part[-1]
            mean = torch.empty_like(running)
            unpack(part[:-1].view(job.shape.blocks, -1), mean)
            mean /= examples.clamp_min(1)
            running.lerp_(mean, (1 - decay) * (examples > 0).to(mean.dtype))
        self._received = {}


def _travelling_elements(job: FactorJob) -> int:
    return job.shape.packed_elements + 1


def _write(statistics: Statistics, job: FactorJob, part: Tensor) -> None:
    contributions = statistics.contributions
    if contributions is not None:
        pack(contributions[job.kind == "g"], part[:-1].view(job.shape.blocks, -1))
        part[-1] = statistics.examples


def _local_mean(statistics: Statistics, kind: str) -> Tensor | None:
    contributions = statistics.contributions
    return None if contributions is None else contributions[kind == "g"] / statistics.examples
