"""A SYNTHETIC study, written through the real store and the real record types.

Its numbers come from a made-up cost model with fixed seeds. They resemble training closely enough to
exercise every table and figure, measure nothing, and live in temporary folders only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from analysis.tables import Study, load
from harness.cell import Cell
from harness.records import EvalRecord, Outcome, PhaseRecord, RecordWriter
from harness.store import Attempt, SweepFolder

STEPS_PER_EPOCH = 20
WINDOW = 10


@dataclass(frozen=True)
class Plan:
    """What to write; the defaults are the ordinary study."""

    methods: tuple[str, ...] = ("sgd", "comm_opt", "dp_kfac")
    world_sizes: tuple[int, ...] = (1, 2, 4)
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 12
    scaling: str = "strong"
    misses: tuple[tuple[str, int, int], ...] = (("sgd", 4, 2),)
    state: str = "COMPLETED"
    with_records: bool = True


def make_cell(method: str, world_size: int, seed: int, plan: Plan) -> Cell:
    batch = {"global_batch_size": 64} if plan.scaling == "strong" else {"local_batch_size": 64}
    kfac = {"strategy": method, "factor_update_steps": 5, "inverse_update_steps": WINDOW, "damping": 0.003}
    return Cell.model_validate(
        {
            "sweep": "synthetic",
            "method": method,
            "workload": "digits",
            "target": {"metric": "accuracy", "at_least": 0.95},
            "training": batch | {"epochs": plan.epochs, "window_steps": WINDOW},
            "optimizer": {"lr": 0.1},
            "kfac": None if method == "sgd" else kfac,
            "world_size": world_size,
            "seed": seed,
        }
    )


def phase_seconds(method: str, world_size: int, rank: int, noise: float, plan: Plan) -> dict[str, float]:
    share = 1 / world_size if plan.scaling == "strong" else 1.0
    wire = 0.0 if world_size == 1 else 0.3 * math.log2(world_size)
    step = {
        "data": 0.1,
        "forward": 1.0 * share,
        "backward": 2.0 * share,
        "gradient_comm": wire,
        "update": 0.2,
    }
    if method != "sgd":
        local = method == "dp_kfac"
        step |= {
            "factor_compute": 0.6 * share * (1 / world_size if local else 1),
            "factor_comm": 0.0 if local else 0.8 * wire,
            "inverse_compute": 1.5 / world_size * (1.2 if rank == 0 else 1.0),
            "inverse_comm": 0.0 if local else 0.5 * wire,
            "precondition": 0.4 / (world_size if local else 1),
            "precondition_comm": 0.6 * wire if local else 0.0,
            "scale": 0.05,
        }
    return {name: WINDOW * 1e-3 * value * noise for name, value in step.items()}


def window_record(cell: Cell, rank: int, first: int, noise: float, plan: Plan) -> PhaseRecord:
    method, world_size = cell.method, cell.world_size
    seconds = phase_seconds(method, world_size, rank, noise, plan)
    moving = {name: 40_000 * WINDOW for name, value in seconds.items() if name.endswith("_comm") and value}
    state = {} if method == "sgd" else {
        "kfac_factors": 3_000_000 if method == "comm_opt" else 3_000_000 // world_size,
        "kfac_second_order": 4_000_000 if method == "comm_opt" else 4_000_000 // world_size,
        "kfac_buffers": 500_000,
    }  # fmt: skip
    return PhaseRecord(
        rank=rank,
        first_step=first,
        steps=WINDOW,
        samples=WINDOW * (64 // world_size if plan.scaling == "strong" else 64),
        wall_seconds=sum(seconds.values()) * 1.03,
        seconds=seconds,
        calls=dict.fromkeys(seconds, WINDOW),
        sent_bytes=moving,
        memory_bytes={"rss": 290_000_000, "rss_peak": 300_000_000 + 2_000_000 * rank, "model": 400_000,
                      "optimizer": 400_000, **state},
    )  # fmt: skip


def write_run(attempt: Attempt, cell: Cell, plan: Plan) -> None:
    """One run: windows of every rank, an evaluation an epoch, and an outcome last."""
    random = Random(f"{cell.method}-{cell.world_size}-{cell.seed}")  # noqa: S311  no secret, a made-up run
    attempt.write(
        "launch.json", {"launcher": "local", "site": "laptop", "oversubscribed": cell.world_size > 2}
    )
    attempt.write(
        "environment.json", {"commit": "synthetic", "python": "3.11.7", "host": "nowhere", "cpus": 2}
    )
    missed = (cell.method, cell.world_size, cell.seed) in plan.misses
    epochs_needed = (9 if cell.method == "sgd" else 5) + random.random()
    clock, evaluations = 0.0, []
    if plan.with_records:
        for rank in range(cell.world_size):
            with RecordWriter(attempt.records(rank)) as writer:
                for first in range(0, plan.epochs * STEPS_PER_EPOCH, WINDOW):
                    window = window_record(cell, rank, first, random.lognormvariate(0, 0.05), plan)
                    writer.write(window)
                    clock += window.wall_seconds if rank == 0 else 0.0
                    if rank == 0 and (first + WINDOW) % STEPS_PER_EPOCH == 0:
                        evaluations.append((first + WINDOW, clock))
        with RecordWriter(attempt.records(0)) as writer:
            for step, seconds in evaluations:
                writer.write(evaluation(cell, step, seconds, epochs_needed, missed))
    completed = plan.state == "COMPLETED"
    attempt.write_outcome(
        Outcome(
            plan.state,
            "" if completed else "synthetic failure",
            completed and not missed,
            "epochs" if missed else "target",
            started_at=0.0,
            ended_at=clock + 1,
            train_seconds=clock if plan.with_records else None,
            value=0.96,
        )
    )


def evaluation(cell: Cell, step: int, seconds: float, epochs_needed: float, missed: bool) -> EvalRecord:
    epoch = step / STEPS_PER_EPOCH
    ceiling = 0.93 if missed else 0.98
    value = ceiling - (ceiling - 0.1) * math.exp(-epoch / epochs_needed * math.log((0.98 - 0.1) / 0.03))
    return EvalRecord(
        rank=0,
        step=step,
        epoch=epoch,
        samples=step * 64,
        train_seconds=seconds,
        eval_seconds=0.05 * epoch,
        wall_seconds=seconds + 0.05 * epoch,
        metric="accuracy",
        value=value,
        direction="higher",
        train_loss=2 * (1 - value),
        learning_rate=0.1,
    )


@pytest.fixture(scope="session")
def write_study(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plan], Path]:
    """Writes a synthetic sweep and returns its folder."""

    def write(plan: Plan) -> Path:
        folder = SweepFolder(tmp_path_factory.mktemp("results") / "runs" / "synthetic")
        for cell in cells_of(plan):
            write_run(folder.stage(cell).new_attempt(), cell, plan)
        return folder.path

    return write


def cells_of(plan: Plan) -> Iterable[Cell]:
    for method in plan.methods:
        for world_size in plan.world_sizes:
            for seed in plan.seeds:
                yield make_cell(method, world_size, seed, plan)


@pytest.fixture(scope="session")
def ordinary_folder(write_study) -> Path:
    return write_study(Plan())


@pytest.fixture(scope="session")
def study(ordinary_folder) -> Study:
    """Three methods, three world sizes, three seeds, strong scaling; one SGD run misses its target."""
    return load(ordinary_folder)


@pytest.fixture(scope="session")
def odd_studies(write_study) -> dict[str, Study]:
    """Studies that lack something."""
    small = Plan(seeds=(0,), epochs=6)
    plans = {
        "only failed cells": replace(small, state="FAILED", with_records=False),
        "no SGD arm": replace(small, methods=("comm_opt", "dp_kfac")),
        "one world size": replace(small, world_sizes=(2,)),
        "nobody reaches the target": replace(small, epochs=1),
        "weak scaling": replace(small, scaling="weak"),
        "no cells": replace(small, methods=()),
    }
    return {name: load(_made(write_study(plan))) for name, plan in plans.items()}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
