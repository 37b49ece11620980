"""Runs that are stopped and resumed, with real ranks, trainer and checkpoint store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.cell import Cell
from harness.runs.attempt_outcome import Result
from harness.runs.checkpoint_store import Request
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.record_lines import RecordWriter
from harness.runs.records import EvalRecord, PhaseRecord, Record
from harness.runs.store import Attempt, sweep_folder
from harness.training.checkpoint import Checkpoints, Schedule
from harness.training.train import Trainer
from harness.training.world import World
from kfac_core.config import PAPERS

KFAC = {"factor_update_steps": 2, "inverse_update_steps": 5, "damping": 0.01}
NEVER = Schedule()
METHODS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "comm_opt": {"kfac": KFAC},
    "mem_opt": {"kfac": {**KFAC, "strategy": "mem_opt"}},
    # from the step after the first stop of the tests on: stopped while K-FAC waits, and after it began
    "late": {
        "kfac": KFAC,
        "training": {"global_batch_size": 256, "epochs": 4, "window_steps": 5, "kfac_start_epoch": 2.8},
    },
    "nlcg": {"optimizer": {"lr": 0.2, "name": "nlcg"}},
    "nlcg-kfac": {
        "optimizer": {"lr": 0.1, "name": "nlcg"},
        "kfac": {**PAPERS["sc20"], **KFAC, "kl_clip": None},
    },
}


def cell(method: str, world_size: int, **changes: Any) -> Cell:
    fields: dict[str, Any] = {
        "sweep": "test", "method": method, "workload": "digits", "world_size": world_size,
        "target": {"metric": "accuracy", "at_least": 0.999},
        "training": {"global_batch_size": 256, "epochs": 4, "window_steps": 5},
        "optimizer": {"lr": 0.1, "warmup_epochs": 2},
    }  # fmt: skip
    return Cell.model_validate({**fields, **METHODS[method], **changes})


def new_attempt(root: Path, cell: Cell, continues: int | None = None) -> Attempt:
    attempt = sweep_folder("test", root).stage(cell).new_attempt()
    attempt.write("launch.json", {"continues": continues})
    return attempt


@dataclass(frozen=True)
class Run:
    """The result of one rank.

    Attributes:
        bits: parameters and all other state that the run would continue from, as bytes.
    """

    result: Result
    records: list[Record]
    bits: dict[str, bytes]

    def numbers(self) -> list[tuple[Any, ...]]:
        """All values of its records except times and memory."""
        values: list[tuple[Any, ...]] = []
        for one in self.records:
            if isinstance(one, PhaseRecord):
                counted = sorted(one.calls.items()), sorted(one.sent_bytes.items())
                values.append((one.rank, one.first_step, one.steps, one.samples, *counted))
            if isinstance(one, EvalRecord):
                values.append(
                    (one.step, one.epoch, one.samples, one.value, one.train_loss, one.learning_rate)
                )
        return values


def train(
    rank: int, world_size: int, cell: Cell, attempt: Attempt, schedule: Schedule = NEVER,
    stop_before: int | None = None, interfere: Callable[[Trainer], None] | None = None,
) -> Run:  # fmt: skip
    """Train on this rank, from a checkpoint if there is one; stop before a step if one is given."""
    store = dist.distributed_c10d._get_default_store() if world_size > 1 else None
    world = World(rank, world_size, torch.device("cpu"), "gloo", store=store)
    records: list[Record] = []
    with RecordWriter(attempt.records(rank)) as writer:

        def write(record: Record) -> None:
            records.append(record)
            writer.write(record)

        checkpoints = Checkpoints(attempt, world, write, schedule)
        trainer = Trainer(cell, world, HeartbeatWriter(attempt.heartbeat(rank)), write, checkpoints)
        _arrange_stop(checkpoints, stop_before)
        if interfere is not None:
            interfere(trainer)
        result = trainer.run()
    return Run(result, records, bits_of(trainer))


def _arrange_stop(checkpoints: Checkpoints, stop_before: int | None) -> None:
    if stop_before is not None:
        original = checkpoints.request

        def request(step: int, epoch: int, index: int) -> Request | None:
            stop = Request("SIGUSR1", stops=True) if step == stop_before else None
            return stop or original(step, epoch, index)

        checkpoints.request = request  # type: ignore[method-assign]  # on this step, on all ranks


def bits_of(trainer: Trainer) -> dict[str, bytes]:
    found = {name: p.detach().numpy().tobytes() for name, p in trainer.state.model.named_parameters()}
    for index, state in enumerate(trainer.state.optimizer.state.values()):
        for key, value in state.items():
            found[f"optimizer.{index}.{key}"] = torch.as_tensor(value).numpy().tobytes()
    if trainer.state.kfac is not None:
        shard = trainer.state.kfac.state_shard()
        for kind in ("factors", "second_order"):
            found |= {f"{kind}.{name}": value.numpy().tobytes() for name, value in shard[kind].items()}
    found["random"] = torch.get_rng_state().numpy().tobytes()
    return found
