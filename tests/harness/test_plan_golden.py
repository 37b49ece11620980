"""Promise: a cell's id and a record's line change only on purpose, because stored runs depend on them.

If a test here fails, a field, a default or the hash has changed. Keep the change only if stored runs are
meant to be different runs; then raise the schema version, note it in CHANGELOG.md, and write the new value
here.
"""

import json
from typing import Any

from harness.cell import Cell
from harness.runs.records import (
    CheckpointRecord,
    EvalRecord,
    FailureRecord,
    PhaseRecord,
    SegmentRecord,
    to_line,
)

COMMON = {
    "sweep": "demo",
    "workload": {"name": "digits", "options": {"width": 16}},
    "target": {"metric": "accuracy", "at_least": 0.97},
    "training": {"global_batch_size": 128, "epochs": 30},
    "optimizer": {"lr": 0.1},
    "world_size": 4,
}


def test_a_first_order_cell_keeps_its_id():
    assert Cell.model_validate({**COMMON, "method": "sgd"}).id == "sgd-p4-s0-e64291d03b"


def test_a_kfac_cell_keeps_its_id():
    cell = Cell.model_validate({**COMMON, "method": "comm_opt", "seed": 3, "kfac": {"damping": 0.003}})
    assert cell.id == "comm_opt-p4-s3-1e5ccce365"


def test_a_late_start_of_kfac_changes_the_id_and_the_default_does_not():
    kfac = {**COMMON, "method": "comm_opt", "seed": 3, "kfac": {"damping": 0.003}}
    late = Cell.model_validate({**kfac, "training": {**COMMON["training"], "kfac_start_epoch": 2}})
    none = Cell.model_validate({**kfac, "training": {**COMMON["training"], "kfac_start_epoch": 0}})
    assert late.id == "comm_opt-p4-s3-b1348f8d2f"
    assert none.id == "comm_opt-p4-s3-1e5ccce365"


def test_a_precision_changes_the_id_and_the_default_does_not():
    def sgd(**training: str) -> str:
        whole = {**COMMON, "method": "sgd", "training": {**COMMON["training"], **training}}
        return Cell.model_validate(whole).id

    assert sgd(precision="bfloat16") == "sgd-p4-s0-e0a981dc5b"
    assert sgd(precision="float32") == "sgd-p4-s0-e64291d03b"


def test_flat_averaging_and_single_ranks_keep_the_ids_from_before_it_was_a_setting():
    def sgd(**changes: Any) -> Cell:
        return Cell.model_validate({**COMMON, "method": "sgd", **changes})

    flat = {**COMMON["training"], "gradient_averaging": "flat"}
    assert sgd(training=flat).id == "sgd-p4-s0-f0f82140a1"
    assert sgd(world_size=1).id == "sgd-p1-s0-c8bbfec821"
    assert sgd(world_size=1, training=flat).id == "sgd-p1-s0-c8bbfec821"


def test_a_stored_cell_without_the_setting_was_averaged_flat():
    stored = json.dumps({**COMMON, "method": "sgd"}).encode()
    assert Cell.from_stored(stored).id == "sgd-p4-s0-f0f82140a1"
    assert Cell.from_stored(stored).training.gradient_averaging == "flat"
    whole = Cell.model_validate({**COMMON, "method": "sgd"})
    assert Cell.from_stored(whole.model_dump_json().encode()) == whole
    alone = json.dumps({**COMMON, "method": "sgd", "world_size": 1}).encode()
    assert Cell.from_stored(alone).training.gradient_averaging == "overlapped"  # one arm with new runs


def test_names_of_sweep_and_method_do_not_enter_the_hash():
    cell = Cell.model_validate({**COMMON, "method": "other", "sweep": "elsewhere"})
    assert cell.content_hash == "e64291d03b"


def test_a_phase_record_keeps_its_line():
    record = PhaseRecord(
        1, 10, 5, 160, 0.5, {"forward": 0.25}, {"forward": 5}, {"factor_comm": 64}, {"rss": 1024}
    )
    assert to_line(record) == (
        '{"schema": 6, "kind": "phases", "rank": 1, "first_step": 10, "steps": 5, "samples": 160, '
        '"wall_seconds": 0.5, "seconds": {"forward": 0.25}, "calls": {"forward": 5}, '
        '"sent_bytes": {"factor_comm": 64}, "memory_bytes": {"rss": 1024}, "segment": 0, '
        '"wait_seconds": null, "instrument_seconds": null, "load_seconds": null, "cpu_mhz": null}\n'
    )


def test_an_evaluation_record_keeps_its_line():
    record = EvalRecord(0, 12, 1.0, 1437, 2.5, 0.5, 3.25, "accuracy", 0.75, "higher", 0.5, 0.1)
    assert to_line(record) == (
        '{"schema": 6, "kind": "evaluation", "rank": 0, "step": 12, "epoch": 1.0, "samples": 1437, '
        '"train_seconds": 2.5, "eval_seconds": 0.5, "wall_seconds": 3.25, "metric": "accuracy", '
        '"value": 0.75, "direction": "higher", "train_loss": 0.5, "learning_rate": 0.1, '
        '"checkpoint_seconds": 0.0, "segment": 0, "metrics": null}\n'
    )


def test_a_failure_record_keeps_its_line():
    record = FailureRecord(2, 7, "forward", "RuntimeError", "no", "trace")
    assert to_line(record) == (
        '{"schema": 6, "kind": "failure", "rank": 2, "step": 7, "phase": "forward", "error": "RuntimeError", '
        '"message": "no", "traceback": "trace"}\n'
    )


def test_a_segment_record_keeps_its_line():
    record = SegmentRecord(1, 2, 40, 1, 5.0, 0.5, True, ("passed over",))
    assert to_line(record) == (
        '{"schema": 6, "kind": "segment", "rank": 1, "segment": 2, "first_step": 40, "attempt": 1, '
        '"started_at": 5.0, "away_seconds": 0.5, "bitwise": true, "notes": ["passed over"]}\n'
    )


def test_a_checkpoint_record_keeps_its_line():
    record = CheckpointRecord(0, 1, 40, "SIGUSR1", True, 0.25, 4096, "")
    assert to_line(record) == (
        '{"schema": 6, "kind": "checkpoint", "rank": 0, "segment": 1, "step": 40, "reason": "SIGUSR1", '
        '"stops": true, "seconds": 0.25, "written_bytes": 4096, "error": ""}\n'
    )
