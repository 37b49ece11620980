"""Second-order data of the layers that this rank preconditions."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_core.collectives import Communicator
from kfac_core.collectives.communicator import are_alike
from kfac_core.config import KFACConfig
from kfac_core.factors import BatchedMeans, Factors, Key
from kfac_core.gradients import adjacent_runs, evenly_spaced
from kfac_core.guards import Failure
from kfac_core.matmul import scratch, tf32_products
from kfac_core.overflow import HostCopy, copy_to_host
from kfac_core.placement import FactorJob, FactorShape, LayerShape, Placement
from kfac_core.placement.placement import data_elements, in_group_order, layer_groups
from kfac_core.solvers import LinAlgError, solver_of

_ALIGNED = 16  # elements: products with a matrix that starts at another offset are slower


NOISE = 4.0
"""Coefficients below this many machine epsilons of the gradient's norm are rounding noise."""

CONDITIONED = 0.01
"""Noise is removed where epsilon times the largest curvature is over this share of the damping. Otherwise it
changes a preconditioned gradient by less than about a quarter of this."""


TF32_CONDITIONED = 1e4
"""Conditions of a layer's damped curvature up to which its gradient is preconditioned in TF32 by default. The
error is at most about the condition's root times 2^-11, so 5 % here: a sixth of what statistics of an older
step change."""


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
        warm = config.eigen_start == "warm" or (config.eigen_start is None and like.is_cuda)
        self._warm = warm and config.solver == "eigen"
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
        self._shifts: dict[tuple[int, ...], Tensor] = {}  # by layers, where the damping is relative
        self._curvatures: dict[int, Tensor] = {}  # of layers, since the data changed
        whole = len(self._column) == communicator.world_size > 1
        self._shares_replicas = bool(replicated) and whole and not are_alike(communicator, like)
        self.own = [job for job in jobs if rank in job.inverse_workers]
        self.solved: set[Key] = set()
        self._means = like.new_zeros(len(shapes), 2)
        self._needs_traces = self._solver.needs_traces and config.relative_damping is None
        self._means_travel = self._needs_traces and any(
            layer.a_inverse_workers != layer.g_inverse_workers for layer in placement.layers.values()
        )
        # Of a factor that several ranks keep, one contributes, or the sum would count it several times.
        self._mean_sources = {
            (job.layer, job.kind)
            for job in placement.factor_jobs(shapes)
            if not self._means_travel or job.inverse_workers[0] == rank
        }
        self._last_shift: tuple[float, Tensor] | None = None
        self._conditions: list[float] = []  # by layer, the product's largest eigenvalue, as the damping is
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
        if not self._needs_traces:
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
                self._renew(job, factors.running[job.layer, job.kind], damping, step, warm=self._warm)
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
        self._read_conditions()
        for layer in layers:
            with timed(self._shapes[layer].name):
                shift, noise = self._shift((layer,), damping), self._noise([layer], damping)
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
        eps, largest = torch.finfo(self._like.dtype).eps, factor.diagonal(dim1=-2, dim2=-1).sum(-1).amax(-1)
        relative = self._config.relative_damping is not None
        return largest * eps > (_relative(damping, factor).squeeze(-1) if relative else damping)

    def _say_unresolved(self, is_unresolved: bool, layer: int) -> None:
        if is_unresolved and not self._said_unresolved:
            self._said_unresolved = True
            logging.getLogger("kfac_core.preconditioner").warning(
                "solver=%s: the damping is below the rounding errors of layer %s's factor, whose "
                "inverse is of these: raise the damping, scale the activations down, or use solver=eigen",
                self._config.solver, self._shapes[layer].name,
            )  # fmt: skip

    def _shift(self, layers: tuple[int, ...], damping: float) -> Tensor:
        """The damping of these layers on the device, sent when it changes.

        A relative one is multiplied by each layer's mean curvature: `[layers, 1, 1]` of several.
        """
        if self._last_shift is None or self._last_shift[0] != damping:
            self._last_shift = damping, self._like.new_full((), damping, dtype=self._exact)
            self._shifts = {}
        if self._config.relative_damping is None or self._solver.holds_damping:
            return self._last_shift[1]
        if layers not in self._shifts:
            curvatures = torch.stack([self._mean_curvature(layer) for layer in layers])
            shifts = self._last_shift[1] * curvatures
            self._shifts[layers] = shifts[0] if len(layers) == 1 else shifts.view(-1, 1, 1)
        return self._shifts[layers]

    def _mean_curvature(self, layer: int) -> Tensor:
        """The mean eigenvalue of a layer's Kronecker product; 1 where that is zero."""
        if layer not in self._curvatures:
            of_a, of_g = (
                self._solver.mean_eigenvalue(
                    self.data[layer, kind].to(self._exact), getattr(self._shapes[layer], kind)
                )
                for kind in "ag"
            )
            self._curvatures[layer] = _or_one(of_a * of_g)
        return self._curvatures[layer]

    def _ask_conditions(self) -> None:
        """The data have changed: start to copy the largest eigenvalues of this rank's layers."""
        self._shifts, self._curvatures = {}, {}
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
        largest = torch.stack(torch._foreach_max(values)).to(self._exact).view(2, -1).prod(0, keepdim=True)
        if self._config.relative_damping is not None:
            largest = largest / torch.stack([self._mean_curvature(layer) for layer in layers])
        self._asked, self._judged = copy_to_host(largest), layers
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

    def _rounds(self, layers: Sequence[int], damping: float) -> bool:
        """Whether these layers' products may round to TF32."""
        if self._config.product_precision is not None:
            return self._config.product_precision == "tf32"
        if not self._conditions:  # not known, or not yet
            return not self._solver.tells_condition
        return max(self._conditions[layer] for layer in layers) <= TF32_CONDITIONED * damping

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

    def _renew(self, job: FactorJob, factor: Tensor, damping: float, step: int, *, warm: bool) -> None:
        key = job.layer, job.kind
        means, data = self._means[job.layer].unbind(), self.data[key]
        split = self._solver.factor_damping(damping, *(means if job.kind == "a" else means[::-1]))
        if self._config.relative_damping is not None and self._solver.holds_damping:
            split = _relative(damping, factor.to(self._like.dtype))
        try:
            last = data if warm and key in self.solved else None
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


# ------------------------------------------------------------
# Second-order data on a device on which a launch is dear and a wait dearer: layers of one shape together.


_ELEMENTS = 1 << 25  # of factors decomposed in one call, 128 MiB of float32, or one factor if that is larger


class BatchedSecondOrder(SecondOrder):
    """Decomposes factors of one size in one call, and preconditions layers of one shape by batched products.

    A layer's group is divided where the data of its factors are not adjacent in the buffer, because
    different ranks have solved them.
    """

    _waits_a_step = True

    def _in_working_order(self, jobs: list[FactorJob], placement: Placement) -> list[FactorJob]:
        self._layer_groups = layer_groups(self._shapes, placement)
        self._known_runs: dict[int, list[tuple[int, ...]]] = {}  # by the first layer of a group
        self._whole_runs: dict[tuple[tuple[int, ...], int], Tensor] = {}
        return in_group_order(jobs, self._shapes, placement)

    def solve(
        self,
        factors: Factors,
        damping: float,
        step: int,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> dict[Key, UpdateCounts]:
        """As for single factors, but the host waits once, for what failed and for the counts of updates.

        What cuSOLVER does inside a decomposition is its own. Factors that failed are solved again one by one.
        """
        means = factors.batched
        assert means is not None  # noqa: S101  both are made for the same execution
        keys: list[Key] = []
        failed: list[Tensor] = []
        for together, shape, stack in _stacks(means):
            with timed(self._shapes[together[0][0]].name):
                failed.append(self._solve_together(together, shape, stack, damping))
            keys += together
        counted = list(means.updates)
        says = not self._solver.tells_condition and not self._said_unresolved
        stacks = list(_stacks(means)) if says else []
        unresolved = [self._unresolved(stack, damping) for _, _, stack in stacks]
        numbers = [*failed, means.counts.flatten(), *unresolved]
        status = iter(torch.cat([each.to(self._like.dtype) for each in numbers]).cpu().unbind())
        again = {key for key in keys if int(next(status))}
        taken, refused = ([int(next(status)) for _ in counted] for _ in range(2))
        for together, _, _ in stacks:
            for layer, _ in together:
                self._say_unresolved(bool(next(status)), layer)
        self.solved.update(key for key in keys if key not in again)
        for job in self.own if again else ():
            if (job.layer, job.kind) in again:
                self._renew(job, factors.running[job.layer, job.kind], damping, step, warm=False)
        return {key: UpdateCounts(*both) for key, *both in zip(counted, taken, refused, strict=True)}

    def precondition(
        self,
        layers: Iterable[int],
        gradients: Sequence[Tensor],
        damping: float,
        out: Sequence[Tensor],
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """The same for all layers of a run at once."""
        own = set(layers)
        self._read_conditions()
        for group in self._layer_groups:
            for run in self._runs(group) if group[0] in own else ():
                with timed(self._shapes[run[0]].name):
                    shift, noise = self._shift(run, damping), self._noise(run, damping)
                    if len(run) == 1:
                        views, source, target = self._viewed(run[0]), gradients[run[0]], out[run[0]]
                    else:
                        views = self._viewed_together(run)
                        source, target = self._joined(run, gradients), self._joined(run, out)
                    with tf32_products(target, allowed=self._rounds(run, damping)):
                        self._apply(views, source, shift, target, noise)

    def _solve_together(
        self, keys: Sequence[Key], shape: FactorShape, stack: Tensor, damping: float
    ) -> Tensor:
        """Solve factors `[factors, blocks, n, n]`; those that fail keep their data. Returns which do."""
        matrices = stack.flatten(0, 1).to(self._like.dtype)
        data = [self.data[key] for key in keys]
        last = None
        if self._warm and shape.blocks == 1 and all(key in self.solved for key in keys):
            last = torch.stack(data).to(matrices.dtype)
        try:
            with deferred_status(matrices) as statuses:
                split = self._split(keys, shape, damping, matrices)
                parts, failed = self._solver.solve_all(matrices, split, last)
        except LinAlgError:  # of which factor, only solving them one by one tells
            return stack.new_ones(len(keys), dtype=torch.bool)
        wide = torch.promote_types(self._buffer.dtype, torch.float32)  # a float16 sum overflows at 65,504
        solved = torch.cat([part.reshape(len(keys), -1) for part in parts], 1).to(self._buffer.dtype)
        fails = (solved.sum(1, dtype=wide).abs() < inf).logical_not_()
        if failed is not None:
            fails |= failed.view(len(keys), -1).any(1)
        for status in statuses:  # a library may stop at the first failure: nothing after it is trusted
            fails |= status.view(len(keys), -1).any(1).cumsum(0) > 0
        for run in adjacent_runs(data):
            place = _whole(data[run])
            torch.where(fails[run].unsqueeze(-1), place, solved[run], out=place)
        return fails

    def _split(
        self, keys: Sequence[Key], shape: FactorShape, damping: float, matrices: Tensor
    ) -> Tensor | float:
        """Damping of every matrix of these factors."""
        if self._config.relative_damping is not None and self._solver.holds_damping:
            own = _relative(damping, matrices.view(len(keys), shape.blocks, shape.dim, shape.dim))
            return own.expand(-1, shape.blocks).flatten()
        if not self._needs_traces:
            return self._solver.factor_damping(damping, self._means, self._means)
        own = torch.stack([self._means[layer, int(kind == "g")] for layer, kind in keys])
        other = torch.stack([self._means[layer, int(kind == "a")] for layer, kind in keys])
        split = torch.as_tensor(self._solver.factor_damping(damping, own, other))
        return split.unsqueeze(-1).expand(-1, shape.blocks).flatten()

    def _joined(self, run: tuple[int, ...], of_layers: Sequence[Tensor]) -> Tensor:
        """The gradients of a run as one view, made once: they lie in one buffer, always the same."""
        key = run, of_layers[run[0]].untyped_storage()._cdata  # the view keeps that alive
        if key not in self._whole_runs:
            self._whole_runs[key] = _whole([of_layers[layer] for layer in run])
        return self._whole_runs[key]

    def _runs(self, group: Sequence[int]) -> list[tuple[int, ...]]:
        """Layers of a group whose factors' data are both adjacent; alone where a layer has several blocks."""
        if group[0] not in self._known_runs:
            self._known_runs[group[0]] = self._runs_of(group)
        return self._known_runs[group[0]]

    def _runs_of(self, group: Sequence[int]) -> list[tuple[int, ...]]:
        shape = self._shapes[group[0]]
        if shape.a.blocks > 1 or shape.g.blocks > 1:
            return [(layer,) for layer in group]
        starts = {
            run.start for kind in "ag" for run in adjacent_runs([self.data[layer, kind] for layer in group])
        }
        ends = [*sorted(starts)[1:], len(group)]
        return [tuple(group[start:end]) for start, end in zip(sorted(starts), ends, strict=True)]

    def _viewed_together(self, run: tuple[int, ...]) -> Any:
        """The data of a run in the solver's form, with the layers as blocks."""
        views = self._views.get(run)
        if views is None or self._buffer.dtype != self._exact:
            one = self._shapes[run[0]]
            shape = LayerShape(one.name, FactorShape(one.a.dim, len(run)), FactorShape(one.g.dim, len(run)))
            a, g = (_whole([self.data[layer, kind] for layer in run]).to(self._exact) for kind in "ag")
            views = self._views[run] = self._solver.views(a, g, shape)
        return views


def _relative(damping: float, factor: Tensor) -> Tensor:
    """Root of the damping times the mean eigenvalue of each factor `[.., blocks, n, n]`, as `[.., 1]`.

    The product of those of A and G is the damping times the mean eigenvalue of their Kronecker product.
    """
    means = factor.diagonal(dim1=-2, dim2=-1).mean((-2, -1))
    return _or_one(means).unsqueeze(-1) * math.sqrt(damping)


def _or_one(mean: Tensor) -> Tensor:
    """What nothing has been seen of has no scale of its own."""
    return torch.where(mean > 0, mean, 1.0)


def _stacks(means: BatchedMeans) -> Iterator[tuple[list[Key], FactorShape, Tensor]]:
    """All factors of a shape, or, of large ones, as many as are decomposed at once."""
    for shape, stack in means.stacks.items():
        size = max(1, _ELEMENTS // shape.elements)
        for start in range(0, len(stack), size):
            yield means.keys[shape][start : start + size], shape, stack[start : start + size]


def _whole(tensors: Sequence[Tensor]) -> Tensor:
    """Adjacent tensors as one view."""
    whole = evenly_spaced(tensors)
    assert whole is not None  # noqa: S101  the caller's runs are adjacent
    return whole


# ------------------------------------------------------------
# Decompositions whose status is read later, together with others.
#
# torch's `eigh` gets a status from cuSOLVER or LAPACK, and reads it at once in an operator of its own,
# `_linalg_check_errors`: the host waits for the device in every call. While statuses are deferred,
# another kernel of that operator keeps them instead. It is registered for the time of the block, for one
# kind of device; calls of other threads are checked at once, as before.


_OPERATOR = "_linalg_check_errors"


@contextmanager
def deferred_status(like: Tensor) -> Iterator[list[Tensor]]:
    """A list that receives the status of each decomposition on the device of `like`, by matrix: 0 is success.

    LAPACK and MAGMA leave out the matrices of a call after one that fails: their results are undefined, and
    their status is 0.

    The list stays empty, and decompositions raise as always, under a torch that has no such operator.
    """
    statuses: list[Tensor] = []
    caller = threading.get_ident()

    def keep(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
        if threading.get_ident() == caller:
            statuses.append(info)
        elif info.any():
            raise LinAlgError(f"{api_name}: failed with status {info.flatten().tolist()}, {is_matrix=}")

    if not hasattr(torch.ops.aten, _OPERATOR):
        yield statuses
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(_OPERATOR, keep, like.device.type.upper())
        yield statuses
