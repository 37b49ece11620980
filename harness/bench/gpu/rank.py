"""One of two ranks of the part `ranks`; `harness.bench.start` starts them."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from harness.bench.gpu.parts.exactness import Gradients, error_of, trained
from harness.bench.rank import Rank
from kfac_core.collectives import connect
from kfac_core.config import STRATEGIES, Execution

_REDUCED_BYTES = (1 << 12, 1 << 20, 1 << 26)


def compared(rank: int, ranks: int, device: torch.device, config: dict[str, Any]) -> dict[str, Any]:
    """Train on the device, batched, and on the CPU one by one, both in this world.

    Returns:
        `error`: of the device's gradients; `apart`: the largest relative difference between two ranks'.
    """
    want, got = (
        trained("conv", torch.float64, where, config, execution=how, rank=rank, ranks=ranks)
        for where, how in ((torch.device("cpu"), Execution.SEQUENTIAL), (device, Execution.BATCHED))
    )
    return {"error": error_of(got, want), "apart": _apart(got)}


def _apart(got: Gradients) -> float:
    flat = torch.cat([gradients.flatten() for gradients in got.values()])
    highest, lowest = flat.clone(), flat.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return float((highest - lowest).norm() / flat.norm())


def _reduce_seconds(device: torch.device, size: int) -> float:
    """The least of ten all-reduces."""
    buffer, communicator = torch.zeros(size // 4, device=device), connect()
    found = []
    for _ in range(11):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        communicator.all_reduce(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def main() -> None:
    """Every strategy with two solvers, and all-reduces of three sizes."""
    rank = Rank.join(__doc__)
    ranks, device = rank.options["ranks"], torch.device("cpu")
    if rank.options["device"] == "cuda":
        device = torch.device("cuda", rank.number % torch.cuda.device_count())
        torch.cuda.set_device(device)
    cases = {}
    for strategy in STRATEGIES:
        fraction = {"grad_worker_fraction": 0.5} if strategy == "hybrid_opt" else {}
        for solver in ("eigen",) if rank.options["small"] else ("eigen", "inverse_pi"):
            options = {"strategy": strategy, "solver": solver, **fraction}
            cases[f"{strategy}, {solver}"] = compared(rank.number, ranks, device, options)
    cases["comm_opt, overlap_factors"] = compared(rank.number, ranks, device, {"overlap_factors": True})
    reduced = {size: _reduce_seconds(device, size) for size in _REDUCED_BYTES}
    rank.finish({"cases": cases, "reduce_seconds": reduced})


if __name__ == "__main__":
    main()
