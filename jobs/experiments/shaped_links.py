"""Measure K-FAC steps on 1, 2 and 4 ranks whose links, not CPUs, are the limit.

    python jobs/experiments/shaped_links.py results/prediction   (as root, nothing else running)

Every rank gets its own network namespace on a bridge, with a token bucket of `RATE_MBIT` in each direction of
its link. The ranks run real K-FAC steps of a perceptron over Gloo; 2 ranks also time the operations of the
communicator. The perceptron is small and wide: a step sends megabytes and computes for milliseconds, so two
cores carry four ranks without becoming the limit. The table reports the share of compute.
Writes `shaped_links_steps.csv` and `shaped_links_operations.csv`, which `shaped_links_prediction.py` reads.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from analysis.cost_model.models import read_model
from harness.calibrate import operations
from harness.emulate import ParallelLayers
from harness.training.gradient_averaging import FlatAverage
from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.collectives import connect
from kfac_core.timing.timer import PhaseTimer

WORLDS, HELD_OUT = (1, 2, 4), 4
RATE_MBIT, BURST, DELAY = 50, "32kb", "1000ms"
BATCH, WINDOW, WINDOWS, MODEL = 16, 4, 3, "perceptron"
SIZES = (2**18, 2**20, 2**22)
BRIDGE, NETWORK = "ksbr", "10.213.7"
ARMS: dict[str, dict[str, Any] | None] = {
    "sgd": None,
    "comm_opt": {"strategy": "comm_opt"},
    "mem_opt": {"strategy": "mem_opt"},
    "hybrid_opt": {"strategy": "hybrid_opt"},
    "dp_kfac": {"strategy": "dp_kfac"},
    "d_kfac": {"strategy": "d_kfac"},
}


def config_of(arm: str, world_size: int) -> KFACConfig | None:
    """The arm's K-FAC; a window of four steps holds two factor updates and one of the inverses."""
    options = ARMS[arm]
    if options is None:
        return None
    fraction = max(0.5, 1 / world_size) if arm == "hybrid_opt" else None
    return KFACConfig(
        **options, grad_worker_fraction=fraction, solver="inverse", factor_update_steps=2,
        inverse_update_steps=WINDOW, damping=0.01,
    )  # fmt: skip


def measure(folder: Path) -> None:
    """Measure all world sizes, one after another."""
    steps: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    for world_size in WORLDS:
        with namespaces(world_size) as names, tempfile.TemporaryDirectory() as results:
            program = [sys.executable, __file__, "rank"]
            ranks = [
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *program, str(rank), str(world_size), results],
                    env={  # everything over the links, although all ranks share one host
                        **os.environ,
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "OMP_NUM_THREADS": "1",
                    },
                )
                for rank, name in enumerate(names)
            ]
            codes = [rank.wait(600) for rank in ranks]
            if any(codes):
                raise SystemExit(f"{world_size} ranks ended with {codes}")
            for path in sorted(Path(results).glob("rank-*.json")):
                found = json.loads(path.read_text())
                steps += found["steps"]
                links += found["operations"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("steps", steps), ("operations", links)):
        with (folder / f"shaped_links_{name}.csv").open("w", newline="") as lines:
            writer = csv.DictWriter(lines, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


@contextmanager
def namespaces(count: int, rate_mbit: int = RATE_MBIT) -> Iterator[list[str]]:
    """`count` namespaces on one bridge, each link shaped in both directions; always removed at the end."""
    bucket = ["root", "tbf", "rate", f"{rate_mbit}mbit", "burst", BURST, "latency", DELAY]
    names = [f"ks{os.getpid()}r{index}" for index in range(count)]
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("link", "set", BRIDGE, "up")
        for index, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("link", "add", f"ksv{index}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"ksv{index}", "master", BRIDGE, "up")
            inside = ["ip", "-n", name]
            for command in (
                [*inside, "addr", "add", f"{NETWORK}.{index + 1}/24", "dev", "eth0"],
                [*inside, "link", "set", "eth0", "up"],
                [*inside, "link", "set", "lo", "up"],
                ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *bucket],
                ["tc", "qdisc", "add", "dev", f"ksv{index}", *bucket],
            ):
                subprocess.run(command, check=True)
        yield names
    finally:
        for index, name in enumerate(names):  # a link outlives its namespace for a while
            subprocess.run(["ip", "link", "del", f"ksv{index}"], check=False)
            subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def serve(rank: int, world_size: int, folder: Path) -> None:
    """One rank: every arm, then the operations on two ranks; writes the numbers as JSON."""
    torch.set_num_threads(1)
    if world_size > 1:
        store = dist.TCPStore(f"{NETWORK}.1", 29400, world_size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    steps = [row for arm in ARMS for row in _run(arm, rank, world_size)]
    links: list[dict[str, Any]] = []
    if world_size == 2:
        rows = operations(connect(), SIZES, torch.device("cpu"), repeats=3)
        links = [
            {"operation": o, "world_size": world_size, "total_bytes": b, "seconds": s} for o, b, s in rows
        ]
    answer = {"steps": steps, "operations": links if rank == 0 else []}
    (folder / f"rank-{rank}.json").write_text(json.dumps(answer))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _run(arm: str, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
    """Windows of one arm; the first is left out."""
    torch.manual_seed(0)
    table = read_model(MODEL)
    model = torch.nn.Sequential(*ParallelLayers(table.layers, 0, BATCH).layers)
    communicator = connect()
    timer = PhaseTimer(traffic=communicator.traffic)
    gradients = FlatAverage(model, communicator)
    config = config_of(arm, world_size)
    kfac = KFAC(model, config, lr=1e-3, timer=timer, communicator=communicator) if config else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    torch.manual_seed(rank)
    x, y = torch.randn(BATCH, table.layers[0].inputs), torch.randint(10, (BATCH,))
    for window in range(WINDOWS + 1):
        communicator.all_reduce(torch.zeros(1))  # start together
        timer.start()
        for _ in range(WINDOW):
            with timer.phase(Phase.FORWARD):
                loss = functional.cross_entropy(model(x), y)
            with timer.phase(Phase.BACKWARD):
                gradients.clear()
                loss.backward()
            with timer.phase(Phase.GRADIENT_COMM):
                gradients.average()
            if kfac is not None:
                kfac.step()
            with timer.phase(Phase.UPDATE):
                optimizer.step()
        timer.stop()
        totals = timer.drain()
        if window:
            head = {"arm": arm, "world_size": world_size, "window": window, "rank": rank}
            wall = {**head, "phase": "total", "seconds_per_step": totals.wall_seconds / WINDOW}
            yield wall
            for phase, seconds in totals.seconds.items():
                yield {**head, "phase": phase, "seconds_per_step": seconds / WINDOW}


if __name__ == "__main__":
    if sys.argv[1] == "rank":  # started by `measure` in the rank's namespace
        serve(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        started = time.monotonic()
        measure(Path(sys.argv[1]))
        sys.stdout.write(f"measured in {time.monotonic() - started:.0f} s\n")
