"""Promise: status reads every cell's state from its files, also after its launcher was killed."""

import os
import signal
import time

import pytest

from harness.launchers.launch import RanksStarted
from harness.runs.attempt_outcome import Outcome
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.store import sweep_folder
from harness.study.status import count_states, read_statuses

pytestmark = pytest.mark.ranks


def test_a_supervisor_killed_with_sigkill_is_a_lost_cell_with_its_last_step(
    make_cell, make_attempt, start_supervisor, wait_for, tmp_path
):
    cell = make_cell(steps=3000)
    supervisor = start_supervisor(make_attempt(cell))
    folder = sweep_folder("study", tmp_path)
    wait_for(lambda: (read_statuses(folder)[0].step or 0) > 1)
    running = read_statuses(folder)[0]
    assert (running.state, running.phase, running.total_steps) == ("RUNNING", "backward", 3000)
    assert running.eta_seconds > running.elapsed_seconds
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: read_statuses(folder)[0].state == "LOST")
    assert "in backward" in read_statuses(folder)[0].cause


def test_the_step_of_a_running_cell_is_that_of_the_rank_furthest_behind(make_cell, make_attempt, tmp_path):
    cell = make_cell(2)
    attempt = make_attempt(cell)
    RanksStarted(time.time(), (0, 1), ()).write(attempt)
    for rank, step in enumerate((9, 7)):
        heartbeat = HeartbeatWriter(attempt.heartbeat(rank))
        heartbeat.step = step
        heartbeat.write("forward")
    (seen,) = read_statuses(sweep_folder("study", tmp_path))
    assert (seen.rank, seen.step, seen.phase) == (1, 7, "forward")


def test_a_cell_whose_supervisor_is_on_another_host_has_the_host_as_cause(make_cell, make_attempt, tmp_path):
    attempt = make_attempt(make_cell())
    RanksStarted(time.time(), (0,), ()).write(attempt)
    attempt.write("supervisor.json", {"host": "elsewhere", "pid": 1, "created": 0.0})
    (seen,) = read_statuses(sweep_folder("study", tmp_path))
    assert seen.state == "RUNNING"
    assert seen.cause == "its launcher ran on elsewhere; whether it still does is known only there"


def test_the_status_of_a_thousand_cells_takes_less_than_a_second(make_cell, tmp_path):
    folder = sweep_folder("study", tmp_path)
    for seed in range(1000):
        cell = make_cell(seed=seed)
        attempt = folder.cell_folder(cell).path / "attempt-1"
        attempt.mkdir(parents=True)
        (attempt.parent / "cell.json").write_text(cell.model_dump_json())
        (attempt / "outcome.json").write_text(Outcome("COMPLETED", "", True, "target", 1.0, 2.0).to_json())
    seconds = []
    for _ in range(3):  # the least: other work on the machine makes any one of them slow
        started_at = time.process_time()
        assert count_states(read_statuses(folder)) == {"COMPLETED": 1000}
        seconds.append(time.process_time() - started_at)
    assert min(seconds) < 1.0
