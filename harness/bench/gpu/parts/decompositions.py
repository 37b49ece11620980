"""Decompositions by size, driver and grouping; the report says which constant each table decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.bench.gpu.setting import Setting, spread
from harness.workloads.models.vision import resnet50
from kfac_core import KFACConfig
from kfac_core.layers import find_layers
from kfac_core.solvers.eigen import iterated
from kfac_core.solvers.inverse import InverseSolver

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 3072, 4608)
_LIBRARIES = ("default", "cusolver", "magma")
_LARGEST_BATCH = 1 << 25  # elements: what `BatchedSecondOrder` decomposes at once
Group = tuple[int, Tensor]


def run(setting: Setting) -> None:
    """Single sizes first, then all factors of ResNet-50 in several groupings."""
    setting.findings.note(
        "`by_size` decides `second_order_batched._ELEMENTS` (how many factors go into one call), whether "
        "small factors would be faster on the CPU, and whether a library should be named with "
        "`torch.backends.cuda.preferred_linalg_library`"
    )
    setting.findings.note(
        "`whole_network` decides how BatchedSecondOrder.solve groups the factors, and the default of "
        "`eigen_start`"
    )
    for size in (8, 32) if setting.small else SIZES:
        for batch in (1, 4, 16):
            if batch == 1 or batch * size * size <= _LARGEST_BATCH:
                _by_size(setting, size, batch)
    _whole_network(setting)


def _by_size(setting: Setting, size: int, batch: int) -> None:
    factors = _factors(setting, size, batch)
    for library in _LIBRARIES if setting.on_gpu else _LIBRARIES[:1]:
        with _preferred(setting, library):
            _row(setting, size, batch, f"eigh, {library}", partial(torch.linalg.eigh, factors))
    inverse = partial(InverseSolver().solve_all, factors, 0.01, None)
    _row(setting, size, batch, "cholesky_ex and triangular solve", inverse)
    _row(setting, size, batch, "cholesky_inverse", partial(_cholesky_inverse, factors))
    values, vectors = torch.linalg.eigh(factors)
    _row(setting, size, batch, "orthogonal iteration", partial(iterated, factors, vectors, values))
    if setting.on_gpu:
        _row(setting, size, batch, "eigh on the CPU and back", partial(_on_cpu, factors))


def _row(setting: Setting, size: int, batch: int, way: str, work: Callable[[], object]) -> None:
    if not setting.has_time(f"{way}, {batch} of {size}"):
        return
    try:
        seconds = setting.seconds_of(work, least=2, most=10, seconds=0.5)
    except RuntimeError as error:  # a library that this build lacks
        setting.findings.row("by_size", size=size, batch=batch, way=way, failed=str(error).splitlines()[0])
        return
    found = spread(seconds)
    setting.findings.row(
        "by_size", size=size, batch=batch, way=way, **found, factor_seconds=found["seconds"] / batch
    )


def _whole_network(setting: Setting) -> None:
    """Every factor of ResNet-50, decomposed in several ways; all of them must be right."""
    sizes = Counter({8: 3, 12: 2, 20: 1}) if setting.small else factor_sizes(resnet50)
    groups = [(size, _factors(setting, size, count)) for size, count in sorted(sizes.items())]
    ways: dict[str, Callable[[], Sequence[tuple[Tensor, Tensor]]]] = {
        "one call a size": partial(_one_after_another, groups),
        "one call a factor": partial(
            _one_after_another, [(n, one.unsqueeze(0)) for n, each in groups for one in each]
        ),
        "padded to a few sizes": partial(_padded, groups),
    }
    for threads in (2, 4):
        ways[f"one call a size, {threads} threads with a stream each"] = partial(
            _threaded, setting, groups, threads
        )
    ways["each size on the CPU and back"] = partial(_all_on_cpu, groups)
    bases = [torch.linalg.eigh(each) for _, each in groups]
    ways["orthogonal iteration from the last basis"] = partial(_iterated, groups, bases)
    for way, work in ways.items():
        if not setting.has_time(f"the whole network, {way}", 0.0 if setting.small else 10.0):
            return
        seconds = setting.seconds_of(work, least=2, most=3, seconds=1.0)
        error = max(
            _error(each, *solved) for (_, each), solved in zip(_as_solved(way, groups), work(), strict=True)
        )
        setting.findings.row("whole_network", way=way, **spread(seconds), error=error)
        setting.findings.check(
            f"eigenvectors by {way} give the factors back", f"relative error {error:.1e}", passed=error < 1e-3
        )


def factor_sizes(build: Callable[[], nn.Module]) -> Counter[int]:
    """Number of factors of each size of a network."""
    with torch.device("meta"):
        shapes = [layer.shape for layer in find_layers(build(), KFACConfig.sc20())]
    return Counter(factor.dim for shape in shapes for factor in (shape.a, shape.g))


def _factors(setting: Setting, size: int, count: int) -> Tensor:
    """Running means of grams of random rows: `[count, n, n]`, positive definite."""
    rows = torch.randn(count, size + size // 2, size, device=setting.device)
    return 0.95 * torch.eye(size, device=setting.device) + 0.05 * (rows.mT @ rows) / rows.shape[1]


def _one_after_another(groups: Sequence[Group]) -> list[tuple[Tensor, Tensor]]:
    return [torch.linalg.eigh(each) for _, each in groups]


def _padded(groups: Sequence[Group]) -> list[tuple[Tensor, Tensor]]:
    """Sizes within a quarter of each other share a call: `[A 0; 0 c I]` has A's vectors, then unit vectors.

    `c` is above every eigenvalue of A (Gershgorin), so that its vectors come last.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    rest = sorted(range(len(groups)), key=lambda index: -groups[index][0])
    while rest:
        largest = groups[rest[0]][0]
        together = [index for index in rest if 4 * largest <= 5 * groups[index][0]]
        rest = rest[len(together) :]
        stack = torch.cat([_grown(groups[index][1], largest) for index in together])
        values, vectors = torch.linalg.eigh(stack)
        counts = [len(groups[index][1]) for index in together]
        parts = zip(together, values.split(counts), vectors.split(counts), strict=True)
        for index, own, basis in parts:
            n = groups[index][0]
            found[index] = own[:, :n], basis[:, :n, :n]
    return [found[index] for index in range(len(groups))]


def _grown(factors: Tensor, size: int) -> Tensor:
    count, n, _ = factors.shape
    grown = factors.new_zeros(count, size, size)
    grown[:, :n, :n] = factors
    bound = 2 * factors.abs().sum(-1).amax(-1, keepdim=True)
    grown.diagonal(dim1=-2, dim2=-1)[:, n:] = bound
    return grown


def _threaded(setting: Setting, groups: Sequence[Group], threads: int) -> list[tuple[Tensor, Tensor]]:
    """Torch releases the interpreter's lock in eigh, so that waits of several calls overlap."""
    setting.synchronize()

    def solve(each: Tensor) -> tuple[Tensor, Tensor]:
        if not setting.on_gpu:
            values, vectors = torch.linalg.eigh(each)
            return values, vectors
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            values, vectors = torch.linalg.eigh(each)
        stream.synchronize()
        return values, vectors

    with ThreadPoolExecutor(threads) as pool:
        largest_first = sorted(range(len(groups)), key=lambda index: -groups[index][1].numel())
        pending = {index: pool.submit(solve, groups[index][1]) for index in largest_first}
        return [pending[index].result() for index in range(len(groups))]


def _all_on_cpu(groups: Sequence[Group]) -> list[tuple[Tensor, Tensor]]:
    return [_on_cpu(each) for _, each in groups]


def _iterated(groups: Sequence[Group], bases: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    return [
        iterated(each, vectors, values) for (_, each), (values, vectors) in zip(groups, bases, strict=True)
    ]


def _as_solved(way: str, groups: Sequence[Group]) -> Sequence[Group]:
    """The factors in the order and grouping of a way's results."""
    if way != "one call a factor":
        return groups
    return [(n, one.unsqueeze(0)) for n, each in groups for one in each]


def _error(factors: Tensor, values: Tensor, vectors: Tensor) -> float:
    """Of the factors put together again from eigenvalues and eigenvectors, relative, of norms."""
    again = (vectors * values.unsqueeze(-2)) @ vectors.mT
    return float((again - factors).norm() / factors.norm())


def _cholesky_inverse(factors: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(factors)[0])


def _on_cpu(factors: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(factors.cpu())
    return values.to(factors.device), vectors.to(factors.device)


@contextmanager
def _preferred(setting: Setting, library: str) -> Iterator[None]:
    if not setting.on_gpu:
        yield
        return
    before = torch.backends.cuda.preferred_linalg_library()
    torch.backends.cuda.preferred_linalg_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_linalg_library(before)
