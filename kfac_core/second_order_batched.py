"""Second-order data on a device on which a launch is dear and a wait dearer: layers of one shape together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import Any

import torch
from torch import Tensor

from kfac_core.batched_means import BatchedMeans, Key
from kfac_core.factors import Factors
from kfac_core.gradients.together import adjacent_runs, evenly_spaced
from kfac_core.placement import FactorJob, FactorShape, LayerShape, Placement
from kfac_core.placement.groups import in_group_order, layer_groups
from kfac_core.second_order import SecondOrder, UpdateCounts
from kfac_core.solvers.deferred_status import deferred_status
from kfac_core.solvers.solver import LinAlgError

_ELEMENTS = 1 << 25  # of factors decomposed in one call, 128 MiB of float32, or one factor if that is larger


class BatchedSecondOrder(SecondOrder):
    """Decomposes factors of one size in one call, and preconditions layers of one shape by batched products.

    A layer's group is divided where the data of its factors are not adjacent in the buffer, because
    different ranks have solved them.
    """

    _waits_a_step = True

    def _in_working_order(self, jobs: list[FactorJob], placement: Placement) -> list[FactorJob]:
        self._layer_groups = layer_groups(self._shapes, placement)
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
                self._renew(job, factors.running[job.layer, job.kind], damping, step)
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
        shift = self._shift(damping)
        own = set(layers)
        self._read_conditions()
        for group in self._layer_groups:
            for run in self._runs(group) if group[0] in own else ():
                with timed(self._shapes[run[0]].name):
                    noise = self._noise(run, damping)
                    if len(run) == 1:
                        self._apply(self._viewed(run[0]), gradients[run[0]], shift, out[run[0]], noise)
                        continue
                    sources, targets = (_whole([each[layer] for layer in run]) for each in (gradients, out))
                    self._apply(self._viewed_together(run), sources, shift, targets, noise)

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
                parts, failed = self._solver.solve_all(matrices, self._split(keys, shape, damping), last)
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

    def _split(self, keys: Sequence[Key], shape: FactorShape, damping: float) -> Tensor | float:
        """Damping of every matrix of these factors."""
        if not self._solver.needs_traces:
            return self._solver.factor_damping(damping, self._means, self._means)
        own = torch.stack([self._means[layer, int(kind == "g")] for layer, kind in keys])
        other = torch.stack([self._means[layer, int(kind == "a")] for layer, kind in keys])
        split = torch.as_tensor(self._solver.factor_damping(damping, own, other))
        return split.unsqueeze(-1).expand(-1, shape.blocks).flatten()

    def _runs(self, group: Sequence[int]) -> list[tuple[int, ...]]:
        """Layers of a group whose factors' data are both adjacent; alone where a layer has several blocks."""
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
