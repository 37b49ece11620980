"""Promise: energy to target is that of the windows before it; without a counter, the reason is given."""

import math

import pytest

from analysis.energy import energy_to_target
from analysis.figures import FIGURES, NothingToDraw
from analysis.records.loading import load
from harness.runs.record_lines import RecordWriter
from harness.runs.records import DeviceRecord
from tests.analysis.conftest import STEPS_PER_EPOCH, Plan

WATTS = 300.0  # of every rank of the synthetic study


def test_joules_are_those_of_all_ranks_until_the_target_and_none_of_a_run_that_missed(write_study):
    study = load(write_study(Plan(gpus=True)))
    runs = energy_to_target(study)
    assert len(runs) == len(study.cells)
    assert math.isinf(runs.loc[~runs["reached"], "joules"].item())
    windows = study.windows
    for run in runs[runs["reached"]].itertuples():
        own = windows[windows["run"] == run.run]
        before = own[own["first_step"] < run.epochs * STEPS_PER_EPOCH]
        assert 0 < len(before) < len(own)
        assert run.joules == pytest.approx(WATTS * before["wall_seconds"].sum())
        assert run.all_joules == pytest.approx(WATTS * own["wall_seconds"].sum())
        assert run.watts == pytest.approx(WATTS * run.world_size, rel=0.05)  # over the slowest rank's time
    numbers = FIGURES["energy_to_accuracy"].draw(study).numbers  # joules, though the axis has kilojoules
    for _, group in numbers[numbers["world_size"] < 4].groupby(["arm", "world_size"]):
        assert group["joules_median"].unique() == pytest.approx([group["joules"].median()])


def test_without_a_driver_the_figure_gives_the_reason_in_the_records(write_study):
    folder = write_study(Plan(methods=("sgd",), world_sizes=(1,), seeds=(0,)))
    with pytest.raises(NothingToDraw, match="older than device records"):
        FIGURES["energy_to_accuracy"].draw(load(folder))
    (file,) = folder.glob("*/attempt-1/rank-00000.jsonl")
    with RecordWriter(file) as writer:
        writer.write(DeviceRecord(0, 0, 0, 10, "the rank computes on cpu"))
        writer.write_checksum(0)
    study = load(folder)
    assert study.devices["energy_joules"].isna().all()
    with pytest.raises(NothingToDraw, match="the rank computes on cpu"):
        FIGURES["energy_to_accuracy"].draw(study)
