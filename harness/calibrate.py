"""Measures a machine: matrix products, factors, decompositions, memory and collectives."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from harness.training.world.single_copy import find_readable_peers
from kfac_core import KFACConfig
from kfac_core.collectives import Communicator, connect
from kfac_core.config import Costs
from kfac_core.kernels.grams import dense
from kfac_core.layers import find_layers
from kfac_core.placement import FactorShape
from kfac_core.placement.footprint import data_elements
from kfac_core.solvers import solver_of

Point = tuple[float, float]
"""Size and seconds."""

# (channels in, channels out, kernel, image): the papers' layers, from narrow to wide
_CONVOLUTIONS = (
    (3, 16, 3, 32), (16, 16, 3, 32), (32, 64, 3, 16), (64, 64, 3, 8), (256, 64, 1, 14), (256, 256, 3, 14),
)  # fmt: skip
_LINKS_TIMEOUT_SECONDS = 600
_LARGE = 4096  # the widest factor that is measured on a GPU; ResNet's widest is 4,608


def timed(action: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of `action`, after one run that is not counted."""
    action()
    return median([timed_once(action, device) for _ in range(repeats)])


def timed_once(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run."""
    _synchronize(device)
    began = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - began


def gemm_points(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Point]:
    """Square products: FLOPs and seconds."""
    found = []
    for n in _dims(device):
        a, b = torch.randn(2, n, n, device=device, dtype=dtype)
        found.append((2.0 * n**3, timed(lambda a=a, b=b: a @ b, device)))  # type: ignore[misc]
    return _monotonic(found)


def decomposition_points(device: torch.device, solver: str) -> list[Point]:
    """The decomposition of one factor by the solver that runs use: dimension and seconds."""
    config = KFACConfig(solver=solver)
    implementation, found = solver_of(config), []
    for n in _dims(device):
        rows = torch.randn(2 * n, n, device=device)
        factor = (rows.mT @ rows / len(rows)).unsqueeze(0)
        out = factor.new_empty(data_elements(config, FactorShape(n)))
        solve = partial(implementation.solve, factor, 0.01, out)
        found.append((float(n), timed(solve, device, 3)))
    return _monotonic(found)


def costs(inverse: Sequence[Point]) -> Costs:
    """Costs for load balancing (`KFACConfig.costs`), from points of a solver."""
    return Costs(inverse_seconds=tuple((int(n), float(f"{seconds:.3g}")) for n, seconds in inverse))


def factor_points(device: torch.device, batch_size: int = 8) -> list[Point]:
    """Grams of both factors by the layers that runs use: FLOPs of the plain formula and seconds."""
    found = []
    for inputs, outputs, kernel, size in _CONVOLUTIONS:
        module = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, device=device)
        [layer] = find_layers(nn.Sequential(module), KFACConfig())
        x = torch.randn(batch_size, inputs, size, size, device=device)
        g = torch.randn(batch_size, outputs, size, size, device=device)
        rows = batch_size * size**2
        for gram, value, dim in ((layer.input_gram, x, layer.shape.a.dim), (layer.output_gram, g, outputs)):
            seconds = timed(lambda gram=gram, value=value: dense(gram(value)), device)  # type: ignore[misc]
            found.append((2.0 * rows * dim**2, seconds))
    return _monotonic(found)


def training_points(device: torch.device, batch_size: int = 8) -> list[Point]:
    """One layer's forward and backward pass: FLOPs, three times the forward pass's, and seconds."""
    found = []
    for inputs, outputs, kernel, size in _CONVOLUTIONS:
        module = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, device=device)
        x = torch.randn(batch_size, inputs, size, size, device=device, requires_grad=True)

        def step(module: nn.Module = module, x: torch.Tensor = x) -> None:
            functional.relu(module(x)).sum().backward()

        flops = 2 * batch_size * size**2 * outputs * inputs * kernel**2
        found.append((3.0 * flops, timed(step, device)))
    return _monotonic(found)


def memory_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy that is too large for the caches."""
    source = torch.randn(2**24, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / timed(lambda: target.copy_(source), device)


def operations(
    communicator: Communicator, sizes: Sequence[int], device: torch.device, repeats: int = 5
) -> Iterator[tuple[str, int, float]]:
    """The communicator's operations on buffers of `sizes` bytes in equal parts: (operation, bytes, seconds).

    Every rank must iterate over all of them. Seconds are those of the slowest rank, the median over repeats.
    """
    world = tuple(range(communicator.world_size))
    for size in sizes:
        share = max(1, size // 4 // len(world))
        buffer = torch.zeros(share * len(world), device=device)
        parts = [share] * len(world)
        for name, action in (
            ("all_reduce", lambda b=buffer: communicator.all_reduce(b)),
            ("reduce_parts", lambda b=buffer, p=parts: communicator.reduce_parts(b, p)()),
            ("gather_parts", lambda b=buffer, p=parts: communicator.gather_parts(b, p, world)),
        ):
            found: list[float] = []
            for index in range(repeats + 1):
                communicator.all_reduce(torch.zeros(1, device=device))  # start together
                seconds = timed_once(action, device)
                slowest = torch.zeros(len(world), dtype=torch.float64, device=device)
                slowest[communicator.rank] = seconds
                communicator.all_reduce(slowest)
                if index:
                    found.append(float(slowest.max()))
            yield name, buffer.numel() * 4, median(found)


def _dims(device: torch.device) -> list[int]:
    dims = [16, 32, 64, 128, 256, 512, 1024, 2048, _LARGE]
    return dims if device.type == "cuda" else dims[:7]  # a minute, not an hour, on a CPU


def _monotonic(points: list[Point]) -> list[Point]:
    """Sorted by size, one point per size, with seconds that never decrease."""
    found: list[Point] = []
    for size, seconds in sorted(points):
        if not found or size > found[-1][0]:
            found.append((size, max(seconds, found[-1][1]) if found else seconds))
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_links(
    world_sizes: Sequence[int], sizes: Sequence[int], *, single_copy: bool
) -> list[tuple[str, int, int, float]]:
    """Operations in worlds of processes on this host: (operation, world size, bytes, seconds).

    With `single_copy` ranks read each other's memory, if they can; else traffic goes through the network
    stack, as between hosts.
    """
    found: list[tuple[str, int, int, float]] = []
    for world_size in world_sizes:
        context = mp.get_context("spawn")
        results = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, str(Path(folder) / "store"), tuple(sizes), single_copy, results)
            ranks = spawn(_measure_operations, arguments, nprocs=world_size, join=False)
            rows = results.get(timeout=_LINKS_TIMEOUT_SECONDS)
            while not ranks.join():
                pass
        found += [(operation, world_size, size, seconds) for operation, size, seconds in rows]
    return found


def _measure_operations(
    rank: int, world_size: int, store: str, sizes: tuple[int, ...], single_copy: bool, results: Any
) -> None:
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    file_store = FileStore(store, world_size)
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=file_store, rank=rank, world_size=world_size)
    rows = list(operations(connect(find_peers=find_readable_peers if single_copy else None), sizes, device))
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()
