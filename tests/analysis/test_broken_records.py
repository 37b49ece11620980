"""Promise: a run whose files are damaged, missing or doubled is left out aloud, and changes no number."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from analysis.metrics import time_to_accuracy
from analysis.records.left_out_notes import LeftOutWarning
from analysis.records.loading import NUMBERS, load
from analysis.records.study import Study
from analysis.report.page import write_report
from harness.cli import main
from harness.runs.record_lines import RecordWriter
from harness.runs.store import Attempt
from tests.analysis.conftest import Plan

PLAN = Plan(methods=("sgd", "comm_opt"), world_sizes=(2,), seeds=(0,), misses=(), epochs=9)
FEW = ("--figure", "time_to_accuracy")


@pytest.fixture(scope="module")
def made(write_study) -> Path:
    return write_study(PLAN)


@pytest.fixture(scope="module")
def rest(made) -> Study:
    """The study without the run that tests damage."""
    whole = load(made, cache=False)
    return whole.only(whole.cells["method"] == "sgd")


@pytest.fixture(params=["with checksums", "of schema 3"])
def attempt(made, tmp_path, request) -> Attempt:
    """The run of comm_opt in a copy of the study, as this version wrote it or as an older one would have."""
    target = tmp_path / "runs" / "synthetic"
    shutil.copytree(made, target)
    for path in target.glob("*/attempt-1") if request.param == "of schema 3" else ():
        make_old(path)
    return Attempt(next(target.glob("comm_opt-*")) / "attempt-1")


def make_old(path: Path) -> None:
    """Write an attempt's files as a version did that had no checksums."""
    for file in path.glob("*.json"):
        content = json.loads(file.read_text())
        del content["crc32"]
        if file.name == "outcome.json":
            content["schema"] = 3
        file.write_text(json.dumps(content, indent=1))
    for file in path.glob("rank-*.jsonl"):
        lines = file.read_text().replace('"schema": 6', '"schema": 3').splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"kind": "seal"' not in line))


def loaded(attempt: Attempt) -> Study:
    return load(attempt.path.parent.parent, cache=False)


def cut(name: str, share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, int((path / name).stat().st_size * share))


def double(path: Path) -> None:
    lines = (path / "rank-00000.jsonl").read_text().splitlines(keepends=True)
    (path / "rank-00000.jsonl").write_text("".join([*lines[:3], lines[2], *lines[3:]]))


def without_end(path: Path) -> None:
    lines = (path / "rank-00001.jsonl").read_text().splitlines(keepends=True)
    (path / "rank-00001.jsonl").write_text("".join(lines[:-2]))


def swap(path: Path) -> None:
    (path / "rank-00000.jsonl").rename(path / "other")
    (path / "rank-00001.jsonl").rename(path / "rank-00000.jsonl")
    (path / "other").rename(path / "rank-00001.jsonl")


def pipe(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return make


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        text = (path / name).read_text()
        assert before in text
        (path / name).write_text(text.replace(before, after, 1))

    return change


# What any version's files show: cut, emptied, missing, doubled, of another rank, not of their type.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "rank 0's records cut in half": (cut("rank-00000.jsonl", 0.5), "rank 0|no evaluation|no checksum"),
    "rank 1's last records missing": (without_end, "rank 1's windows end at step|no checksum at its end"),
    "rank 1's records missing": (lambda path: (path / "rank-00001.jsonl").unlink(), "rank 1 has no windows"),
    "a doubled record": (double, "doubled or out of order|does not match the checksum"),
    "ranks swapped": (swap, "must be 0 in this file"),
    "a value as text": (
        edit("rank-00000.jsonl", '"value": ', '"value": "0.9", "x": '), "rank-00000.jsonl"
    ),
    "NaN in a window": (
        edit("rank-00001.jsonl", '"wall_seconds": ', '"wall_seconds": NaN, "x": '), "rank-00001.jsonl"
    ),
    "a window nested deep": (
        edit("rank-00001.jsonl", '"memory_bytes": {', '"memory_bytes": {"a": ' + "[" * 200_000),
        "rank-00001.jsonl",
    ),
    "an unfinished line in the middle": (
        edit("rank-00001.jsonl", '"wall_seconds"', '"wall_sec'), "rank-00001.jsonl"
    ),
    "records that are a pipe": (pipe("rank-00001.jsonl"), "is a folder, pipe"),
    "a state that is no end": (edit("outcome.json", '"COMPLETED"', '"RUNNING"'), "state must be one|crc32"),
    "an empty outcome": (cut("outcome.json", 0), "outcome.json: holds nothing"),
    "an empty environment": (cut("environment.json", 0), "environment.json: h"),
    "an environment nested deep": (
        lambda path: (path / "environment.json").write_text('{"a":' + "[" * 200_000), "environment.json: "
    ),
    "a run that continues itself": (
        edit("launch.json", "{", '{"continues": 1,'), "continues=1, must be the number of an attempt|crc32"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_a_broken_run_is_left_out_with_the_reason_and_no_other_number_changes(attempt, rest, what):
    damage, reason = DAMAGE[what]
    damage(attempt.path)
    check_left_out(attempt, rest, reason)


def check_left_out(attempt: Attempt, rest: Study, reason: str) -> None:
    with pytest.warns(LeftOutWarning, match="1 of 2 run is left out"):
        study = loaded(attempt)
    (row,) = study.cells[~study.cells["valid"]].itertuples()
    assert row.method == "comm_opt"
    assert re.search(reason, row.why), row.why
    assert study.cells.loc[~study.cells["valid"], list(NUMBERS)].isna().all(axis=None)
    assert time_to_accuracy(study)["method"].tolist() == ["sgd"]
    for name in ("windows", "evaluations", "environments"):
        kept, alone = (getattr(one, name).dropna(axis=1, how="all") for one in (study, rest))
        pd.testing.assert_frame_equal(kept, alone, check_categorical=False, check_dtype=False)


def no_checksum(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        head, _, _ = (path / name).read_text().rpartition(",\n")
        (path / name).write_text(f"{head}\n}}\n")

    return change


# What only a checksum shows: everything else agrees.
CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another number": (edit("rank-00001.jsonl", '"rss": 290000000', '"rss": 290000001'), "does not match"),
    "the records' checksum cut off": (
        lambda path: (path / "rank-00001.jsonl").write_text(
            "".join((path / "rank-00001.jsonl").read_text().splitlines(keepends=True)[:-1])
        ),
        "has no checksum at its end: records were cut",
    ),
    "another start": (edit("outcome.json", '"started_at": 0.0', '"started_at": 0.1'), "crc32=.*changed"),
    "the outcome's checksum removed": (no_checksum("outcome.json"), "has no checksum at its end"),
    "the environment's checksum removed": (no_checksum("environment.json"), "has no checksum at its end"),
}  # fmt: skip


@pytest.mark.parametrize("attempt", ["with checksums"], indirect=True)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_leaves_everything_consistent_does_not_match_the_checksum(attempt, rest, what):
    change, reason = CHANGES[what]
    change(attempt.path)
    check_left_out(attempt, rest, reason)


def test_an_undamaged_run_is_valid(attempt):
    study = loaded(attempt)
    assert study.cells["valid"].all()
    assert study.cells["why"].eq("").all()


def test_report_and_terminal_begin_with_what_is_left_out(attempt, tmp_path, capsys, no_images):
    (attempt.path / "rank-00001.jsonl").unlink()
    runs = attempt.path.parent.parent.parent
    assert main(["report", "synthetic", "--runs", str(runs), "--out", str(tmp_path / "report"), *FEW]) == 0
    assert "1 of 2 run is left out of all numbers" in capsys.readouterr().err
    first = (tmp_path / "report" / "report.md").read_text().splitlines()[2]
    assert "1 of 2 run is left out of all numbers" in first
    assert "rank 1 has no windows" in first
    assert "left out: " in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.parametrize("name", ["outcome.json", "launch.json", "environment.json"])
def test_commands_show_an_empty_file_and_do_not_fail(attempt, name, capsys):
    (attempt.path / name).write_bytes(b"")
    runs = attempt.path.parent.parent.parent
    assert main(["status", "synthetic", "--runs", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert main(["compare", str(attempt.path.parent.parent), "synthetic", "--runs", str(runs)]) == 0
    assert f"{name}: h" in capsys.readouterr().err
    if name == "outcome.json":
        assert "1 LOST" in shown
        assert "it is not known how it ended" in " ".join(shown.split())


def test_two_attempts_that_continue_each_other_end_the_reading(made, tmp_path):
    target = tmp_path / "runs" / "synthetic"
    shutil.copytree(made, target)
    first = Attempt(next(target.glob("comm_opt-*")) / "attempt-1")
    second = first.cell_folder.new_attempt()
    second.write("launch.json", {"launcher": "local", "continues": 1})
    first.write("launch.json", {"launcher": "local", "continues": 2})
    with RecordWriter(second.records(0)) as writer:
        writer.write_checksum(0)
    with pytest.warns(LeftOutWarning, match="continues=2, must be the number of an attempt before 1"):
        loaded(first)


def test_a_damaged_cache_is_read_anew(made, tmp_path, no_images):
    target = tmp_path / "runs" / "synthetic"
    shutil.copytree(made, target)
    before = load(target)
    for path in (tmp_path / "derived").rglob("*.parquet"):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.write_bytes(content)
    again = load(target)
    pd.testing.assert_frame_equal(again.windows, before.windows)
    pd.testing.assert_frame_equal(again.cells, before.cells)
    assert write_report(again, tmp_path / "report", panels=()).exists()
