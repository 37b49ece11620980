"""Second-order data of the layers that this rank preconditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kfac_core.collectives import Communicator
from kfac_core.placement import FactorJob, LayerShape, Placement
from kfac_core.solvers import Solver


class SecondOrder:
    """One flat buffer for this rank's column of the grid: a part per member, then what everyone solves alone.

    Attributes:
        data: flat second-order data by (layer, kind), views into the buffer.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        placement: Placement,
        communicator: Communicator,
        solver: Solver,
        like: Tensor,
    ) -> None:
        rank = communicator.rank
        self._communicator = communicator
        self._solver = solver
        self._column = placement.column(rank % placement.columns)
        mine = [job for job in placement.factor_jobs(shapes) if rank in job.gradient_workers]
        shared = sorted(
            (job for job in mine if len(job.inverse_workers) == 1), key=lambda job: job.inverse_workers[0]
        )
        alone = [job for job in mine if len(job.inverse_workers) > 1]
        sizes = dict.fromkeys(self._column, 0)
        for job in shared:
            sizes[job.inverse_workers[0]] += solver.data_elements(job.shape)
        self._sizes = list(sizes.values())
        elements = [solver.data_elements(job.shape) for job in shared + alone]
        self._buffer = like.new_zeros(sum(elements))
        self.data: dict[tuple[int, str], Tensor] = {
            (job.layer, job.kind): part
            for job, part in zip(shared + alone, self._buffer.split(elements), strict=True)
        }
        self._own = [job for job in mine if rank in job.inverse_workers]
        self._means = like.new_zeros(len(shapes), 2)
        self._means_travel = solver.needs_traces and any(
            layer.a_inverse_workers != layer.g_inverse_workers for layer in placement.layers.values()
        )

    def exchange_means(self, factors: Mapping[tuple[int, str], Tensor]) -> None:
        """Mean diagonal of every factor, for solvers that split the damping by it."""
        if not self._solver.needs_traces:
            return
        self._means.zero_()
        for (layer, kind), factor in factors.items():
            self._means[layer, int(kind == "g")] = factor.diagonal(dim1=-2, dim2=-1).mean()
        if self._means_travel:
            self._communicator.all_reduce(self._means)

    def solve(self, factors: Mapping[tuple[int, str], Tensor], damping: float) -> None:
        """Invert or decompose the factors that this rank keeps."""
        for job in self._own:
            self._solve(job, factors[job.layer, job.kind], damping)

    def exchange(self) -> None:
        """Fetch what the other members of the column solved."""
        if len(self._column) > 1:
            self._communicator.gather_parts(self._buffer[: sum(self._sizes)], self._sizes, self._column)

    def nbytes(self) -> int:
        """Bytes of second-order data on this rank."""
        return self._buffer.numel() * self._buffer.element_size()

    def _solve(self, job: FactorJob, factor: Tensor, damping: float) -> None:
        own, other = self._means[job.layer] if job.kind == "a" else self._means[job.layer].flip(0)
        self._solver.solve(
            factor, self._solver.factor_damping(damping, own, other), self.data[job.layer, job.kind]
        )
