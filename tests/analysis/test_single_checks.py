"""Promise: each check of a run's files notices alone what no other one can.

In `test_broken_records` several checks would notice; here the damage leaves everything else consistent.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.records.left_out import LeftOutWarning
from analysis.records.tables import NUMBERS, load
from harness.runs.store import Attempt
from tests.analysis.conftest import Plan
from tests.analysis.test_broken_records import remove_seals

PLAN = Plan(methods=("sgd", "comm_opt"), world_sizes=(2,), seeds=(0,), misses=(), epochs=9)
Change = Callable[[Attempt], None]


@pytest.fixture(scope="module")
def made(write_study) -> Path:
    return write_study(PLAN)


@pytest.fixture
def attempt(made, tmp_path) -> Attempt:
    """The run of comm_opt in a copy of the study."""
    target = tmp_path / "runs" / "synthetic"
    shutil.copytree(made, target)
    return Attempt(next(target.glob("comm_opt-*")) / "attempt-1")


def lines_of(attempt: Attempt, rank: int = 0) -> list[str]:
    return attempt.records(rank).read_text().splitlines(keepends=True)


def outcome_again(attempt: Attempt, **changes: float) -> None:
    """The outcome with other values, its checksum and seals as they should be."""
    outcome = attempt.outcome()
    assert outcome is not None
    (attempt.path / "outcome.json").unlink()
    attempt.write_outcome(replace(outcome, **changes))


def another_launch(attempt: Attempt) -> None:
    """With its own checksum, so that only the outcome's seal can tell."""
    content = attempt.read("launch.json")
    assert content is not None
    attempt.write("launch.json", content | {"oversubscribed": True})


def no_checksum(attempt: Attempt) -> None:
    path = attempt.path / "outcome.json"
    head, _, _ = path.read_text().rpartition(",\n")
    path.write_text(f"{head}\n}}\n")


def a_later_start(attempt: Attempt) -> None:
    path = attempt.path / "outcome.json"
    path.write_text(path.read_text().replace('"started_at": 0.0', '"started_at": 0.1'))


def another_digit(attempt: Attempt) -> None:
    """Bytes of memory, which nothing else depends on, in as many characters."""
    text = attempt.records(1).read_text()
    assert '"rss": 290000000' in text
    attempt.records(1).write_text(text.replace('"rss": 290000000', '"rss": 290000001', 1))


def no_seal(attempt: Attempt) -> None:
    attempt.records(1).write_text("".join(lines_of(attempt, 1)[:-1]))


SEALED: dict[str, tuple[Change, str]] = {
    "a small file was changed": (another_launch, "launch.json: was changed after the attempt had ended"),
    "a small file was removed": (
        lambda attempt: (attempt.path / "environment.json").unlink(), "environment.json: is missing",
    ),
    "the outcome has no checksum": (no_checksum, "crc32 is missing at the end"),
    "the outcome was changed": (a_later_start, "does not match: the file was changed"),
    "a record was changed": (another_digit, "of its seal does not match: records were changed"),
    "the seal was cut off": (no_seal, "its seal is missing: records were cut or added"),
    "it ended before it began": (
        lambda attempt: outcome_again(attempt, started_at=1e6), "is before started_at=1000000.0",
    ),
}  # fmt: skip


def evaluated_twice(attempt: Attempt) -> None:
    lines = lines_of(attempt)
    place = next(number for number, line in enumerate(lines) if '"kind": "evaluation"' in line)
    attempt.records(0).write_text("".join([*lines[: place + 1], *lines[place:]]))


def a_clock_that_goes_back(attempt: Attempt) -> None:
    text = attempt.records(0).read_text()
    attempt.records(0).write_text(text.replace('"eval_seconds": 0.05', '"eval_seconds": 900.5', 1))


UNSEALED: dict[str, tuple[Change, str]] = {
    "an evaluation twice": (evaluated_twice, "evaluations of steps 20 and 20 follow one another"),
    "a clock that goes back": (a_clock_that_goes_back, "eval_seconds of evaluations goes back from 900.5"),
}


@pytest.mark.parametrize("what", [*SEALED, *UNSEALED])
def test_what_one_check_alone_can_notice_leaves_the_run_out_without_its_numbers(attempt, what):
    change, reason = (SEALED | UNSEALED)[what]
    if what in UNSEALED:  # as an older version recorded it
        remove_seals(attempt.path)
    change(attempt)
    with pytest.warns(LeftOutWarning, match="1 of 2 run is left out"):
        study = load(attempt.path.parent.parent, cache=False)
    (row,) = study.cells[~study.cells["valid"]].to_dict("records")
    assert reason in row["why"]
    assert study.cells.loc[~study.cells["valid"], list(NUMBERS)].isna().all(axis=None)
    assert study.cells.loc[study.cells["valid"], list(NUMBERS)].notna().all(axis=None)
