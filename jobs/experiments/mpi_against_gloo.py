"""K-FAC's exchanges over Gloo, by single copies and over MPI, side by side on this machine's CPUs.

    python jobs/experiments/mpi_against_gloo.py results/mpi_against_gloo --ranks 2 4

Each world is started `RUNS` times with the `mpiexec` beside this Python; its ranks connect through MPI and
Gloo. A run times every exchange in all three ways, in random order, on the slowest rank. The figure of a run
is its median; the table has the median of the runs with their range. Exchanges have the sizes and parts of
the placement, in float32.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from analysis.cost_model.models import read_model
from harness.training.world.single_copy import find_readable_peers
from kfac_core import KFACConfig
from kfac_core.collectives import Communicator, connect
from kfac_core.collectives.mpi import MPICommunicator, library_name
from kfac_core.placement import LayerShape
from kfac_core.placement.footprint import data_elements
from kfac_core.placement.strategies import place

RUNS = 3
RAW_BYTES = (4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20)
FLOAT_BYTES = 4
WAYS = {"gloo": "Gloo", "near": "single copy", "mpi": "MPI"}
COLUMNS = (
    "ranks", "model", "exchange", "bytes", "runs", "pairs_a_run",
    *(f"{way}_{what}" for way in WAYS for what in ("seconds", "low", "high")),
    *(f"gloo_over_{way}{what}" for way in ("near", "mpi") for what in ("", "_low", "_high")),
)  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """An exchange to time.

    Attributes:
        move: makes it over a communicator, on a buffer of `elements`.
    """

    model: str
    name: str
    elements: int
    move: Callable[[Communicator, torch.Tensor], None]

    @property
    def pairs(self) -> int:
        """Number of repetitions: fewer for larger buffers."""
        return 41 if self.elements < 1 << 16 else 15 if self.elements < 1 << 23 else 3


def exchanges(ranks: int) -> Iterator[Exchange]:
    """Raw collectives by size, then the exchanges of K-FAC and of data parallelism."""
    everyone = tuple(range(ranks))
    for size in RAW_BYTES:
        elements = max(size // FLOAT_BYTES, 1)
        parts = [elements // ranks] * (ranks - 1)
        parts.append(elements - sum(parts))
        yield Exchange("", "all_reduce", elements, lambda over, buffer: over.all_reduce(buffer))
        yield Exchange("", "reduce_parts", elements, lambda o, b, s=parts: o.reduce_parts(b, s)())
        yield Exchange("", "gather_parts", elements, lambda o, b, s=parts: o.gather_parts(b, s, everyone))
        yield Exchange("", "broadcast", elements, lambda over, buffer: over.broadcast(buffer, 0))
    yield from _phases("ResNet-32", read_model("resnet32").shapes, ranks)
    yield from _phases("ResNet-50", read_model("resnet50").shapes, ranks)


def _phases(model: str, shapes: list[LayerShape], ranks: int) -> Iterator[Exchange]:
    everyone = tuple(range(ranks))
    jobs = place(KFACConfig(strategy="comm_opt"), shapes, ranks).factor_jobs(shapes)
    factors, second_order, gradients = [0] * ranks, [0] * ranks, [0] * ranks
    for job in jobs:
        factors[job.inverse_workers[0]] += job.shape.packed_elements + 2
        second_order[job.inverse_workers[0]] += data_elements(KFACConfig(), job.shape)
    alone = place(KFACConfig(strategy="mem_opt"), shapes, ranks)
    for shape in shapes:
        gradients[alone.layers[shape.name].gradient_workers[0]] += shape.gradient_elements

    def reduce(over: Communicator, buffer: torch.Tensor) -> None:
        over.reduce_parts(buffer, factors)()

    def share(parts: list[int]) -> Callable[[Communicator, torch.Tensor], None]:
        return lambda over, buffer: over.gather_parts(buffer, parts, everyone)

    yield Exchange(model, "gradients, averaged", sum(gradients), lambda over, b: over.all_reduce(b))
    yield Exchange(model, "factors to their owners (comm_opt)", sum(factors), reduce)
    yield Exchange(model, "second-order data to all (comm_opt)", sum(second_order), share(second_order))
    yield Exchange(model, "preconditioned gradients (mem_opt)", sum(gradients), share(gradients))


def time_world(folder: str) -> None:
    """One run, on every rank of an MPI world; rank 0 saves the seconds of each pair."""
    torch.set_num_threads(1)
    mpi = MPICommunicator()
    store = dist.FileStore(f"{folder}/store", mpi.world_size)
    dist.init_process_group("gloo", store=store, rank=mpi.rank, world_size=mpi.world_size)
    over: dict[str, Communicator] = {
        "gloo": connect(),
        "near": connect(find_peers=find_readable_peers),
        "mpi": mpi,
    }
    if len(over["near"].readable_peers) < mpi.world_size - 1:
        raise SystemExit("these ranks may not read each other's memory: there is nothing to compare")
    order = random.Random(Path(folder).name)  # noqa: S311  the same on every rank, no secret
    found = []
    for exchange in exchanges(mpi.world_size):
        buffer = torch.ones(exchange.elements)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for pair in range(exchange.pairs + 1):
            for backend in order.sample(sorted(over), len(over)):
                # Each has its own barriers: MPI's busy wait would take the cores from Gloo's threads.
                over[backend].all_reduce(torch.zeros(1))
                began = time.perf_counter()
                exchange.move(over[backend], buffer)
                took = torch.zeros(mpi.world_size, dtype=torch.float64)
                took[mpi.rank] = time.perf_counter() - began
                over[backend].all_reduce(took)
                if pair:  # the first warms up connections and memory
                    seconds[backend].append(float(took.max()))
            buffer.fill_(1.0)  # sums of sums would overflow
        found.append(seconds)
    if mpi.rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps({"library": library_name(), "seconds": found}))


def main() -> None:
    """Start the worlds and write the table as CSV and as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path, help="path of the table without its suffix")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--rank-of", metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        time_world(given.rank_of)
        return
    rows, library = _kept(given.table, given.ranks), ""
    for ranks in given.ranks:
        runs = [_run(ranks) for _ in range(given.runs)]
        library = runs[0]["library"]
        for index, exchange in enumerate(exchanges(ranks)):
            rows.append(_row(ranks, exchange, [run["seconds"][index] for run in runs]))
    _write(given.table, sorted(rows, key=lambda row: int(row["ranks"])), library)


def _kept(table: Path, ranks: list[int]) -> list[dict[str, Any]]:
    """Rows of the existing table for other world sizes."""
    if not table.with_suffix(".csv").exists():
        return []
    with table.with_suffix(".csv").open() as file:
        return [row for row in csv.DictReader(file) if int(row["ranks"]) not in ranks]


def _run(ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "unused", "--rank-of", folder]
        mpiexec = Path(sys.executable).with_name("mpiexec")
        subprocess.run([mpiexec, "-n", str(ranks), *command], check=True)
        run: dict[str, Any] = json.loads(Path(folder, "seconds.json").read_text())
    return run


def _row(ranks: int, exchange: Exchange, runs: list[dict[str, list[float]]]) -> dict[str, Any]:
    medians = {way: [statistics.median(run[way]) for run in runs] for way in WAYS}
    row: dict[str, Any] = {
        "ranks": ranks, "model": exchange.model, "exchange": exchange.name,
        "bytes": exchange.elements * FLOAT_BYTES, "runs": len(runs), "pairs_a_run": exchange.pairs,
    }  # fmt: skip
    for backend, values in medians.items():
        row[f"{backend}_seconds"] = f"{statistics.median(values):.3g}"
        row[f"{backend}_low"], row[f"{backend}_high"] = f"{min(values):.3g}", f"{max(values):.3g}"
    for way in ("near", "mpi"):
        ratios = [
            statistics.median(gloo / other for gloo, other in zip(run["gloo"], run[way], strict=True))
            for run in runs
        ]
        row[f"gloo_over_{way}"] = f"{statistics.median(ratios):.3g}"
        row[f"gloo_over_{way}_low"], row[f"gloo_over_{way}_high"] = f"{min(ratios):.3g}", f"{max(ratios):.3g}"
    return row


def _write(table: Path, rows: list[dict[str, Any]], library: str) -> None:
    with table.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        "# Gloo, single copies and MPI on CPU ranks of one host",
        "",
        f"`python {' '.join(sys.argv)}` on {_machine()}; torch {torch.__version__},",
        f"{library}, one host, one thread a rank. Milliseconds of the slowest rank: median of the runs'",
        "medians, with the range of the runs. The ratios are those of pairs, Gloo's time over the other's:",
        "above 1, the other is faster. Bytes are those of the whole buffer. Gloo's exchanges are those of",
        "`TorchCommunicator` between hosts: parts straight from rank to rank, all in flight at once. Single",
        "copies are what it does inside of one: ranks read each other's memory, but for broadcasts.",
        "More ranks than CPUs share them. Written by the program named above.",
        "",
    ]
    heads = ["ranks", "exchange", "bytes", *(f"{name}, ms" for name in WAYS.values())]
    heads += [f"Gloo / {WAYS[way]}" for way in ("near", "mpi")]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        name = f"{row['model']}: {row['exchange']}" if row["model"] else f"`{row['exchange']}`"
        cells = [row["ranks"], name, f"{int(row['bytes']):,}", *(_spread(row, way) for way in WAYS)]
        ratios = ("gloo_over_near", "gloo_over_mpi")
        cells += [f"{row[name]} ({row[f'{name}_low']} to {row[f'{name}_high']})" for name in ratios]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    table.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _spread(row: dict[str, Any], backend: str) -> str:
    middle, low, high = (float(row[f"{backend}_{name}"]) * 1e3 for name in ("seconds", "low", "high"))
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _machine() -> str:
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return f"{len(models)} CPUs, {models[0].split(': ', 1)[1] if models else platform.processor()}"


if __name__ == "__main__":
    main()
