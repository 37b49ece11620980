"""One rank of the examination's job: `python -m harness.doctor.probe ATTEMPT --rank R ...`.

It joins the world like a training rank and reports what it sees. It trains nothing.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch

from harness.doctor.ranks import Report
from harness.runs.attempt_outcome import Result
from harness.runs.record_lines import RecordWriter
from harness.training.environment import read_environment
from harness.training.rank_process import RankArguments, exit_at_once, failure_record
from harness.training.train import Trainer  # noqa: F401  which imports all that a training rank imports
from harness.training.world import World, finalize_world, join_world

_ELEMENTS, _ROUNDS = 1 << 20, 5


def probe(arguments: RankArguments) -> int:
    """Report this rank's host and communication; returns the exit code."""
    torch.set_num_threads(arguments.threads)
    attempt, rank = arguments.attempt, arguments.rank
    with RecordWriter(attempt.records(rank)) as records:
        try:
            report = read_host(arguments)
            report.write(attempt)
            world = join_world(attempt, rank, arguments.world_size, arguments.local_rank)
            wrong, seconds = _all_reduce(world)
            joined = replace(report, backend=world.backend, sum_error=wrong, all_reduce_seconds=seconds)
            joined.write(attempt)
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
    environment = read_environment(torch.device("cpu"), "", ())
    packages = environment.packages
    known: dict[str, str] = {name: packages[name] for name in ("torch", "kronscale") if name in packages}
    if environment.commit:
        known["commit"] = environment.commit[:12] + (" and changes" if environment.dirty else "")
    data = os.environ.get("KRONSCALE_DATA", "")
    return Report(
        rank=arguments.rank,
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        python=sys.executable,
        versions={"python": platform.python_version(), **known},
        device_id=str(torch.cuda.get_device_properties(own).uuid) if own is not None else "",
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(gpus)),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        data=data,
        data_seen=bool(data) and Path(data).is_dir(),
    )


def _all_reduce(world: World) -> tuple[str, float]:
    """Its error in words, and its median seconds; a collective call."""
    expected, seconds = world.world_size * (world.world_size + 1) / 2, []
    for _ in range(_ROUNDS):
        buffer = torch.full((_ELEMENTS,), world.rank + 1.0, device=world.device)
        world.wait_for_all()
        began = time.perf_counter()
        world.communicator.all_reduce(buffer)
        wrong = buffer[buffer != expected]  # waits for the device, too
        seconds.append(time.perf_counter() - began)
        if wrong.numel():
            return f"{wrong[0].item():g} instead of {expected:g} in {wrong.numel()} of {_ELEMENTS}", 0.0
    return "", median(seconds)


if __name__ == "__main__":
    exit_at_once(probe(RankArguments.read(__doc__)))
