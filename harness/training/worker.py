"""One rank of one attempt, from start to exit: `python -m harness.training.worker ATTEMPT --rank R ...`.

Exits 0 when training ended, 75 when it stopped to be resumed, 1 on an exception, after writing what failed
and where. A rank that fails takes part in no further collective: its launcher sees the exit and ends the
others.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from harness.runs.checkpoint_requests import PREEMPTED_EXIT_CODE, SignalRequests
from harness.runs.checkpoint_store import clear_checkpoint_stores
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.layers_file import describe
from harness.runs.records import RecordWriter
from harness.runs.store import Attempt
from harness.training.checkpoint.checkpoints import Checkpoints, Plan
from harness.training.environment import read_environment
from harness.training.malloc import keep_freed_memory
from harness.training.rank_process import RankArguments, failure, leave
from harness.training.train import Result, Trainer
from harness.training.world import host_names, join_world, leave_world
from kfac_core.collectives import SplitWait


def run_rank(attempt: Attempt, rank: int, world_size: int, local_rank: int, threads: int) -> int:
    """Train this rank's share of the attempt's cell; returns the exit code."""
    torch.set_num_threads(threads)
    asked = SignalRequests()  # first, so that a signal during the start is not the rank's end
    pulse = HeartbeatWriter(attempt.pulse(rank))
    with RecordWriter(attempt.records(rank)) as records:
        try:
            result = _train(attempt, (rank, world_size, local_rank), pulse, records, asked)
        except Exception as error:
            beat = attempt.last_heartbeat(rank)
            records.write(failure(rank, pulse.step, beat.phase if beat else "start", error))
            traceback.print_exc()
            return 1
    if result.stop_reason == "preempted":
        return PREEMPTED_EXIT_CODE
    if rank == 0:
        attempt.write("result.json", asdict(result))
        clear_checkpoint_stores(attempt)  # not before: without a result the run would start anew
    return 0


def main() -> None:
    """Parse the command line that a launcher writes, run, and leave without waiting for other ranks."""
    place = RankArguments.read(__doc__)
    leave(run_rank(place.attempt, place.rank, place.world_size, place.local_rank, place.threads))


def _train(
    attempt: Attempt,
    place: tuple[int, int, int],
    pulse: HeartbeatWriter,
    records: RecordWriter,
    asked: SignalRequests,
) -> Result:
    cell = attempt.cell_folder.cell()
    world = join_world(attempt, *place)
    kept = world.device.type == "cpu" and keep_freed_memory()
    site = (attempt.read("launch.json") or {}).get("site") or {}
    if site.get("split_wait") and world.world_size > 1:
        world = replace(world, communicator=SplitWait(world.communicator))
    hosts = host_names(world)
    if world.rank == 0:
        near = world.communicator.near
        environment = read_environment(world.device, world.backend, hosts, near, keeps_freed_memory=kept)
        attempt.write("environment.json", environment.to_json())
    checkpoints = Checkpoints(attempt, world, records.write, Plan.read(attempt), asked)
    trainer = Trainer(
        cell,
        world,
        pulse,
        records.write,
        checkpoints,
        _traced(site),
        ranges=bool(site.get("profiler_ranges")),
    )
    if world.rank == 0 and trainer.kfac is not None:
        attempt.write("layers.json", describe(trainer.kfac.shapes, trainer.kfac.placement))
    result = trainer.run()
    leave_world(world)  # rank 0 says "done" only when everyone is
    return result


def _traced(site: Mapping[str, Any]) -> range:
    first, end = site.get("traced_steps") or (0, 0)
    return range(first, end)


if __name__ == "__main__":
    main()
