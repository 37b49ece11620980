"""Promise: cause and status of a resumed run are those of all segments, without steps done twice."""

import time

import pytest

from harness.launchers.launch import Launch, RanksStarted
from harness.launchers.ranks.outcome import RankDeath, RanksEnd, outcome_of_ranks
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import SegmentRecord, to_line
from harness.runs.store import sweep_folder
from harness.study.status import read_statuses
from tests.harness.launching.conftest import evaluation_line

RESULT = {"reached_target": False, "stop_reason": "epochs", "train_seconds": 1.0, "value": 0.8, "steps": 40,
          "parameters_sha256": "0" * 64}  # fmt: skip


def write_records(attempt, first_step, *evaluations):
    """Write rank 0's records: its first step, and (step, value) of evaluations; ten steps per epoch."""
    lines = [to_line(SegmentRecord(0, 0, first_step, None, 0.0, 0.0, True))]
    lines += [evaluation_line(step, step / 10, value) for step, value in evaluations]
    attempt.records(0).write_text("".join(lines))


@pytest.fixture
def resumed(make_cell, make_attempt):
    """The second attempt, resumed at step 20 of a first one that had reached step 30."""
    cell = make_cell()
    first, second = make_attempt(cell), make_attempt(cell)
    launch = Launch.read(second)
    launch.model_copy(update={"continues": 1}).write(second)
    write_records(first, 0, (10, 0.9), (20, 0.95), (30, 0.99))
    return second


def test_the_best_value_is_the_best_of_all_segments_but_for_what_was_done_again(resumed):
    write_records(resumed, 20, (30, 0.7), (40, 0.8))
    resumed.write("result.json", RESULT)
    outcome = outcome_of_ranks(resumed, RanksEnd("ranks", (RankDeath(0, 0, True),)), 0.0, 1.0, False)
    assert outcome.cause == "target accuracy >= 0.97 not reached: best 0.95 after 4 epochs"


def test_a_run_that_was_not_evaluated_since_it_was_resumed_shows_the_value_before(resumed, tmp_path):
    write_records(resumed, 20)
    RanksStarted(time.time(), (0,), ()).write(resumed)
    HeartbeatWriter(resumed.heartbeat(0)).write("forward")
    resumed.write("supervisor.json", {"host": "elsewhere", "pid": 1, "created": 0.0})
    (seen,) = read_statuses(sweep_folder("study", tmp_path))
    assert (seen.state, seen.value) == ("RUNNING", 0.95)
