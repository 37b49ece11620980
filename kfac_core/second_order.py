"""Second-order data of the layers that this rank preconditions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_core.batched_means import Key
from kfac_core.collectives import Communicator
from kfac_core.collectives.communicator import are_alike
from kfac_core.config import KFACConfig
from kfac_core.diagnostics import Failure
from kfac_core.factors import Factors
from kfac_core.kernels.scratch import scratch
from kfac_core.overflow import HostCopy, copy_to_host
from kfac_core.placement import FactorJob, LayerShape, Placement
from kfac_core.placement.footprint import data_elements
from kfac_core.solvers import solver_of
from kfac_core.solvers.solver import LinAlgError

_ALIGNED = 16  # elements: products with a matrix that starts at another offset are slower


NOISE = 4.0
"""Coefficients below this many machine epsilons of the gradient's norm are rounding noise."""

CONDITIONED = 0.01
"""Noise is removed where epsilon times the largest curvature is over this share of the damping. Otherwise it
changes a preconditioned gradient by less than about a quarter of this."""


class UpdateCounts(NamedTuple):
    """Updates of a factor, and those refused since the last report because they were not finite."""

    taken: int
    refused: int


class SecondOrder:
    """Second-order data of this rank's column of the grid, in one flat buffer.

    The buffer has a part per member of the column, then the factors that every member solves for itself.

    Args:
        like: dtype of the arithmetic (at least float32) and device.

    Attributes:
        data: flat second-order data by factor, views into the buffer.
        own: the factors that this rank solves.
        solved: those of them that it solved at least once; a failed solve keeps their data.
        failures: factors that could not be decomposed, oldest first.
    """

    _waits_a_step = False

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        placement: Placement,
        communicator: Communicator,
        config: KFACConfig,
        like: Tensor,
    ) -> None:
        self._shapes, self._communicator, self._like = shapes, communicator, like
        self._config, self._solver = config, solver_of(config)
        self._warm = config.eigen_start == "warm"
        rank = communicator.rank
        self._column = placement.column(rank % placement.columns)
        jobs = [job for job in placement.factor_jobs(shapes) if rank in job.gradient_workers]
        ordered = sorted(self._in_working_order(jobs, placement), key=self._shifts_what_follows)
        shared = sorted(
            (job for job in ordered if len(job.inverse_workers) == 1), key=lambda job: job.inverse_workers[0]
        )
        replicated = [job for job in ordered if len(job.inverse_workers) > 1]
        sizes = dict.fromkeys(self._column, 0)
        for job in shared:
            sizes[job.inverse_workers[0]] += data_elements(self._config, job.shape)
        self._sizes = list(sizes.values())
        self._shared = sum(self._sizes)
        elements = [data_elements(self._config, job.shape) for job in shared + replicated]
        stored = getattr(torch, config.inverse_dtype) if config.inverse_dtype else like.dtype
        self._buffer = like.new_zeros(sum(elements), dtype=stored)
        self._exact = torch.promote_types(stored, like.dtype)
        parts = self._buffer.split(elements)
        self.data: dict[Key, Tensor] = {
            (job.layer, job.kind): part for job, part in zip(shared + replicated, parts, strict=True)
        }
        self._views: dict[tuple[int, ...], Any] = {}
        whole = len(self._column) == communicator.world_size > 1
        self._shares_replicas = bool(replicated) and whole and not are_alike(communicator, like)
        self.own = [job for job in jobs if rank in job.inverse_workers]
        self.solved: set[Key] = set()
        self._means = like.new_zeros(len(shapes), 2)
        self._means_travel = self._solver.needs_traces and any(
            layer.a_inverse_workers != layer.g_inverse_workers for layer in placement.layers.values()
        )
        # Of a factor that several ranks keep, one contributes, or the sum would count it several times.
        self._mean_sources = {
            (job.layer, job.kind)
            for job in placement.factor_jobs(shapes)
            if not self._means_travel or job.inverse_workers[0] == rank
        }
        self._last_shift: tuple[float, Tensor] | None = None
        self._conditions: list[float] = []  # by layer, the largest eigenvalue of the Kronecker product
        self._asked: HostCopy | None = None
        self._asked_now = self._said_unresolved = False
        self.failures: list[Failure] = []

    def _in_working_order(self, jobs: list[FactorJob], placement: Placement) -> list[FactorJob]:
        """The factors in the order in which a step works on them."""
        return jobs

    def _shifts_what_follows(self, job: FactorJob) -> bool:
        """Whether this factor's data ends at an unaligned offset; such factors come last in their part."""
        return data_elements(self._config, job.shape) % _ALIGNED != 0

    def exchange_means(self, factors: Mapping[Key, Tensor]) -> None:
        """Mean diagonal of every factor, for solvers that split the damping by it."""
        if not self._solver.needs_traces:
            return
        self._means.zero_()
        for (layer, kind), factor in factors.items():
            if (layer, kind) not in self._mean_sources:
                continue
            mean = factor.diagonal(dim1=-2, dim2=-1).to(self._means.dtype).mean()
            # A factor that is not finite counts as the identity, to leave its partner's damping usable.
            self._means[layer, int(kind == "g")] = mean.nan_to_num(1.0, 1.0, 1.0)
        if self._means_travel:
            self._communicator.all_reduce(self._means)

    def solve(
        self,
        factors: Factors,
        damping: float,
        step: int,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> dict[Key, UpdateCounts]:
        """Invert or decompose the factors that this rank keeps; a failed one is reported and keeps its data.

        `timed` gives a context for the work on a layer, from its name. Returns what is known of the factors'
        updates now that the device has been waited for.
        """
        for job in self.own:
            with timed(self._shapes[job.layer].name):
                self._renew(job, factors.running[job.layer, job.kind], damping, step)
        if not self._solver.tells_condition and not self._said_unresolved:
            for job in self.own:
                self._say_unresolved(
                    bool(self._unresolved(factors.running[job.layer, job.kind], damping)), job.layer
                )
        return {
            key: UpdateCounts(int(factors.updates[key]), int(factors.refused[key])) for key in factors.updates
        }

    def exchange(self) -> None:
        """All-gather the column's data: each member receives what the others solved.

        What every member solves for itself is sent only where their devices are unlike: the bits would
        differ, and with them, step by step, the models.
        """
        if len(self._column) > 1 and self._shared:
            shared = self._buffer[: self._shared]
            self._communicator.gather_parts(shared, self._sizes, self._column)
        if self._shares_replicas:
            self._communicator.broadcast(self._buffer[self._shared :], self._column[0])
        self._ask_conditions()

    def precondition(
        self,
        layers: Iterable[int],
        gradients: Sequence[Tensor],
        damping: float,
        out: Sequence[Tensor],
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Precondition these layers' gradients to `out`, in the wider precision of gradients and data.

        `gradients` and `out` are lists over all layers; `timed` as in `solve`.
        """
        shift = self._shift(damping)
        self._read_conditions()
        for layer in layers:
            with timed(self._shapes[layer].name):
                noise = self._noise([layer], damping)
                self._apply(self._viewed(layer), gradients[layer], shift, out[layer], noise)

    @property
    def holds_damping(self) -> bool:
        """Whether the data are of the damping that they were solved with."""
        return self._solver.holds_damping

    def empty(self, elements: int) -> Tensor:
        """Uninitialised second-order data of so many elements."""
        return self._buffer.new_empty(elements)

    def restore(self, saved: Mapping[Key, Tensor], solved: Container[Key]) -> None:
        """Load saved data of the factors that this rank applies, and which of them had been solved."""
        for key, data in self.data.items():
            data.copy_(saved[key])
        self.solved = {(job.layer, job.kind) for job in self.own if (job.layer, job.kind) in solved}
        self.settle()

    def settle(self) -> None:
        """After data were loaded: what a running process would know by now."""
        self._ask_conditions()
        self._asked_now = False

    def report(self, layer: int, kind: str, step: int, reason: str) -> None:
        """Add to `failures`."""
        self.failures.append(Failure(self._shapes[layer].name, kind, step, self._communicator.rank, reason))

    def _unresolved(self, factor: Tensor, damping: float) -> Tensor:
        """Whether the damping of an inverse is below the rounding errors of a factor `[..., n, n]`."""
        eps = torch.finfo(self._like.dtype).eps
        return factor.diagonal(dim1=-2, dim2=-1).sum(-1).amax(-1) * eps > damping

    def _say_unresolved(self, is_unresolved: bool, layer: int) -> None:
        if is_unresolved and not self._said_unresolved:
            self._said_unresolved = True
            logging.getLogger("kfac_core.preconditioner").warning(
                "solver=%s: the damping is below the rounding errors of layer %s's factor, whose "
                "inverse is of these: raise the damping, scale the activations down, or use solver=eigen",
                self._config.solver, self._shapes[layer].name,
            )  # fmt: skip

    def _shift(self, damping: float) -> Tensor:
        """The damping on the device, sent when it changes."""
        if self._last_shift is None or self._last_shift[0] != damping:
            self._last_shift = damping, self._like.new_full((), damping, dtype=self._exact)
        return self._last_shift[1]

    def _ask_conditions(self) -> None:
        """Start to copy the largest eigenvalues of the layers that this rank preconditions."""
        if not self._solver.tells_condition or not self.data:
            return
        if self._asked is not None:  # of the update before
            self._take_conditions(self._asked)
        layers = sorted({layer for layer, _ in self.data})
        values = [
            self._solver.eigenvalues(self.data[layer, kind], getattr(self._shapes[layer], kind))
            for kind in "ag"
            for layer in layers
        ]
        largest = torch.stack(torch._foreach_max(values)).to(self._exact).view(2, -1)
        self._asked, self._judged = copy_to_host(largest.prod(0, keepdim=True)), layers
        self._asked_now = True

    def _read_conditions(self) -> None:
        """Take what was asked for; from a GPU in the step after that, when it has arrived."""
        if self._asked is None or (self._asked_now and self._waits_a_step):
            self._asked_now = False
            return
        self._take_conditions(self._asked)
        self._asked = None

    def _take_conditions(self, asked: HostCopy) -> None:
        (found,) = asked.numbers()
        self._conditions = [0.0] * len(self._shapes)
        for layer, largest in zip(self._judged, found, strict=True):
            self._conditions[layer] = largest

    def _noise(self, layers: Sequence[int], damping: float) -> float:
        """What counts as rounding noise in these layers' gradients: nothing where it has no weight."""
        eps = torch.finfo(self._like.dtype).eps
        largest = max((self._conditions[layer] for layer in layers), default=0.0) if self._conditions else 0.0
        return NOISE * eps if largest * eps > CONDITIONED * damping else 0.0

    def _apply(self, views: Any, gradient: Tensor, shift: Tensor, out: Tensor, noise: float) -> None:
        """Precondition `gradient` to `out`, in the wider precision of both and the data."""
        if self._exact == self._like.dtype:
            self._solver.precondition(gradient, views, shift, out, noise)
        else:
            wide = torch.empty_like(out, dtype=self._exact)
            self._solver.precondition(gradient.to(self._exact), views, shift, wide, noise)
            out.copy_(wide)

    def _viewed(self, layer: int) -> Any:
        """A layer's data in its solver's form: views, made once, or copies in a wider precision."""
        views = self._views.get((layer,))
        if views is None or self._buffer.dtype != self._exact:
            data = self.data[layer, "a"].to(self._exact), self.data[layer, "g"].to(self._exact)
            views = self._views[layer,] = self._solver.views(*data, self._shapes[layer])
        return views

    def _renew(self, job: FactorJob, factor: Tensor, damping: float, step: int) -> None:
        key = job.layer, job.kind
        means, data = self._means[job.layer].unbind(), self.data[key]
        split = self._solver.factor_damping(damping, *(means if job.kind == "a" else means[::-1]))
        try:
            last = data if self._warm and key in self.solved else None
            data.copy_(self._solve(factor, split, data.numel(), last))
            self.solved.add(key)
        except LinAlgError as error:
            self.report(job.layer, job.kind, step, f"no decomposition, also in float64: {error}")
            if key not in self.solved:  # no good data yet: use the identity as the factor
                identity = torch.eye(job.shape.dim, dtype=self._like.dtype, device=self._like.device)
                identity = identity.repeat(job.shape.blocks, 1, 1)
                data.copy_(self._solve(identity, split, data.numel(), None))

    def _solve(self, factor: Tensor, damping: Tensor | float, elements: int, last: Tensor | None) -> Tensor:
        """Solve in the working precision and, if that fails, in float64; returns data in the stored dtype.

        The result is in scratch memory, so that a failed solve never overwrites good data. It is still in
        cache when it is read once to find a NaN.
        """
        wide = torch.promote_types(self._buffer.dtype, torch.float32)  # a float16 sum overflows at 65,504
        for dtype in dict.fromkeys((self._like.dtype, torch.float64)):
            exact = factor.to(dtype)
            data = scratch(exact, elements)
            try:
                self._solver.solve(exact, damping, data, last)
            except LinAlgError:
                if dtype == torch.float64:
                    raise
                continue
            data = data.to(self._buffer.dtype)
            # Some GPU drivers return NaN where LAPACK raises.
            if math.isfinite(data.sum(dtype=wide).item()):
                return data
        raise LinAlgError("the result is not finite")
