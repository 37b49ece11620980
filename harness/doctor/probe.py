"""One rank of the examination's job: `python -m harness.doctor.probe ATTEMPT --rank R ...`.

It joins the world like a training rank and reports what it measures. It trains nothing.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import pynvml
import torch
import torch.distributed as dist

import harness
from harness.calibrate import timed
from harness.doctor.reports import NOT_KNOWN, Report, WorldReport
from harness.launchers.cgroups import memory_limit_bytes
from harness.runs.atomic_files import write_atomically
from harness.runs.attempt_outcome import Result
from harness.runs.record_writer import RecordWriter
from harness.training.environment import read_environment
from harness.training.rank_process import RankArguments, exit_at_once, failure_record
from harness.training.train import Trainer  # noqa: F401  which imports all that a training rank imports
from harness.training.world import World, finalize_world, join_world

VISIBLE_TIMEOUT_SECONDS = 30.0  # for other ranks' files; NFS caches a folder for less by default

_SMALL, _LARGE = 1, 1 << 20  # elements of float32: 4 B and 4 MiB
_ROUNDS = 5  # of reading the clocks: the one that the kernel's scheduler disturbs least is used
_POLL_SECONDS = 0.01


def probe(arguments: RankArguments) -> int:
    """Report this rank's host and communication; returns the exit code."""
    torch.set_num_threads(arguments.threads)
    attempt, rank = arguments.attempt, arguments.rank
    with RecordWriter(attempt.records(rank)) as records:
        try:
            report = read_host(arguments)
            report.write(attempt)
            began = time.perf_counter()
            world = join_world(attempt, rank, arguments.world_size, arguments.local_rank)
            together = read_world(arguments, world, time.perf_counter() - began)
            replace(report, exchange=together).write(attempt)
            finalize_world(world)
        except Exception as error:
            records.write(failure_record(rank, -1, "start", error))
            traceback.print_exc()
            return 1
    if rank == 0:
        attempt.write("result.json", asdict(Result(True, "target", 0.0, 0.0, 0, "")))
    return 0


def read_host(arguments: RankArguments) -> Report:
    """What can be measured without the other ranks."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = arguments.local_rank % gpus if gpus else None
    nccl, no_nccl = _nccl()
    return Report(
        rank=arguments.rank,
        local_rank=arguments.local_rank,
        host=socket.gethostname(),
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        versions=_versions(),
        device=torch.cuda.get_device_name(own) if own is not None else "cpu",
        device_id=str(torch.cuda.get_device_properties(own).uuid) if own is not None else "",
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(gpus)),
        driver=_driver(),
        nccl=nccl,
        no_nccl=no_nccl,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        threads=torch.get_num_threads(),
        memory_limit_bytes=memory_limit_bytes(),
        address_space_bytes=_limit(resource.RLIMIT_AS),
        locked_memory_bytes=_limit(resource.RLIMIT_MEMLOCK),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free,  # noqa: S108  # where NCCL and MPI put theirs
        python=sys.executable,
        code=str(Path(harness.__file__).parent),
        backends=tuple(name for name in ("nccl", "gloo", "mpi") if getattr(dist, f"is_{name}_available")()),
        data=(data := os.environ.get("KRONSCALE_DATA", "")),
        data_seen=bool(data) and Path(data).is_dir(),
    )


def read_world(arguments: RankArguments, world: World, joined_seconds: float) -> WorldReport:
    """What can only be measured with the other ranks; a collective call."""
    return WorldReport(
        backend=world.backend,
        joined_seconds=joined_seconds,
        no_mpi=world.no_mpi,
        mpi=_mpi_library(),
        wrong_sum=_wrong_sum(world),
        small_seconds=_all_reduce_seconds(world, _SMALL),
        large_seconds=_all_reduce_seconds(world, _LARGE),
        clock_readings=tuple(_after_barrier(world) for _ in range(_ROUNDS)),
        visible_seconds=_seconds_until_visible(arguments, world),
        near=tuple(sorted(world.communicator.readable_peers)),
    )


def _wrong_sum(world: World) -> str:
    expected = world.world_size * (world.world_size + 1) / 2
    for elements in (_SMALL, _LARGE):
        buffer = torch.full((elements,), world.rank + 1.0, device=world.device)
        world.communicator.all_reduce(buffer)
        wrong = buffer[buffer != expected]
        if wrong.numel():
            return f"{wrong[0].item():g} instead of {expected:g} in {wrong.numel()} of {elements} elements"
    return ""


def _all_reduce_seconds(world: World, elements: int) -> float:
    buffer = torch.zeros(elements, device=world.device)
    return timed(lambda: world.communicator.all_reduce(buffer), world.device)


def _after_barrier(world: World) -> float:
    world.wait_for_all()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.time()


def _seconds_until_visible(arguments: RankArguments, world: World) -> float | None:
    files = [arguments.attempt.path / f"seen-{rank:05}" for rank in range(world.world_size)]
    for file in files:  # from now on this host's cache has that none of them exists
        file.exists()
    _after_barrier(world)
    write_atomically(files[world.rank], "")
    _after_barrier(world)
    began = time.perf_counter()
    while not all(file.exists() for file in files):
        if time.perf_counter() - began > VISIBLE_TIMEOUT_SECONDS:
            return None
        time.sleep(_POLL_SECONDS)
    return time.perf_counter() - began


def _versions() -> dict[str, str]:
    environment = read_environment(torch.device("cpu"), "", ())
    commit = environment.commit[:12] if environment.commit else NOT_KNOWN
    if environment.commit and environment.dirty:
        commit += " and changes"
    known = environment.packages
    packages: dict[str, str] = {name: known[name] for name in ("torch", "kronscale") if name in known}
    return {"python": platform.python_version(), **packages, "commit": commit}


def _nccl() -> tuple[str, str]:
    if not dist.is_nccl_available():
        return "", "this torch was built without NCCL"
    if not torch.cuda.is_available():
        return "", "torch sees no GPU"
    return ".".join(map(str, torch.cuda.nccl.version())), ""


def _driver() -> str | None:
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _mpi_library() -> str:
    started = sys.modules.get("mpi4py.MPI")
    if started is None:
        return ""
    return " ".join(str(started.Get_library_version()).splitlines()[0].strip("\0").split())


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


if __name__ == "__main__":
    exit_at_once(probe(RankArguments.read(__doc__)))
