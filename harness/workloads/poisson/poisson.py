"""The Poisson equation on a unit cube: -laplace(u) = f inside, u given on the boundary (a PINN).

The network's value, gradient and Laplacian are propagated together: each linear layer is applied to d + 2
rows a point, and K-FAC sees them as the positions of a sequence. The loss is a sum of squares, so that the
Gauss-Newton matrix is exact: K-FAC's statistics come from the derivatives of the residuals themselves.

Source: Dangel, Mueller, Zeinhofer 2024, "Kronecker-factored approximate curvature for physics-informed neural
networks", arXiv:2405.15603; Li et al. 2023, arXiv:2307.08214 (the forward Laplacian).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from harness.workloads.poisson import EPOCH_STEPS, NETWORKS
from harness.workloads.workload import Share

HELD_OUT, HELD_OUT_SEED = 9_000, 1


class Points(NamedTuple):
    """A step's points of this rank: inside `[n, d]` and on the boundary `[m, d]`."""

    inside: Tensor
    boundary: Tensor


class ForwardLaplacian(nn.Module):
    """A tanh network that gives value, gradient and Laplacian with respect to its input."""

    def __init__(self, dimensions: int, widths: Sequence[int]) -> None:
        super().__init__()
        sizes = [dimensions, *widths, 1]
        self.layers = nn.ModuleList()
        for before, after in pairwise(sizes):
            usual = nn.Linear(before, after, dtype=torch.float64)
            layer = nn.Linear(before + 1, after, bias=False, dtype=torch.float64)
            with torch.no_grad():  # the bias is the weight of a one, which the derivatives' rows do not have
                layer.weight.copy_(torch.cat([usual.weight, usual.bias[:, None]], 1))
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, d + 2]` of points `[N, d]`: u, its d derivatives, its Laplacian."""
        count, d = x.shape
        rows = x.new_zeros(count, d + 2, d + 1)
        rows[:, 0, :d], rows[:, 0, d] = x, 1.0
        rows[:, 1 : d + 1, :d] = torch.eye(d, dtype=x.dtype, device=x.device)
        one = x.new_zeros(count, d + 2, 1)
        one[:, 0] = 1.0
        *hidden, last = self.layers
        for layer in hidden:
            rows = torch.cat([_tanh(layer(rows)), one], 2)
        out: Tensor = last(rows).squeeze(-1)
        return out


def _tanh(rows: Tensor) -> Tensor:
    """Value, derivatives and Laplacian of tanh of a value with these."""
    value, gradient, laplacian = rows[:, 0], rows[:, 1:-1], rows[:, -1]
    t = value.tanh()
    first = 1 - t * t
    second = -2 * t * first
    curved = first * laplacian + second * gradient.square().sum(1)
    return torch.cat([t[:, None], first[:, None] * gradient, curved[:, None]], 1)


class Poisson:
    """Fixed points, drawn from the run's seed; the error is measured at others."""

    pooled_metrics = ("l2_error",)
    steps_per_epoch = EPOCH_STEPS

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        self._share = share
        self._dimensions, self._widths = int(options["dimensions"]), NETWORKS[str(options["network"])]
        generator = torch.Generator().manual_seed(share.seed)
        inside, boundary = (self._drawn(int(options[name]), generator) for name in ("inside", "boundary"))
        sides = torch.randint(self._dimensions, (len(boundary),), generator=generator)
        ends = torch.randint(2, (len(boundary),), generator=generator).double()
        boundary[torch.arange(len(boundary)), sides] = ends
        own = slice(share.rank, None, share.world_size)
        self._points = Points(inside[own].to(share.device), boundary[own].to(share.device))
        held_out = self._drawn(HELD_OUT, torch.Generator().manual_seed(HELD_OUT_SEED))
        self._held_out = held_out[own].to(share.device)
        self._errors = (0.0, 0.0)

    def _drawn(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.rand(count, self._dimensions, generator=generator, dtype=torch.float64)

    def model(self) -> nn.Module:
        """A tanh network in float64."""
        return ForwardLaplacian(self._dimensions, self._widths).to(self._share.device)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Points]:
        """All points, every step."""
        for _ in range(first_step, EPOCH_STEPS):
            yield self._points

    def residuals(self, model: nn.Module, batch: Points) -> Tensor:
        """`[n + m]`: of the equation inside and of the value on the boundary, over the roots of n and m."""
        inside, boundary = batch
        out = model(torch.cat([inside, boundary]))
        of_equation = out[: len(inside), -1] + self._source(inside)
        of_value = out[len(inside) :, 0] - self._solution(boundary)
        return torch.cat([of_equation / math.sqrt(len(inside)), of_value / math.sqrt(len(boundary))])

    def loss(self, model: nn.Module, batch: Points) -> Tensor:
        """Half the mean square inside plus half the mean square on the boundary."""
        return 0.5 * self.residuals(model, batch).square().sum()

    def loss_terms(self, batch: Points) -> float:
        """Points inside."""
        return len(batch.inside)

    def evaluate(self, model: nn.Module) -> tuple[Mapping[str, float], int]:
        """Nothing that is a mean over points: see `score`."""
        x = self._held_out
        solution = self._solution(x)
        error = model(x)[:, 0] - solution
        self._errors = float(error.square().sum()), float(solution.square().sum())
        return {}, len(x)

    def findings(self) -> bytes:
        """The squared error and the squared solution, summed over this rank's points."""
        return np.array(self._errors).tobytes()

    def score(self, findings: Sequence[bytes]) -> Mapping[str, float]:
        """The relative L2 error."""
        error, solution = np.array([np.frombuffer(each) for each in findings]).sum(0)
        return {"l2_error": math.sqrt(error / solution)}

    def _solution(self, x: Tensor) -> Tensor:
        if self._dimensions == 2:
            return torch.sin(math.pi * x).prod(1)
        return torch.cos(math.pi * x).sum(1)

    def _source(self, x: Tensor) -> Tensor:
        factor = 2 if self._dimensions == 2 else 1  # minus the Laplacian, over pi^2 u
        return factor * math.pi**2 * self._solution(x)


def build(options: Mapping[str, Any], share: Share) -> Poisson:
    """The workload as the rank of `share` sees it."""
    return Poisson(options, share)
