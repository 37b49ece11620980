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


@pytest.fixture
def attempt(made, tmp_path) -> Attempt:
    """The run of comm_opt in a copy of the study."""
    target = tmp_path / "runs" / "synthetic"
    shutil.copytree(made, target)
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


def changed(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    """Damage that rewrites the text of a file."""
    return lambda path: (path / name).write_text(change((path / name).read_text())) and None


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(text: str) -> str:
        assert before in text
        return text.replace(before, after, 1)

    return changed(name, change)


def lines(name: str, of: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    return changed(name, lambda text: "".join(of(text.splitlines(keepends=True))))


def swap(path: Path) -> None:
    (path / "rank-00000.jsonl").rename(path / "other")
    (path / "rank-00001.jsonl").rename(path / "rank-00000.jsonl")
    (path / "other").rename(path / "rank-00001.jsonl")


def pipe(path: Path) -> None:
    (path / "rank-00001.jsonl").unlink()
    os.mkfifo(path / "rank-00001.jsonl")


RECORDS = "rank-00000.jsonl", "rank-00001.jsonl"
# What any version's files show: cut, emptied, missing, doubled, of another rank, not of their type.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "rank 0's records cut in half": (changed(RECORDS[0], lambda text: text[:9999]), "no evaluation"),
    "rank 1's last records missing": (lines(RECORDS[1], lambda of: of[:-2]), "rank 1's windows end at step"),
    "rank 1's records missing": (lambda path: (path / RECORDS[1]).unlink(), "rank 1 has no windows"),
    "a doubled record": (lines(RECORDS[0], lambda of: [*of[:3], *of[2:]]), "doubled or out of order"),
    "ranks swapped": (swap, "must be 0 in this file"),
    "a value as text": (edit(RECORDS[0], '"value": ', '"value": "0.9", "x": '), RECORDS[0]),
    "NaN in a window": (edit(RECORDS[1], '"wall_seconds": ', '"wall_seconds": NaN, "x": '), RECORDS[1]),
    "a window nested deep": (
        edit(RECORDS[1], '"memory_bytes": {', '"memory_bytes": {"a": ' + "[" * 200_000), RECORDS[1]
    ),
    "an unfinished line in the middle": (edit(RECORDS[1], '"wall_seconds"', '"wall_sec'), RECORDS[1]),
    "records that are a pipe": (pipe, "is a folder, pipe"),
    "a state that is no end": (edit("outcome.json", '"COMPLETED"', '"RUNNING"'), "state must be one"),
    "an empty outcome": (changed("outcome.json", lambda _: ""), "outcome.json: holds nothing"),
    "an environment nested deep": (
        changed("environment.json", lambda _: '{"a":' + "[" * 200_000), "environment.json: "
    ),
    "a run that continues itself": (
        edit("launch.json", "{", '{"continues": 1,'), "continues=1, must be the number of an attempt"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_a_broken_run_is_left_out_with_the_reason_and_no_other_number_changes(attempt, rest, what):
    """Without checksums, as an older version wrote it; a checksum shows all of these as well."""
    for path in attempt.path.parent.parent.glob("*/attempt-1"):
        make_old(path)
    assert loaded(attempt).cells["valid"].all()
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


# What only a checksum shows: everything else agrees.
CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another number": (edit(RECORDS[1], '"rss": 290000000', '"rss": 290000001'), "does not match"),
    "the records' checksum cut off": (
        lines(RECORDS[1], lambda of: of[:-1]), "has no checksum at its end: records were cut"
    ),
    "another start": (edit("outcome.json", '"started_at": 0.0', '"started_at": 0.1'), "crc32=.*changed"),
    "the environment's checksum removed": (
        changed("environment.json", lambda text: text.rpartition(",\n")[0] + "\n}\n"),
        "has no checksum at its end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_leaves_everything_consistent_does_not_match_the_checksum(attempt, rest, what):
    assert loaded(attempt).cells["valid"].all()
    change, reason = CHANGES[what]
    change(attempt.path)
    check_left_out(attempt, rest, reason)


def test_report_and_terminal_begin_with_what_is_left_out(attempt, tmp_path, capsys, no_images):
    (attempt.path / "rank-00001.jsonl").unlink()
    runs = attempt.path.parent.parent.parent
    assert main(["report", "synthetic", "--runs", str(runs), "--out", str(tmp_path / "report"), *FEW]) == 0
    assert "1 of 2 run is left out of all numbers" in capsys.readouterr().err
    first = (tmp_path / "report" / "report.md").read_text().splitlines()[2]
    assert "1 of 2 run is left out of all numbers" in first
    assert "rank 1 has no windows" in first
    assert "left out: " in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.parametrize("name", ["outcome.json", "environment.json"])
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
