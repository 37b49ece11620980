"""Promise: ranks that are told to stop save a checkpoint, and a retry goes on from it or starts anew."""

import os
import signal
import sys
from pathlib import Path

import pytest

from harness.cell import Cell
from harness.cli import main
from harness.launchers import LAUNCHERS
from harness.launchers.site_profile import read_site
from harness.runs.checkpoint_store import CheckpointStore
from harness.runs.store import sweep_folder
from harness.study.status import read_statuses
from tests.harness.launching import counting_rank

pytestmark = pytest.mark.ranks

STOPPED = "stopped before the site's timeout_minutes with a checkpoint at step "


@pytest.fixture
def cell():
    """Some seconds of K-FAC on two ranks, which no target ends."""
    return Cell.model_validate({
        "sweep": "study", "method": "mem_opt", "world_size": 2, "workload": "digits",
        "target": {"metric": "accuracy", "at_least": 1.0}, "optimizer": {"lr": 0.1},
        "training": {"global_batch_size": 256, "epochs": 20, "evaluate_every_epochs": 5},
        "kfac": {"strategy": "mem_opt", "damping": 0.01, "factor_update_steps": 2, "inverse_update_steps": 5},
    })  # fmt: skip


@pytest.fixture
def look(tmp_path):
    return lambda: read_statuses(sweep_folder("study", tmp_path))[0]


def past(look, attempt, step):
    """Whether every rank is: counting ranks do not wait for each other; a status shows those that began."""
    seen = look()
    if seen.attempt is None or seen.attempt.number != attempt:
        return False
    beats = [seen.attempt.last_heartbeat(rank) for rank in range(seen.cell.world_size)]
    return all(beat is not None and beat.step >= step for beat in beats)


@pytest.fixture
def counting(tmp_path):
    """Options of a command on runs at a site whose prefix starts ranks that count, and not the worker."""
    prefix = tmp_path / "prefix"
    prefix.write_text(f'#!/bin/sh\nshift 4\nexec {sys.executable} {Path(counting_rank.__file__)} "$@"\n')
    prefix.chmod(0o755)
    site_file = tmp_path / "site.yaml"
    site_file.write_text(f"launcher: local\noversubscribe: true\nlaunch_prefix: [{prefix}]\n")
    return ["--site", str(site_file), "--runs", str(tmp_path)]


def test_a_preempted_supervisor_and_a_cancel_save_and_a_fresh_retry_starts_from_scratch(
    make_cell, counting, tmp_path, look, wait_for, start_supervisor
):
    """What the launcher does; that real ranks save on its signal, the tests above and below say."""
    cell = make_cell(2, steps=100_000, step_seconds=0.01)
    attempt = sweep_folder("study", tmp_path).stage(cell).new_attempt()
    LAUNCHERS["local"].plan(cell, read_site(counting[1])).write(attempt)
    supervisor = start_supervisor(attempt)
    wait_for(lambda: past(look, 1, 5))
    os.kill(supervisor.pid, signal.SIGUSR1)
    outcome = supervisor.outcome()
    assert (outcome.state, outcome.reached_target) == ("PREEMPTED", None)
    assert {rank.exit_code for rank in outcome.ranks} == {75}
    assert outcome.checkpoint_step == CheckpointStore(attempt).newest_first()[0].step

    assert main(["retry", "study", *counting]) == 0
    wait_for(lambda: past(look, 2, outcome.checkpoint_step + 10))
    assert look().cause == f"resumed at step {outcome.checkpoint_step}"
    assert main(["cancel", "study", "--checkpoint", "--runs", str(tmp_path)]) == 0
    cancelled = look()
    assert (cancelled.state, cancelled.attempt.number) == ("CANCELLED", 2)
    assert cancelled.checkpoint_step >= outcome.checkpoint_step + 10
    assert f"checkpoint at step {cancelled.checkpoint_step}" in cancelled.cause

    assert main(["retry", "study", *counting, "--fresh"]) == 0
    wait_for(lambda: past(look, 3, 1))
    assert look().attempt.read("segment.json")["first_step"] == 0
    assert look().cause == ""
    assert main(["cancel", "study", "--runs", str(tmp_path)]) == 0


def test_ranks_save_a_checkpoint_before_the_time_limit(cell, site, tmp_path, start_supervisor):
    """Under mpiexec, which the signal has to pass; without it the test above sends one the same way.

    Where ranks have not begun to train by the signal, or not ended by the limit, for other work, they get
    twice the time.
    """
    long = cell.model_copy(update={"training": cell.training.model_copy(update={"epochs": 100_000})})
    folder = sweep_folder("study", tmp_path).stage(long)
    for minutes in (0.4, 0.8, 1.6):
        fields = {"timeout_minutes": minutes, "grace_seconds": 14.0, "backend": "mpi"}
        attempt = folder.new_attempt()
        LAUNCHERS["local"].plan(long, site.model_copy(update=fields)).write(attempt)
        outcome = start_supervisor(attempt).outcome()
        assert outcome.state == "TIMEOUT"
        if outcome.cause == f"{STOPPED}{outcome.checkpoint_step}":
            return
    raise AssertionError(outcome.cause)


def test_ranks_that_do_not_save_in_time_are_ended(make_cell, make_attempt, start_supervisor, wait_for):
    attempt = make_attempt(make_cell(2, steps=3000), grace_seconds=1.0)  # fake ranks cannot save
    supervisor = start_supervisor(attempt)
    wait_for(lambda: all(beat and beat.step >= 1 for beat in map(attempt.last_heartbeat, range(2))))
    os.kill(supervisor.pid, signal.SIGUSR1)
    outcome = supervisor.outcome()
    assert outcome.state == "PREEMPTED"
    assert "saved no checkpoint within the site's grace_seconds; the last rank was" in outcome.cause
    assert outcome.checkpoint_step is None
