"""Promise: a cell's id and a record's line change only on purpose, because stored runs depend on them.

If a test here fails, a field, a default or the hash has changed. Keep the change only if stored runs are
meant to be different runs; then raise the schema version, note it in CHANGELOG.md, and write the new value
here.
"""

import json

import pytest

from harness.cell import Cell
from harness.runs.records import (
    CheckpointRecord,
    EvalRecord,
    FailureRecord,
    PhaseRecord,
    SegmentRecord,
    to_line,
)
from kfac_core import KFACConfig

COMMON = {
    "sweep": "demo",
    "workload": {"name": "digits", "options": {"width": 16}},
    "target": {"metric": "accuracy", "at_least": 0.97},
    "training": {"global_batch_size": 128, "epochs": 30},
    "optimizer": {"lr": 0.1},
    "world_size": 4,
}
KFAC = {"damping": 0.003, "factor_start": "identity", "kl_clip": 0.001}


FLAT = {"gradient_averaging": "flat"}
IDS = [
    ({}, {}, "sgd-p4-s0-e64291d03b"),
    ({"method": "other", "sweep": "elsewhere"}, {}, "other-p4-s0-e64291d03b"),  # names are not hashed
    ({"method": "comm_opt", "seed": 3, "kfac": KFAC}, {}, "comm_opt-p4-s3-1e5ccce365"),
    ({"method": "comm_opt", "seed": 3, "kfac": {}}, {}, "comm_opt-p4-s3-b1feea47aa"),
    ({"method": "comm_opt", "seed": 3, "kfac": {"relative_damping": 0.3}}, {}, "comm_opt-p4-s3-b1feea47aa"),
    ({"method": "comm_opt", "seed": 3, "kfac": {"fixed_norm": None}}, {}, "comm_opt-p4-s3-b1feea47aa"),
    ({"method": "comm_opt", "seed": 3, "kfac": {"fixed_norm": 0.1}}, {}, "comm_opt-p4-s3-57e647cc65"),
    ({"method": "comm_opt", "seed": 3, "kfac": KFAC}, {"kfac_start_epoch": 0}, "comm_opt-p4-s3-1e5ccce365"),
    ({"method": "comm_opt", "seed": 3, "kfac": KFAC}, {"kfac_start_epoch": 2}, "comm_opt-p4-s3-b1348f8d2f"),
    ({}, {"precision": "float32"}, "sgd-p4-s0-e64291d03b"),
    ({}, {"precision": "bfloat16"}, "sgd-p4-s0-e0a981dc5b"),
    ({}, {"sync_batch_norm": False}, "sgd-p4-s0-e64291d03b"),
    ({}, {"sync_batch_norm": True}, "sgd-p4-s0-635ba915f0"),
    ({"world_size": 1}, {"sync_batch_norm": True}, "sgd-p1-s0-c8bbfec821"),
    ({}, FLAT, "sgd-p4-s0-f0f82140a1"),  # as before it was a setting
    ({"world_size": 1}, {}, "sgd-p1-s0-c8bbfec821"),
    ({"world_size": 1}, FLAT, "sgd-p1-s0-c8bbfec821"),
]


@pytest.mark.parametrize(("changes", "training", "id"), IDS)
def test_a_cell_keeps_its_id_which_a_default_that_is_spelt_out_does_not_change(changes, training, id):
    whole = {**COMMON, "method": "sgd", "training": {**COMMON["training"], **training}, **changes}
    assert Cell.model_validate(whole).id == id


def test_a_stored_cell_without_the_setting_was_averaged_flat():
    stored = json.dumps({**COMMON, "method": "sgd"}).encode()
    assert Cell.from_stored(stored).id == "sgd-p4-s0-f0f82140a1"
    assert Cell.from_stored(stored).training.gradient_averaging == "flat"
    whole = Cell.model_validate({**COMMON, "method": "sgd"})
    assert Cell.from_stored(whole.model_dump_json().encode()) == whole
    alone = json.dumps({**COMMON, "method": "sgd", "world_size": 1}).encode()
    assert Cell.from_stored(alone).training.gradient_averaging == "overlapped"  # one arm with new runs


def test_a_stored_cell_older_than_grafting_had_none():
    kfac = {"damping": 0.003, "factor_start": "identity", "kl_clip": None}
    stored = {**COMMON, "method": "comm_opt", "world_size": 1, "kfac": kfac}
    assert Cell.from_stored(json.dumps(stored).encode()).kfac == KFACConfig.sc20(damping=0.003, kl_clip=None)
    assert Cell.model_validate(stored).kfac.grafting


LINES = [
    (
        PhaseRecord(
            1, 10, 5, 160, 0.5, {"forward": 0.25}, {"forward": 5}, {"factor_comm": 64}, {"rss": 1024}
        ),
        '{"schema": 6, "kind": "phases", "rank": 1, "first_step": 10, "steps": 5, "samples": 160, '
        '"wall_seconds": 0.5, "seconds": {"forward": 0.25}, "calls": {"forward": 5}, '
        '"sent_bytes": {"factor_comm": 64}, "memory_bytes": {"rss": 1024}, "segment": 0, '
        '"wait_seconds": null, "instrument_seconds": null, "load_seconds": null, "cpu_mhz": null}',
    ),
    (
        EvalRecord(0, 12, 1.0, 1437, 2.5, 0.5, 3.25, "accuracy", 0.75, "higher", 0.5, 0.1,
                   metrics={"accuracy": 0.75, "loss": 0.25}),
        '{"schema": 6, "kind": "evaluation", "rank": 0, "step": 12, "epoch": 1.0, "samples": 1437, '
        '"train_seconds": 2.5, "eval_seconds": 0.5, "wall_seconds": 3.25, "metric": "accuracy", '
        '"value": 0.75, "direction": "higher", "train_loss": 0.5, "learning_rate": 0.1, '
        '"checkpoint_seconds": 0.0, "segment": 0, "metrics": {"accuracy": 0.75, "loss": 0.25}}',
    ),
    (
        FailureRecord(2, 7, "forward", "RuntimeError", "no", "trace"),
        '{"schema": 6, "kind": "failure", "rank": 2, "step": 7, "phase": "forward", "error": "RuntimeError", '
        '"message": "no", "traceback": "trace"}',
    ),
    (
        SegmentRecord(1, 2, 40, 1, 5.0, 0.5, True, ("passed over",)),
        '{"schema": 6, "kind": "segment", "rank": 1, "segment": 2, "first_step": 40, "attempt": 1, '
        '"started_at": 5.0, "away_seconds": 0.5, "bitwise": true, "notes": ["passed over"]}',
    ),
    (
        CheckpointRecord(0, 1, 40, "SIGUSR1", True, 0.25, 4096, ""),
        '{"schema": 6, "kind": "checkpoint", "rank": 0, "segment": 1, "step": 40, "reason": "SIGUSR1", '
        '"stops": true, "seconds": 0.25, "written_bytes": 4096, "error": ""}',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("record", "line"), LINES, ids=lambda value: getattr(value, "KIND", ""))
def test_a_record_keeps_its_line(record, line):
    assert to_line(record) == f"{line}\n"
