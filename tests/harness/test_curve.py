"""Promise: a sweep sets curves of learning rate and damping, and an error names their field."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cell import Cell
from harness.errors import SweepError
from harness.runs.arms import fields_of
from harness.study.sweep import read_sweep
from kfac_core.schedule import Curve, Decay

SWEEP = """\
sweep: curves
workload: digits
target: {metric: accuracy, at_least: 0.9}
training: {global_batch_size: 256, epochs: 9}
optimizer: {lr: 0.3, SCHEDULE}
methods: [{name: sgd}, {name: comm_opt, kfac: {damping: DAMPING}}]
world_size: 1
repeats: 1
"""


def cells_of(tmp_path: Path, schedule: str = "", damping: str = "0.01") -> list[Cell]:
    path = tmp_path / "curves.yaml"
    path.write_text(
        SWEEP.replace(", SCHEDULE", f", {schedule}" if schedule else "").replace("DAMPING", damping)
    )
    return read_sweep(path).cells


def test_a_sweep_sets_curves_and_its_arms_are_named_after_them(tmp_path):
    sgd, kfac = cells_of(
        tmp_path,
        "schedule: {shape: cosine, warmup: 2}",
        "{initial: 0.03, shape: linear, length: 8, final: 0.5}",
    )
    assert sgd.optimizer.schedule == Decay(shape="cosine", warmup=2.0)
    assert kfac.kfac.damping == Curve(initial=0.03, shape="linear", length=8.0, final=0.5)
    assert Cell.from_stored(kfac.model_dump_json().encode()) == kfac
    assert fields_of(kfac)["kfac.damping"] == "0.03 linear length=8.0 final=0.5"
    assert sgd.content_hash != cells_of(tmp_path)[0].content_hash


@pytest.mark.parametrize(
    ("schedule", "damping", "sentence"),
    [
        ("schedule: {shape: cosin}", "0.01", "optimizer.schedule.shape='cosin' is not one of cosine"),
        (
            "schedule: {shape: cosine, power: 2}",
            "0.01",
            "optimizer.schedule.power=2 has no meaning for shape",
        ),
        ("schedule: {shape: cosine, length: 12}", "0.01", "optimizer.schedule.length=12 must be <= epochs=9"),
        ("schedule: {shape: one_cycle, warmup: 9}", "0.01", "schedule.warmup=9 must be < epochs=9"),
        ("warmup_epochs: 2, schedule: {shape: cosine}", "0.01", "warmup_epochs has no effect beside"),
        ("", "{initial: 0.1, shape: linear}", "kfac.damping.length must be given"),
        ("", "{initial: 0.1, factor: 0.5}", "kfac.damping.at is missing"),
    ],
)
def test_an_error_names_the_field_of_the_curve(tmp_path, schedule, damping, sentence):
    with pytest.raises(SweepError) as raised:
        cells_of(tmp_path, schedule, damping)
    assert sentence in str(raised.value)
