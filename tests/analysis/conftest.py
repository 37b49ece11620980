"""A SYNTHETIC study, written through the real store and the real record types.

Its numbers come from a made-up cost model with fixed seeds. They resemble training closely enough to
exercise every table and figure, measure nothing, and live in temporary folders only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from analysis.records.loading import load
from analysis.records.study import Study
from analysis.report.page import write_report
from harness.cell import Cell
from harness.runs.attempt_outcome import Outcome
from harness.runs.layers_file import describe
from harness.runs.record_lines import RecordWriter
from harness.runs.records import DeviceRecord, EvalRecord, PhaseRecord
from harness.runs.store import Attempt, SweepFolder
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.placement.strategies import place

FIRST_ORDER = ("sgd", "nlcg")
STRATEGY_OF = {"half": "hybrid_opt"}
SHAPES = [
    LayerShape(name, FactorShape(a), FactorShape(g)) for name, a, g in (("conv", 145, 32), ("fc", 129, 10))
]
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
    fails: tuple[tuple[str, int, int], ...] = ()
    diverges: tuple[tuple[str, int, int], ...] = ()
    slower: tuple[tuple[str, float], ...] = ()
    fixed_length: bool = False
    gpus: bool = False
    patches: tuple[dict[str, Any], ...] = ({},)


def make_cell(method: str, world_size: int, seed: int, plan: Plan, patch: Mapping[str, Any]) -> Cell:
    batch = {"global_batch_size": 64} if plan.scaling == "strong" else {"local_batch_size": 64}
    strategy = STRATEGY_OF.get(method, method)
    kfac = {"strategy": strategy, "factor_update_steps": 5, "inverse_update_steps": WINDOW, "damping": 0.003}
    if method == "half":
        kfac["grad_worker_fraction"] = 0.5
    content = {
        "sweep": "synthetic",
        "method": method,
        "workload": {"name": "digits"},
        "target": {"metric": "accuracy", "at_least": 0.95},
        "training": batch
        | {"epochs": plan.epochs, "window_steps": WINDOW, "stop_at_target": not plan.fixed_length},
        "optimizer": {"lr": 0.1, "name": "nlcg" if method == "nlcg" else "sgd"},
        "kfac": None if method in FIRST_ORDER else kfac,
        "world_size": world_size,
        "seed": seed,
    }
    for path, value in patch.items():
        section, _, field = path.partition(".")
        if content[section] is not None:
            content[section] = content[section] | {field: value}
    return Cell.model_validate(content)


def phase_seconds(method: str, world_size: int, rank: int, noise: float, plan: Plan) -> dict[str, float]:
    share = 1 / world_size if plan.scaling == "strong" else 1.0
    wire = 0.0 if world_size == 1 else 0.3 * math.log2(world_size)
    step = {"data": 0.1, "forward": share, "backward": 2 * share, "gradient_comm": wire, "update": 0.2}
    if method not in FIRST_ORDER:
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
    state = {} if method in FIRST_ORDER else {
        "kfac_factors": 3_000_000 if method == "comm_opt" else 3_000_000 // world_size,
        "kfac_second_order": 4_000_000 if method == "comm_opt" else 4_000_000 // world_size,
        "kfac_buffers": 500_000,
    }  # fmt: skip
    samples = WINDOW * (64 // world_size if plan.scaling == "strong" else 64)
    memory = {"rss": 290_000_000, "rss_peak": 300_000_000 + 2_000_000 * rank, "model": 400_000}
    return PhaseRecord(
        rank, first, WINDOW, samples, sum(seconds.values()) * 1.03, seconds, dict.fromkeys(seconds, WINDOW),
        moving, {**memory, "optimizer": 400_000, **state},
    )  # fmt: skip


def write_run(attempt: Attempt, cell: Cell, plan: Plan) -> None:
    """One run: windows of every rank, an evaluation an epoch, and an outcome last."""
    random = Random(f"{cell.method}-{cell.world_size}-{cell.seed}{patch_noise(cell)}")  # noqa: S311  no secret, a made-up run
    attempt.write(
        "launch.json", {"launcher": "local", "site": "laptop", "oversubscribed": cell.world_size > 2}
    )
    attempt.write(
        "environment.json", {"commit": "synthetic", "python": "3.11.7", "host": "nowhere", "cpus": 2}
    )
    if cell.kfac is not None and plan.with_records:
        attempt.write("layers.json", describe(SHAPES, place(cell.kfac, SHAPES, cell.world_size)))
    point = (cell.method, cell.world_size, cell.seed)
    if point in plan.fails:
        plan = replace(plan, state="FAILED", with_records=False)
    missed = point in (*plan.misses, *plan.diverges)
    epochs_needed = (9 if cell.method == "sgd" else 5) + random.random()
    clock, evaluations, value = 0.0, [], 0.98
    if plan.with_records:
        for rank in range(cell.world_size):
            with RecordWriter(attempt.records(rank)) as writer:
                for first in range(0, plan.epochs * STEPS_PER_EPOCH, WINDOW):
                    noise = random.lognormvariate(0, 0.05) * dict(plan.slower).get(cell.method, 1.0)
                    window = window_record(cell, rank, first, noise, plan)
                    writer.write(window)
                    if plan.gpus:
                        joules = 300.0 * window.wall_seconds
                        writer.write(DeviceRecord(rank, 0, first, WINDOW, "", energy_joules=joules))
                    clock += window.wall_seconds if rank == 0 else 0.0
                    if rank == 0 and (first + WINDOW) % STEPS_PER_EPOCH == 0:
                        evaluations.append((first + WINDOW, clock))
        with RecordWriter(attempt.records(0)) as writer:
            for step, seconds in evaluations:
                record = evaluation(cell, step, seconds, epochs_needed, missed)
                lost = point in plan.diverges and step > STEPS_PER_EPOCH
                if lost:
                    every = dict.fromkeys(record.metrics, math.nan)
                    record = replace(record, value=math.nan, train_loss=math.nan, metrics=every)
                writer.write(record)
                value = record.value
        for rank in range(cell.world_size):
            with RecordWriter(attempt.records(rank)) as writer:
                writer.write_checksum(rank)
    completed = plan.state == "COMPLETED"
    reached = cell.target.reached_by(value)
    ended = ("target" if reached else "epochs") if completed else "error"
    cause, measured = "" if completed else "synthetic failure", plan.with_records
    attempt.write_outcome(
        Outcome(
            plan.state, cause, reached if completed else None, ended, 0.0, clock + 1,
            train_seconds=clock if measured else None, value=value if measured else None,
        )
    )  # fmt: skip


def patch_noise(cell: Cell) -> str:
    """Runs of patched cells differ; those of the ordinary study stay what they were."""
    ordinary = cell.kfac is None or (cell.kfac.damping, cell.kfac.inverse_update_steps) == (0.003, WINDOW)
    return "" if ordinary else cell.content_hash


def evaluation(cell: Cell, step: int, seconds: float, epochs_needed: float, missed: bool) -> EvalRecord:
    epoch = step / STEPS_PER_EPOCH
    ceiling = 0.93 if missed else 0.98
    value = ceiling - (ceiling - 0.1) * math.exp(-epoch / epochs_needed * math.log((0.98 - 0.1) / 0.03))
    return EvalRecord(
        0, step, epoch, step * 64, seconds, 0.05 * epoch, seconds + 0.05 * epoch, "accuracy", value, "higher",
        train_loss=2 * (1 - value), learning_rate=0.1,
        metrics={"accuracy": value, "loss": 2.5 * (1 - value)},
    )  # fmt: skip


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
                made = (make_cell(method, world_size, seed, plan, patch) for patch in plan.patches)
                yield from {cell.id: cell for cell in made}.values()  # sgd has no kfac field to differ in


@pytest.fixture(scope="session")
def ordinary_folder(write_study) -> Path:
    return write_study(Plan())


@pytest.fixture(scope="session")
def study(ordinary_folder) -> Study:
    """Three methods, three world sizes, three seeds, strong scaling; one SGD run misses its target."""
    return load(ordinary_folder)


@pytest.fixture(scope="session")
def ordinary_report(ordinary_folder, tmp_path_factory) -> Path:
    """The page of the report on the ordinary study, with its figures beside it."""
    return write_report(ordinary_folder, tmp_path_factory.mktemp("report"))


BATCHES = {"training.global_batch_size": 64}, {"training.global_batch_size": 128}
FITTING = {
    "solver_by_batch": Plan(
        methods=("sgd", "comm_opt"), world_sizes=(4,), fixed_length=True, misses=(), epochs=4,
        patches=tuple(b | {"kfac.solver": solver} for b in BATCHES for solver in ("eigen", "inverse")),
    ),
    "nlcg_by_batch": Plan(
        methods=("sgd", "nlcg"), world_sizes=(4,), fixed_length=True, misses=(), epochs=4, patches=BATCHES
    ),
    "memory_budget": Plan(methods=("sgd", "comm_opt"), world_sizes=(4,), fixed_length=True, patches=BATCHES),
    "accuracy_by_world_size": Plan(methods=("sgd", "comm_opt"), fixed_length=True, epochs=4, misses=()),
    "update_intervals": Plan(
        methods=("sgd", "comm_opt"), world_sizes=(4,), fixed_length=True, epochs=4, misses=(),
        patches=({}, {"kfac.inverse_update_steps": 20}),
    ),
    "damping_interval": Plan(
        methods=("sgd", "comm_opt"), world_sizes=(4,), misses=(),
        patches=tuple({"kfac.damping": d, "kfac.inverse_update_steps": e} for d in (0.003, 0.03)
                      for e in (10, 20)),
    ),
    "energy_to_accuracy": Plan(gpus=True),
    "fraction": Plan(methods=("comm_opt", "mem_opt", "half"), world_sizes=(4,), misses=()),
}  # fmt: skip
"""For every figure that the ordinary study cannot fill, one that can."""


@pytest.fixture(scope="session")
def fitting(write_study, study) -> Callable[[str], Study]:
    """The study that fills a figure."""
    return functools.cache(
        lambda name: load(write_study(FITTING[name]), cache=False) if name in FITTING else study
    )


@pytest.fixture(scope="session")
def odd_studies(write_study) -> dict[str, Study]:
    """Studies that lack something."""
    small = Plan(seeds=(0,), epochs=6)
    plans = {
        "only failed cells": replace(small, state="FAILED", with_records=False),
        "no SGD arm": replace(small, methods=("comm_opt", "dp_kfac")),
        "one world size": replace(small, world_sizes=(2,)),
        "nobody reaches the target": replace(small, epochs=1),
        "weak scaling": replace(small, scaling="weak", diverges=(("comm_opt", 4, 0),)),
        "two runs and one that failed": replace(small, seeds=(0, 1), fails=(("comm_opt", 1, 1),)),
        "no cells": replace(small, methods=()),
    }
    return {name: load(_made(write_study(plan)), cache=False) for name, plan in plans.items()}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
