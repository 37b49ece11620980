"""Measure K-FAC steps of ResNet-20 on 1, 2, 4 and 8 ranks with limited links and limited CPUs.

    python -m jobs.experiments.shaped_networks results/prediction [CASE ...]   (as root, nothing else running)

Every rank gets a network namespace with a link of the case's rate, as in `shaped_links.py`, and a cgroup
with the same share of a CPU in every world: eight ranks of a fifth of a CPU each fit on two cores, so none
waits for a core that another one has. In smaller worlds other processes use the remaining shares, so that
the cores, and what their threads share, are as busy in every world. Of the two cases one is limited by its
links and one by its CPUs. All seven strategies run real steps over Gloo.
Writes `shaped_networks_CASE.csv` and `shaped_networks_layers.csv`, which `prediction_validation.py` reads.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from harness.training.gradient_averaging import FlatAverage
from harness.workloads.models import cifar_resnet
from jobs.experiments.shaped_links import NETWORK, namespaces
from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.collectives import connect
from kfac_core.timing.timer import PhaseTimer

WORLDS = (1, 2, 4, 8)
F, E, WINDOWS = 2, 4, 3  # a window is one inverse period
STRATEGIES = ("comm_opt", "mem_opt", "hybrid_opt", "dp_kfac", "mpd_kfac", "d_kfac", "spd_kfac")
ARMS = ("sgd", *STRATEGIES)
_BUSY = "while True: sum(range(100_000))"
_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 5000  # short beside a step, so that a rank is slowed evenly and not stopped for long


@dataclass(frozen=True)
class Case:
    """What is limited.

    Attributes:
        rate_mbit: of a rank's link, each way.
        batch: examples of a rank.
        cpus: of a rank.
    """

    name: str
    rate_mbit: int
    batch: int
    cpus: float


CASES = (Case("link-bound", 100, 8, 0.2), Case("compute-bound", 1000, 32, 0.2))


def config_of(arm: str, world_size: int) -> KFACConfig | None:
    """The arm's K-FAC; hybrid_opt has half of the ranks as gradient workers, where there are two."""
    if arm == "sgd":
        return None
    fraction = max(0.5, 1 / world_size) if arm == "hybrid_opt" else None
    return KFACConfig(
        strategy=arm, grad_worker_fraction=fraction, factor_update_steps=F, inverse_update_steps=E,
        damping=0.01,
    )  # fmt: skip


def measure(folder: Path, cases: Sequence[Case]) -> None:
    """Measure these cases at all world sizes that their files lack, one after another."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        path = folder / f"shaped_networks_{case.name}.csv"
        steps: list[dict[str, Any]] = list(csv.DictReader(path.open())) if path.exists() else []
        for world_size in sorted(set(WORLDS) - {int(row["world_size"]) for row in steps}):
            began = time.monotonic()
            for found in _world(case, world_size):
                steps += [{"case": case.name, "batch": case.batch, **row} for row in found["steps"]]
                if found["layers"]:
                    _write(folder / "shaped_networks_layers.csv", found["layers"])
            sys.stdout.write(f"{case.name}, {world_size} ranks: {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()
            _write(path, steps)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _world(case: Case, world_size: int) -> list[dict[str, Any]]:
    """What every rank of one world found."""
    with (
        namespaces(world_size, case.rate_mbit) as names,
        cpu_limits(max(WORLDS), case.cpus) as limits,
        tempfile.TemporaryDirectory() as results,
    ):
        program = [sys.executable, "-m", "jobs.experiments.shaped_networks", "rank"]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *program, str(rank), str(world_size), results, case.name],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
            )
            for rank, name in enumerate(names)
        ]
        others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in limits[world_size:]]
        try:
            _limit(ranks, others, limits, Path(results))
            codes = [rank.wait(1800) for rank in ranks]
        finally:
            for other in others:
                other.kill()
                other.wait()
        if any(codes):
            raise SystemExit(f"{world_size} ranks ended with {codes}")
        return [json.loads(path.read_text()) for path in sorted(Path(results).glob("rank-*.json"))]


def _limit(
    ranks: list[subprocess.Popen[bytes]],
    others: list[subprocess.Popen[bytes]],
    limits: list[Path],
    folder: Path,
) -> None:
    """Limit each rank once all have loaded torch: a namespace has a /sys of its own, so they cannot."""
    while len(list(folder.glob("loaded-*"))) < len(ranks):
        if any(rank.poll() for rank in ranks):
            raise SystemExit("a rank ended before it had loaded")
        time.sleep(0.05)
    for process, limit in zip([*ranks, *others], limits, strict=True):
        limit.write_text(str(process.pid))
    (folder / "limited").touch()


@contextmanager
def cpu_limits(count: int, cpus: float) -> Iterator[list[Path]]:
    """`count` cgroups whose processes get so many CPUs each; yields the files that take process ids.

    Version 2 of cgroups, or version 1 where the cpu controller is mounted so.
    """
    old = _CGROUPS / "cpu"
    root = old if old.is_dir() else _CGROUPS
    quota = round(cpus * _PERIOD_US)
    groups = [root / f"kronscale-{os.getpid()}-{index}" for index in range(count)]
    try:
        for group in groups:
            group.mkdir()
            if old.is_dir():
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        yield [group / "cgroup.procs" for group in groups]
    finally:
        for group in groups:
            if group.is_dir():
                group.rmdir()


def serve(rank: int, world_size: int, folder: Path, case: Case) -> None:
    """One rank: every arm; writes the numbers as JSON."""
    torch.set_num_threads(1)
    (folder / f"loaded-{rank}").touch()
    while not (folder / "limited").exists():
        time.sleep(0.05)
    if world_size > 1:
        store = dist.TCPStore(f"{NETWORK}.1", 29400, world_size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    steps: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for arm in ARMS:
        steps += _run(arm, rank, world_size, case.batch, layers)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"steps": steps, "layers": layers}))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _run(
    arm: str, rank: int, world_size: int, batch: int, layers: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Windows of one arm; the first is left out. Adds the network's layers once."""
    torch.manual_seed(0)
    model = cifar_resnet(20, 10)
    communicator = connect()
    timer = PhaseTimer(traffic=communicator.traffic)
    gradients = FlatAverage(model, communicator)
    config = config_of(arm, world_size)
    kfac = KFAC(model, config, lr=1e-3, timer=timer, communicator=communicator) if config else None
    if kfac is not None and not layers:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        layers += [
            {"layer": shape.name, "a_dim": shape.a.dim, "g_dim": shape.g.dim, "model_parameters": parameters}
            for shape in kfac.shapes
        ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    torch.manual_seed(rank)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    for window in range(WINDOWS + 1):
        communicator.all_reduce(torch.zeros(1))  # start together
        timer.start()
        for _ in range(E):
            with timer.phase(Phase.FORWARD):
                loss = functional.cross_entropy(model(images), labels)
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
            yield {**head, "phase": "total", "seconds_per_step": totals.wall_seconds / E}
            for phase, seconds in totals.seconds.items():
                yield {**head, "phase": phase, "seconds_per_step": seconds / E}


if __name__ == "__main__":
    if sys.argv[1] == "rank":  # started by `measure` in the rank's namespace
        own = next(case for case in CASES if case.name == sys.argv[5])
        serve(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), own)
    else:
        named = [case for case in CASES if case.name in sys.argv[2:]]
        measure(Path(sys.argv[1]), named or CASES)
