"""Studies whose answers are known: every run takes as long, and needs as many epochs, as the test says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from analysis.records.loading import load
from analysis.records.study import Study
from harness.cell import Cell
from harness.runs.attempt_outcome import Outcome
from harness.runs.record_lines import RecordWriter
from harness.runs.records import EvalRecord, PhaseRecord
from harness.runs.store import Attempt, SweepFolder
from tests.analysis.conftest import STEPS_PER_EPOCH, Plan, make_cell

TARGET = 0.95


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        epochs: epochs that it trained; it is at the target, and not beyond it, in the last one.
        seconds: per epoch.
        state: of its outcome; a run that did not complete is below the target.
        misses: whether a completed run ends below the target.
        allocation: its block.
        started: when, in seconds; it ends 100 s later.
        foreign: share of its CPUs that other processes had; None if that was not measured.
        launch: more of `launch.json`, such as the attempt's `id`.
    """

    method: str
    world_size: int
    seed: int
    epochs: int
    seconds: float
    state: str = "COMPLETED"
    misses: bool = False
    oversubscribed: bool = False
    allocation: str = ""
    started: float = 0.0
    foreign: float | None = None
    patch: dict[str, object] = field(default_factory=dict)
    launch: dict[str, object] = field(default_factory=dict)


def hand_made(folder: Path, runs: Iterable[Run]) -> Study:
    """The runs through record files; `folder` gets the sweep `runs/synthetic`."""
    sweep = SweepFolder(folder / "runs" / "synthetic")
    for run in runs:
        cell = make_cell(run.method, run.world_size, run.seed, Plan(), run.patch)
        write(sweep.stage(cell).new_attempt(), cell, run)
    return load(sweep.path, cache=False)


def write(attempt: Attempt, cell: Cell, run: Run) -> None:
    """The files of `run`, as a run of `cell`."""
    launch = {"launcher": "slurm", "allocation": run.allocation, "oversubscribed": run.oversubscribed}
    attempt.write("launch.json", launch | run.launch)
    attempt.write("environment.json", {"host": "nowhere"})
    completed = run.state == "COMPLETED"
    reached = completed and not run.misses
    value = 0.0
    for rank in range(cell.world_size):
        with RecordWriter(attempt.records(rank)) as writer:
            for epoch in range(1, run.epochs + 1):
                writer.write(_window(cell, rank, epoch, run))
                if rank == 0:
                    value = TARGET if reached and epoch == run.epochs else 0.1
                    writer.write(_evaluation(epoch, epoch * run.seconds, value))
            writer.write_checksum(rank)
    ended = ("target" if reached else "epochs") if completed else "error"
    attempt.write_outcome(
        Outcome(
            run.state, "" if reached else "as the test says", reached_target=reached if completed else None,
            stop_reason=ended, started_at=run.started, ended_at=run.started + 100,
            train_seconds=run.epochs * run.seconds, value=value,
        )
    )  # fmt: skip


def _window(cell: Cell, rank: int, epoch: int, run: Run) -> PhaseRecord:
    seconds = run.seconds
    load = None
    if run.foreign is not None:
        load = {"capacity": seconds, "foreign": run.foreign * seconds, "steal": 0.0}
        load |= {"host_capacity": 2 * seconds, "host_foreign": run.foreign * seconds}
    samples = STEPS_PER_EPOCH * cell.training.batch_sizes(cell.world_size)[1]
    phases = {"forward": 0.25 * seconds, "backward": 0.75 * seconds}
    calls = dict.fromkeys(phases, STEPS_PER_EPOCH)
    first = (epoch - 1) * STEPS_PER_EPOCH
    return PhaseRecord(
        rank, first, STEPS_PER_EPOCH, samples, seconds, phases, calls, {}, {"rss_peak": 10**8},
        load_seconds=load,
    )  # fmt: skip


def _evaluation(epoch: int, seconds: float, value: float) -> EvalRecord:
    step = epoch * STEPS_PER_EPOCH
    return EvalRecord(
        0, step, float(epoch), step * 64, seconds, 0.5 * epoch, seconds + epoch, "accuracy", value, "higher",
        1.0, 0.1,
    )  # fmt: skip
