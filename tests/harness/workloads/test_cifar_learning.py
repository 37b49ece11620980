"""Promise: real photographs are learned with K-FAC, and the loading is a small part of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cell import Cell
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import EvalRecord
from harness.training.train import Trainer
from harness.training.world import World
from tests.harness.workloads.batch_files import CPU, options

pytestmark = pytest.mark.slow

KFAC = {"damping": 0.03, "factor_update_steps": 2, "inverse_update_steps": 10}
SCHEDULE = {"momentum": 0.9, "weight_decay": 5e-4, "warmup_epochs": 1, "decay_epochs": [4]}


def train(folder: Path, **changes):
    fields = {
        "sweep": "test", "method": "m", "world_size": 1,
        "target": {"metric": "accuracy", "at_least": 0.33},
        "training": {"global_batch_size": 50, "epochs": 8},
    }  # fmt: skip
    cell = Cell.model_validate({**fields, **changes})
    records = []
    trainer = Trainer(cell, World(0, 1, CPU, "gloo"), HeartbeatWriter(folder / "heartbeat"), records.append)
    return trainer.run(), records


def test_a_third_is_right_of_ten_classes_after_minutes_at_most(tmp_path):
    # 2,000 images, a ResNet-20 of half the width; guessing gets 0.1
    small = options(data="embedded", model="resnet20", width=0.5, augment=False)
    result, records = train(
        tmp_path,
        workload={"name": "cifar10", "options": small},
        optimizer={"lr": 0.05, **SCHEDULE},
        kfac=KFAC,
    )
    evaluations = [record for record in records if isinstance(record, EvalRecord)]
    assert result.reached_target
    assert evaluations[-1].value >= 0.33
    assert evaluations[-1].train_loss < evaluations[0].train_loss
