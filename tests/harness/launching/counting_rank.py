"""A rank that counts steps and can be resumed: it starts in a moment, unlike one that trains.

Its only state is a digest of every step so far, so that a result tells whether each step was done once and in
order. On SIGUSR1 it saves, as the launchers ask it to before a time limit, and ends with 75. Options of the
cell's workload: `steps`, `step_seconds`.
"""

import argparse
import hashlib
import signal
import time
from pathlib import Path

from harness.runs.checkpoint_store import PREEMPTED_EXIT_CODE, CheckpointStore, Manifest, resumable
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import CheckpointRecord, SegmentRecord, to_line
from harness.runs.store import Attempt
from harness.training.rank_process import exit_at_once


def digest_of(steps):
    """The result of a run that nothing interrupts."""
    digest = ""
    for step in range(steps):
        digest = next_digest(digest, step)
    return digest


def next_digest(digest, step):
    return hashlib.sha256(f"{digest}{step}".encode()).hexdigest()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("rank", "world-size", "local-rank", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append("SIGUSR1"))
    attempt = Attempt(args.folder)
    options = attempt.cell_folder.cell().workload.options
    step, digest = resumed(attempt)
    if args.rank == 0:
        segment = {
            "rank": 0,
            "segment": int(step > 0),
            "first_step": step,
            "attempt": None,
            "started_at": time.time(),
        }
        record = SegmentRecord(**segment, away_seconds=0.0, bitwise=True, notes=())
        attempt.write("segment.json", record.__dict__)
    heartbeat = HeartbeatWriter(attempt.heartbeat(args.rank))
    heartbeat.total_steps = steps = int(options["steps"])
    while step < steps and not asked:
        heartbeat.step = step
        heartbeat.write("backward")
        digest = next_digest(digest, step)
        step += 1
        time.sleep(float(options["step_seconds"]))
    if step < steps:
        if args.rank == 0:
            save(attempt, step, digest)
        exit_at_once(PREEMPTED_EXIT_CODE)
    if args.rank == 0:
        result = {"reached_target": True, "stop_reason": "target", "train_seconds": 1.0, "value": 0.95}
        attempt.write("result.json", {**result, "steps": steps, "parameters_sha256": digest})
    exit_at_once(0)  # as a worker does: while Python ends, signals have their default again, and one kills it


def resumed(attempt):
    """Step and digest of the newest checkpoint."""
    for _, saved in resumable(attempt):
        return saved.step, (saved.path / "digest").read_text()
    return 0, ""


def save(attempt, step, digest):
    store = CheckpointStore(attempt)
    (store.begin(step) / "digest").write_text(digest)
    world_size = attempt.cell_folder.cell().world_size
    store.publish(step, Manifest(1, step, world_size, 0, "SIGUSR1", time.time(), {}))
    record = CheckpointRecord(0, 0, step, "SIGUSR1", True, 0.1, 10, "")
    with attempt.records(0).open("a") as file:
        file.write(to_line(record))


if __name__ == "__main__":
    main()
