"""One rank of one attempt, from start to exit: `python -m harness.training.worker ATTEMPT --rank R ...`.

Exits with 0 when training ended, with 75 when it stopped to be resumed, and with 1 on an exception, after
writing a failure record. A rank that fails takes part in no further collective: its launcher sees the exit
and stops the other ranks.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from harness.errors import StoreError
from harness.runs.attempt_outcome import Result
from harness.runs.checkpoint_store import PREEMPTED_EXIT_CODE, SignalRequests, clear_checkpoint_stores
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.layers_file import describe
from harness.runs.record_lines import RecordWriter
from harness.runs.store import Attempt
from harness.training.checkpoint import Checkpoints, Schedule
from harness.training.compiler import do_without_compiler
from harness.training.environment import read_environment
from harness.training.gradient_averaging import averaging_method
from harness.training.malloc import keep_freed_memory
from harness.training.rank_process import RankArguments, exit_at_once, failure_record
from harness.training.train import Trainer
from harness.training.world import finalize_world, join_world
from harness.workloads.models.weights import save_weights
from kfac_core.collectives import SplitWait


def run_rank(attempt: Attempt, rank: int, world_size: int, local_rank: int, threads: int) -> int:
    """Train this rank's share of the attempt's cell; returns the exit code."""
    torch.set_num_threads(threads)
    requests = SignalRequests()  # first, so that a signal during the start does not kill the rank
    heartbeat = HeartbeatWriter(attempt.heartbeat(rank))
    with RecordWriter(attempt.records(rank)) as records:
        try:
            result = _train(attempt, (rank, world_size, local_rank), heartbeat, records, requests)
        except Exception as error:
            last = attempt.last_heartbeat(rank)
            records.write(failure_record(rank, heartbeat.step, last.phase if last else "start", error))
            traceback.print_exc()
            records.write_checksum(rank)
            return 1
        records.write_checksum(rank)
    if result.stop_reason == "preempted":
        return PREEMPTED_EXIT_CODE
    if rank == 0:
        attempt.write("result.json", asdict(result))
        with suppress(StoreError):  # an earlier attempt was deleted: the run is complete all the same
            clear_checkpoint_stores(attempt)  # not before: without a result the run would start anew
    return 0


def main() -> None:
    """Parse the launcher's command line, train, and exit without waiting for other ranks."""
    given = RankArguments.read(__doc__)
    do_without_compiler()
    exit_at_once(run_rank(given.attempt, given.rank, given.world_size, given.local_rank, given.threads))


def _train(
    attempt: Attempt,
    ranks: tuple[int, int, int],
    heartbeat: HeartbeatWriter,
    records: RecordWriter,
    requests: SignalRequests,
) -> Result:
    """Train as one of `ranks`: rank, world size, local rank."""
    cell = attempt.cell_folder.cell()
    world = join_world(attempt, *ranks)
    kept = world.device.type == "cpu" and keep_freed_memory()
    site = (attempt.read("launch.json") or {}).get("site") or {}
    if site.get("split_wait") and world.world_size > 1:
        world = replace(world, communicator=SplitWait(world.communicator))
    hosts = tuple(world.all_gather(socket.gethostname()))
    if world.rank == 0:
        environment = read_environment(
            world.device,
            world.backend,
            hosts,
            gradient_averaging=averaging_method(cell.training.gradient_averaging, world.world_size),
            keeps_freed_memory=kept,
        )
        attempt.write("environment.json", environment.to_json())
    schedule = Schedule(site.get("checkpoint_every_epochs"), site.get("checkpoint_every_minutes"))
    checkpoints = Checkpoints(attempt, world, records.write, schedule, requests)
    trainer = Trainer(
        cell,
        world,
        heartbeat,
        records.write,
        checkpoints,
        _traced_steps(site),
        profiler_ranges=bool(site.get("profiler_ranges")),
    )
    kfac = trainer.state.kfac
    if world.rank == 0 and kfac is not None:
        attempt.write("layers.json", describe(kfac.shapes, kfac.placement))
    result = trainer.run()
    if cell.training.save_model and world.rank == 0 and result.stop_reason in ("target", "epochs"):
        save_weights(trainer.state.model, attempt.path)
    finalize_world(world)  # rank 0 writes its result only when all ranks are done
    return result


def _traced_steps(site: Mapping[str, Any]) -> range:
    first, end = site.get("traced_steps") or (0, 0)
    return range(first, end)


if __name__ == "__main__":
    main()
