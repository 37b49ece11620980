"""Promise: a run folder becomes tidy frames in whatever state its runs are, or a clear error."""

from __future__ import annotations

import os
import re
import shutil

import numpy as np
import pandas as pd
import pytest

import analysis.records.cache
from analysis.records.left_out_notes import LeftOutWarning
from analysis.records.loading import load
from harness.cell import Cell
from harness.runs.attempt_outcome import Outcome
from harness.runs.records import SCHEMA_VERSION
from harness.runs.store import SweepFolder
from tests.analysis.conftest import Plan


@pytest.fixture
def folder(ordinary_folder, tmp_path) -> SweepFolder:
    """A private copy of a few runs of the ordinary study."""
    target = tmp_path / "runs" / "synthetic"
    for cell in sorted(ordinary_folder.glob("*-p2-s0-*")):
        shutil.copytree(cell, target / cell.name)
    return SweepFolder(target)


def attempt_of(folder: SweepFolder, method: str = "comm_opt"):
    return next(c for c in folder.cell_folders() if c.id.startswith(method)).latest()


def test_every_cell_is_one_row_with_its_settings_and_its_outcome(study):
    assert len(study.cells) == 27
    row = study.cells.set_index(["method", "world_size", "seed"]).loc[("comm_opt", 4, 1)]
    assert (row.strategy, row.solver, row.inverse_update_steps) == ("comm_opt", "eigen", 10)
    assert (row.global_batch_size, row.local_batch_size, row.scaling) == (64, 16, "strong")
    assert (row.state, row.target_value, row.target_direction) == ("COMPLETED", 0.95, "higher")
    assert row.oversubscribed
    assert row.reached_target


def test_phases_of_a_window_with_other_add_up_to_its_wall_and_calls_and_bytes_stay_with_them(study):
    windows = study.windows
    assert np.allclose(windows.filter(like="seconds.").sum(axis=1), windows["wall_seconds"])
    assert windows["seconds.other"].notna().sum() == 3 * 3 * 7 * 24  # methods x seeds x ranks x windows

    sent = study.windows.filter(like="sent_bytes.")
    assert set(sent.columns[(sent > 0).any()]) == {
        f"sent_bytes.{phase}"
        for phase in ("gradient_comm", "factor_comm", "inverse_comm", "precondition_comm")
    }
    calls = study.windows.filter(like="calls.").drop(columns="calls.other", errors="ignore")
    assert (calls.isna() | (calls == 10)).all(axis=None)


def test_a_line_truncated_by_a_kill_is_left_out(folder):
    path = attempt_of(folder).records(1)
    before = len(load(folder.path).windows)
    (path.parent / "outcome.json").unlink()
    path.write_bytes(path.read_bytes().rpartition(b'{"schema"')[0])  # a killed rank writes no checksum
    path.write_bytes(path.read_bytes()[:-40])
    assert len(load(folder.path).windows) == before - 1


@pytest.mark.parametrize("name", ["rank-00001.jsonl", "outcome.json"])
def test_a_run_of_a_newer_schema_is_left_out_with_its_file(folder, name):
    path = attempt_of(folder).path / name
    newer = SCHEMA_VERSION + 1
    text = path.read_text().partition('{"schema": 6, "kind": "seal"')[0]
    text = text.replace(f'"schema": {SCHEMA_VERSION}', f'"schema": {newer}', 1)
    path.write_text(re.sub(r',\s*"crc32": \d+', "", text))  # its checksum is of the older text
    with pytest.warns(LeftOutWarning, match=rf"{name}.* schema {newer}"):
        study = load(folder.path)
    assert study.cells["valid"].tolist().count(False) == 1


def test_a_diverged_run_keeps_its_nan(write_study):
    plan = Plan(methods=("sgd",), world_sizes=(2,), seeds=(0,), diverges=(("sgd", 2, 0),))
    study = load(write_study(plan))
    assert study.cells["valid"].all()
    assert study.evaluations["value"].isna().sum() == plan.epochs - 1


def test_a_failed_retry_does_not_hide_a_completed_attempt(folder):
    cell_folder = attempt_of(folder).cell_folder
    cell_folder.new_attempt().write_outcome(Outcome("FAILED", "out of disk", None, "error", 0.0, 1.0))
    row = load(folder.path).cells.set_index("cell").loc[cell_folder.id]
    assert (row.state, row.attempt, row.attempts) == ("COMPLETED", 1, 2)


def test_of_two_completed_attempts_the_latest_counts_and_without_one_the_latest(folder):
    first = attempt_of(folder)
    shutil.copytree(first.path, first.path.with_name("attempt-2"))
    row = load(folder.path).cells.set_index("cell").loc[first.cell_folder.id]
    assert (row.state, row.attempt, row.valid) == ("COMPLETED", 2, True)
    attempt = attempt_of(folder, "sgd")
    (attempt.path / "outcome.json").unlink()
    attempt.write_outcome(Outcome("OOM", "killed", None, "error", 0.0, 1.0))
    attempt.cell_folder.new_attempt()
    row = load(folder.path).cells.set_index("cell").loc[attempt.cell_folder.id]
    assert (row.state, row.attempt) == ("PENDING", 2)


def test_cells_not_yet_run_are_rows_with_their_state(folder):
    (attempt_of(folder).path / "outcome.json").unlink()
    staged = attempt_of(folder, "sgd").cell_folder.cell()
    folder.stage(Cell.model_validate({**staged.model_dump(), "seed": 77}))
    states = load(folder.path).cells.set_index(["method", "seed"])["state"]
    assert states[("comm_opt", 0)] == "RUNNING"
    assert states[("sgd", 77)] == "STAGED"


def test_a_study_of_nothing_has_the_columns_of_a_full_one(study, odd_studies):
    empty = odd_studies["no cells"]
    for name in ("cells", "windows", "evaluations", "environments"):
        columns = list(getattr(study, name).columns)
        assert list(getattr(empty, name).columns) == [
            one for one in columns if "." not in one or one == "seconds.other"
        ]
        assert getattr(empty, name).empty


def test_a_second_load_reads_no_record_file_and_gives_the_same(folder, monkeypatch):
    first = load(folder.path)
    monkeypatch.setattr("analysis.records.loading.read_records", lambda files: pytest.fail("read again"))
    second = load("synthetic", root=folder.path.parent)
    for name in ("cells", "windows", "evaluations", "environments"):
        pd.testing.assert_frame_equal(getattr(first, name), getattr(second, name))


def test_a_file_of_the_same_size_that_was_written_later_is_read_again(folder):
    path, before = attempt_of(folder).records(0), analysis.records.cache.fingerprint(folder.path)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert analysis.records.cache.fingerprint(folder.path) != before
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert analysis.records.cache.fingerprint(folder.path) == before


def test_runs_of_one_seed_on_one_host_are_a_block(study):
    blocks = study.cells.groupby("seed")["block"].unique()
    assert [len(names) for names in blocks] == [1, 1, 1]
    assert len({names[0] for names in blocks}) == 3


def test_derived_frames_can_be_deleted_and_a_changed_record_file_is_read_again(folder):
    before = load(folder.path)
    derived = analysis.records.cache.derived_folder(folder.path)
    assert derived == folder.path.parent.parent / "derived" / "synthetic"
    assert list(derived.rglob("*.parquet"))
    shutil.rmtree(derived)
    pd.testing.assert_frame_equal(load(folder.path).windows, before.windows)
    path = attempt_of(folder).records(0)
    (path.parent / "outcome.json").unlink()
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))  # checksum and an evaluation
    assert len(load(folder.path).evaluations) == len(before.evaluations) - 1


def test_arms_spell_out_only_what_varies(folder):
    assert set(load(folder.path).cells["arm"]) == {"sgd", "comm_opt", "dp_kfac"}
    cell = attempt_of(folder).cell_folder.cell()
    changed = cell.model_dump(mode="json")
    changed["kfac"]["damping"] = 0.01
    folder.stage(Cell.model_validate(changed))
    arms = set(load(folder.path).cells["arm"])
    assert arms == {"sgd", "dp_kfac", "comm_opt damping=0.003", "comm_opt damping=0.01"}
    cell = attempt_of(folder, "sgd").cell_folder.cell()
    changed = cell.model_dump(mode="json")
    changed["training"]["global_batch_size"] = 128
    folder.stage(Cell.model_validate(changed))
    cells = load(folder.path).cells
    assert cells["setting"].nunique() == 2  # runs of different batch sizes are never one arm
    assert cells.loc[cells["method"] == "sgd", "arm"].nunique() == 2
