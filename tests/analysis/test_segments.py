"""Promise: every step of a resumed run counts once, and tables and report mark the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.records.loading import load
from analysis.report.findings import cautions
from analysis.report.page import write_report
from harness.runs.attempt_outcome import Outcome
from harness.runs.record_lines import RecordWriter
from harness.runs.records import Record, SegmentRecord, to_line
from harness.runs.store import Attempt, SweepFolder
from tests.analysis.conftest import WINDOW, Plan, evaluation, make_cell, window_record

PLAN = Plan(methods=("comm_opt",), world_sizes=(2,), seeds=(0,), epochs=4)
STEPS = 80


def segment(rank: int, number: int, first_step: int, away: float = 0.0) -> SegmentRecord:
    return SegmentRecord(rank, number, first_step, None, 100.0, away, bitwise=True)


def windows(cell, rank: int, number: int, first: int, last: int) -> list[Record]:
    records: list[Record] = []
    for start in range(first, last, WINDOW):
        records.append(replace(window_record(cell, rank, start, 1.0 + number, PLAN), segment=number))
        if rank == 0 and (end := start + WINDOW) % 20 == 0:
            records.append(replace(evaluation(cell, end, 0.1 * end, 5, missed=False), segment=number))
    return records


def append(attempt: Attempt, rank: int, records: list[Record]) -> None:
    with RecordWriter(attempt.records(rank)) as writer:
        for record in records:
            writer.write(record)
        writer.write_checksum(rank)


def complete(attempt: Attempt, cell, last_step: int = STEPS) -> None:
    """Write the outcome that the last evaluation of `windows` has."""
    if attempt.read("launch.json") is None:
        attempt.write("launch.json", {"launcher": "local", "site": "laptop"})
    last = evaluation(cell, last_step, 0.1 * last_step, 5, missed=False)
    reached = cell.target.reached_by(last.value)
    stop = "target" if reached else "epochs"
    attempt.write_outcome(
        Outcome("COMPLETED", "", reached, stop, 0.0, 1e3, train_seconds=last.train_seconds, value=last.value)
    )


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path / "runs" / "synthetic")


@pytest.fixture
def requeued(folder) -> Attempt:
    """Saved before step 33; killed after step 60, in the middle of a line; resumed in the same attempt."""
    cell = make_cell("comm_opt", 2, 0, PLAN, {})
    attempt = folder.stage(cell).new_attempt()
    complete(attempt, cell)
    for rank in range(2):
        append(attempt, rank, [segment(rank, 0, 0), *windows(cell, rank, 0, 0, 60)])
        with attempt.records(rank).open("a") as file:
            file.write(to_line(window_record(cell, rank, 60, 1.0, PLAN))[:90])
        append(attempt, rank, [segment(rank, 1, 33, away=500.0), *windows(cell, rank, 1, 30, STEPS)])
    return attempt


def test_repeated_steps_count_once_and_the_later_time(folder, requeued):
    for _, rank in load(folder.path).windows.groupby("rank"):
        assert rank["first_step"].tolist() == list(range(0, STEPS, WINDOW))
        assert rank["segment"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    evaluations = load(folder.path).evaluations
    assert evaluations["step"].tolist() == [20, 40, 60, 80]
    assert evaluations["segment"].tolist() == [0, 1, 1, 1]


def test_a_damaged_line_after_an_unfinished_one_is_named_by_its_number(folder, requeued):
    path = requeued.records(1)
    path.write_text(path.read_text() + "nonsense\n")
    (why,) = load(folder.path).cells["why"]
    assert f"line {len(path.read_text().splitlines())}" in why


def test_a_run_may_resume_in_another_attempt(folder, requeued):
    cell = requeued.cell_folder.cell()
    again = requeued.cell_folder.new_attempt()
    again.write("launch.json", {"launcher": "local", "site": "laptop", "continues": 1})
    for rank in range(2):
        append(again, rank, [segment(rank, 2, 70, away=40.0), *windows(cell, rank, 2, 70, STEPS)])
    study = load(folder.path)
    (row,) = study.cells.itertuples()
    assert (row.attempt, row.segments, row.away_seconds) == (1, 2, 500.0)  # attempt 2 has not completed
    complete(again, cell)
    study = load(folder.path)
    (row,) = study.cells.itertuples()
    assert (row.attempt, row.segments, row.away_seconds, row.bitwise) == (2, 3, 540.0, True)
    kept = study.windows.query("rank == 0")
    assert dict(zip(kept["first_step"], kept["segment"], strict=True))[70] == 2
    assert len(kept) == 8


def test_a_start_without_a_checkpoint_replaces_everything_before(folder, requeued):
    cell = requeued.cell_folder.cell()
    (requeued.path / "outcome.json").unlink()
    for rank in range(2):
        append(requeued, rank, [segment(rank, 2, 0), *windows(cell, rank, 2, 0, 20)])
    kept = load(folder.path).windows
    assert set(kept["segment"]) == {2}
    assert kept["first_step"].max() == 10


def test_a_whole_window_that_ends_where_the_checkpoint_was_made_stays(folder):
    cell = make_cell("comm_opt", 2, 0, PLAN, {})
    attempt = folder.stage(cell).new_attempt()
    append(attempt, 0, [segment(0, 0, 0), *windows(cell, 0, 0, 0, 40), segment(0, 1, 40)])
    study = load(folder.path)
    assert study.windows["first_step"].max() == 30
    assert study.evaluations["step"].tolist() == [20, 40]


@pytest.mark.slow
def test_report_and_tables_say_which_runs_were_resumed(folder, requeued, tmp_path):
    assert load(folder.path).cells["segments"].tolist() == [2]
    page = write_report(folder.path, tmp_path / "report", panels=()).read_text()
    assert "1 of 1 runs were stopped and resumed" in page
    assert "at most 500 s a run" in page
    assert "resumed (2 segments)" in page


def test_records_older_than_segments_are_read_as_one_segment(folder):
    cell = make_cell("comm_opt", 2, 0, PLAN, {})
    attempt = folder.stage(cell).new_attempt()
    text = "".join(map(to_line, windows(cell, 0, 0, 0, 20)))
    old = text.replace('"schema": 6', '"schema": 1').replace(', "segment": 0', "")
    since = ', "wait_seconds": null, "instrument_seconds": null, "load_seconds": null, "cpu_mhz": null'
    old = old.replace(since, "")
    attempt.records(0).write_text(old.replace(', "checkpoint_seconds": 0.0', ""))
    study = load(folder.path)
    assert (len(study.evaluations), set(study.windows["segment"]), study.cells["segments"].tolist()) == (
        1,
        {0},
        [1],
    )
    assert study.evaluations["checkpoint_seconds"].tolist() == [0.0]
    assert "resumed" not in " ".join(cautions(study))
