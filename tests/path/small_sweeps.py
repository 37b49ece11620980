"""Shipped sweeps made small: every method, schedule and setting stays; data, models and worlds shrink."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from harness.cell import Cell, Target
from harness.runs.attempt_outcome import Outcome
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.layers_file import describe
from harness.runs.record_lines import RecordWriter
from harness.runs.records import Record
from harness.runs.store import SweepFolder
from harness.training.train import Result, Trainer
from harness.training.world import World
from harness.workloads.digits.digits import read_table
from kfac_core.config import KFACConfig
from kfac_core.schedule import Milestones

JOBS = Path("jobs")
FILES = sorted([*JOBS.glob("sweeps/*.yaml"), *JOBS.glob("papers/*/*/*.yaml")])
SEEDS, STEPS = 2, 2

_TEXT = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 64, "tokenizer": "", "test_examples": 8}
_TINY: dict[str, dict[str, Any]] = {
    "multi30k": {**_TEXT, "feed_forward": 32, "longest": 8},
    "bert": {**_TEXT, "sequence_length": 8},
    "gpt": {**_TEXT, "sequence_length": 8},
}
"""Options of the workloads of text that train in moments. Images, of any size, are digits here."""


def small(cells: Sequence[Cell]) -> list[Cell]:
    """A sweep's cells in one or two ranks and a few steps: its smallest and largest world and batch, twice.

    The smallest world becomes one rank where there are several, every other one two at most.
    """
    worlds, batches = _ends(_world(cell) for cell in cells), _ends(_batch(cell) for cell in cells)
    models = sorted({_model(cell) for cell in cells})
    shortest = min(cell.training.epochs for cell in cells)
    made = []
    for cell in cells:
        if cell.seed < SEEDS and _world(cell) in worlds and _batch(cell) in batches:
            size = 1 if len(worlds) > 1 and _world(cell) == worlds[0] else min(2, _world(cell))
            place = batches.index(_batch(cell))
            epochs = 1 + (cell.training.epochs > shortest)
            made.append(_smaller(cell, size, place, models.index(_model(cell)), epochs))
    return list({cell.id: cell for cell in made}.values())


def _world(cell: Cell) -> int:
    return cell.world_size


def _batch(cell: Cell) -> int:
    """The batch that the sweep sets: it may be of all ranks or of each."""
    return cell.training.global_batch_size or cell.training.local_batch_size or 0


def _model(cell: Cell) -> tuple[str, float]:
    return str(cell.workload.options.get("model", "")), float(cell.workload.options.get("width", 1))


def _ends(values: Iterable[int]) -> list[int]:
    found = sorted(set(values))
    return list(dict.fromkeys([found[0], found[-1]]))


def schedules(config: KFACConfig) -> dict[str, Milestones]:
    """The options of K-FAC that change over time."""
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in options.items() if isinstance(value, Milestones)}


def _smaller(cell: Cell, size: int, batch: int, model: int, epochs: int) -> Cell:
    name, target = cell.workload.name, cell.target
    if name in _TINY:
        whole = 2 * (batch + 1)
        options = {**_TINY[name], "data": "synthetic", "train_examples": 4 * STEPS}
        kept = {"multi30k": "bleu", "bert": "next_sentence"}.get(name)
        options |= {kept: cell.workload.options[kept]} if kept else {}
    elif name == "poisson":
        options, whole = {**cell.workload.options, "inside": 12, "boundary": 6}, 18
    else:
        name, options, whole = "digits", {"width": 4 + 2 * model}, 480 + 160 * batch  # of 1,437 images
        target = target if target.metric == "loss" else Target(metric="accuracy", at_least=target.value)
    length = cell.training.epochs / epochs
    training = cell.training.model_dump() | {
        "epochs": epochs, "window_steps": None, "kfac_start_epoch": cell.training.kfac_start_epoch / length,
        "evaluate_every_epochs": 1, "accumulate": 1 if cell.training.accumulate == 1 else whole // size,
    }  # fmt: skip
    if cell.training.scaling == "strong":
        training["global_batch_size"] = whole
    else:
        training["local_batch_size"] = whole // size
    optimizer = cell.optimizer.model_dump() | {
        "warmup_epochs": cell.optimizer.warmup_epochs / length,
        "decay_epochs": [epoch / length for epoch in cell.optimizer.decay_epochs],
    }
    content = cell.model_dump() | {
        "workload": {"name": name, "options": options}, "target": target, "training": training,
        "optimizer": optimizer, "world_size": size, "kfac": _kfac(cell, size, length),
    }  # fmt: skip
    return Cell.model_validate(content)


def _kfac(cell: Cell, size: int, length: float) -> dict[str, Any] | None:
    if cell.kfac is None:
        return None
    found = {field.name: getattr(cell.kfac, field.name) for field in fields(cell.kfac)}
    for name, value in schedules(cell.kfac).items():
        found[name] = replace(value, at=tuple(epoch / length for epoch in value.at))
    if found["grad_worker_fraction"] is not None:
        found["grad_worker_fraction"] = max(found["grad_worker_fraction"], 1 / size)
    if cell.workload.name not in _TINY:
        found["skip"] = ()  # these layers are not in the network of digits
    return found


class Trained:
    """What a cell's ranks recorded.

    Attributes:
        records: by rank.
        layers: the content of `layers.json`, or None without K-FAC.
    """

    def __init__(self, ranks: Sequence[tuple[Result, list[Record], dict[str, Any] | None]]) -> None:
        self.result, _, self.layers = ranks[0]
        self.records = [records for _, records, _ in ranks]


_digits = cache(read_table)


def train(rank: int, world_size: int, cell: Cell, folder: str) -> tuple[Result, list[Record], Any]:
    """Train one rank's share; runs in a process of `tests.kfac_core.worlds.World`.

    Half of these few steps' time would go into reading the digits again and into timing the timer.
    """
    records: list[Record] = []
    world = World(rank, world_size, torch.device("cpu"), "gloo")
    heartbeat = HeartbeatWriter(Path(folder) / f"heartbeat-{rank}")
    with (
        patch("harness.workloads.digits.digits.read_table", _digits),
        patch("harness.training.train.seconds_per_entry", lambda *_: 1e-6),
    ):
        trainer = Trainer(cell, world, heartbeat, records.append, traced_steps=range(1))
    result = trainer.run()
    kfac = trainer.state.kfac
    return result, records, None if kfac is None else describe(kfac.shapes, kfac.placement)


def key(cell: Cell) -> str:
    """Equal for cells that differ in sweep, method and seed only."""
    return Cell.model_validate(cell.model_dump() | {"seed": 0}).content_hash


def write_attempt(folder: SweepFolder, cell: Cell, trained: Trained) -> None:
    """Store a run; another seed takes a little longer."""
    attempt = folder.stage(cell).new_attempt()
    attempt.write("launch.json", {"launcher": "local", "host": "here", "oversubscribed": False})
    attempt.write("environment.json", {"host": "here"})
    if trained.layers is not None:
        attempt.write("layers.json", trained.layers)
    for rank, records in enumerate(trained.records):
        with RecordWriter(attempt.records(rank)) as writer:
            for record in records:
                writer.write(_slower(record, 1 + 0.01 * cell.seed))
            writer.write_checksum(rank)
    result = trained.result
    attempt.write_outcome(
        Outcome(
            "COMPLETED", "", result.reached_target, result.stop_reason, started_at=0.0, ended_at=1.0,
            train_seconds=result.train_seconds * (1 + 0.01 * cell.seed), value=result.value,
        )
    )  # fmt: skip


def _slower(record: Record, factor: float) -> Record:
    clocks = [name for name in ("train_seconds", "eval_seconds", "wall_seconds") if hasattr(record, name)]
    changed = {name: getattr(record, name) * factor for name in clocks}
    if hasattr(record, "calls"):
        changed["seconds"] = {phase: seconds * factor for phase, seconds in record.seconds.items()}
    return replace(record, **changed)
