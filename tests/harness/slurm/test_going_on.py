"""Promise: a study goes on by itself on a real Slurm: limits, drained nodes, down partitions, restarts."""

import sys
from pathlib import Path

import pytest

from harness.errors import SchedulerError
from harness.launchers.site_profile import Site
from harness.launchers.slurm import sbatch
from harness.launchers.slurm_profile import SlurmProfile
from harness.runs.store import sweep_folder
from harness.study.status import read_statuses
from harness.study.submit import submit
from tests.harness.launching import counting_rank
from tests.harness.launching.counting_rank import digest_of
from tests.harness.slurm.conftest import FAKE_RANK
from tests.harness.slurm.test_submission_faults import answers
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

COUNTING_RANK = (sys.executable, str(Path(counting_rank.__file__)))


def test_a_run_of_three_time_limits_completes_by_itself_while_nodes_are_drained_and_slurmctld_restarts(
    on_slurm, tmp_path, make_cell
):
    cell = make_cell(world_size=1, steps=160, step_seconds=0.1)
    profile = SlurmProfile(ranks_per_node=1, requeue=True)
    site = Site(name="test", launcher="slurm", timeout_minutes=0.2, max_continuations=20, slurm=profile)
    submit([cell], site, tmp_path, COUNTING_RANK)

    def look():
        return read_statuses(sweep_folder("study", tmp_path))[0]

    wait_for(lambda: look().step)
    first = look().attempt
    on_slurm.run("scontrol", "update", "NodeName=n[1-4]", "State=DRAIN", "Reason=kernel")
    try:
        on_slurm.stop("slurmctld")  # a limit is met while nobody can take the job back
        try:
            wait_for(first.outcome)
        finally:
            on_slurm.start("slurmctld")
        assert first.outcome().cause.endswith(f"; continued by attempt {first.number + 1}")
        wait_for(lambda: "drained or down" in look().cause)
        waiting = look()
        assert (waiting.state, waiting.attempt.number) == ("PENDING", first.number + 1)
        assert "4 of 4 nodes of main are drained or down" in waiting.cause
    finally:
        on_slurm.run("scontrol", "update", "NodeName=n[1-4]", "State=RESUME")
    wait_for(lambda: look().final)

    *cut, last = first.cell_folder.attempts()
    assert last.outcome().state == "COMPLETED", last.outcome().cause
    assert len(cut) >= 2
    assert {one.outcome().state for one in cut} == {"TIMEOUT"}
    assert last.read("result.json")["parameters_sha256"] == digest_of(160)
    assert len({one.read("taken.json")["job"] for one in (*cut, last)}) == 1  # started again each time


def test_a_partition_that_is_down_is_waited_out_and_status_says_so(
    on_slurm, tmp_path, make_cell, make_site, ended, look
):
    on_slurm.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        submit([make_cell(world_size=1)], make_site(), tmp_path, FAKE_RANK)
        wait_for(lambda: "is down" in look(make_cell(world_size=1))[0].cause)
        (status,) = look(make_cell(world_size=1))
        assert status.state == "PENDING"
        waits = "waits: partition main is down; it starts when that is up again (PartitionDown)"
        assert status.cause.endswith(waits)
    finally:
        on_slurm.run("scontrol", "update", "PartitionName=main", "State=UP")
    assert ended([make_cell(world_size=1)])[0].state == "COMPLETED"


def test_a_controller_without_room_for_jobs_is_seen_waiting_and_the_submission_is_finished_later(
    on_slurm, tmp_path, make_cell, make_site, ended, look, monkeypatch, capfd
):
    settings = on_slurm.folder / "slurm.conf"
    before = settings.read_text()
    cells = [make_cell(world_size=1, seed=seed) for seed in range(3)]
    monkeypatch.setattr(sbatch, "_PATIENCE_SECONDS", 2.0)
    known = len(on_slurm.run("squeue", "--noheader", "--states=all", "--array").splitlines())
    restart(on_slurm, before.replace("MaxArraySize", f"MaxJobCount={known + 2}\nMaxArraySize"))
    try:
        with pytest.raises(
            SchedulerError, match=r"waited for more than 2 s .*to finish the submission: kron"
        ):
            submit(cells, make_site(), tmp_path, FAKE_RANK)
        assert "sleeping and retrying (for at most 2 s)" in capfd.readouterr().err
        assert {(one.state, one.cause.partition(";")[0]) for one in look(*cells)} == {
            ("PENDING", "not submitted to Slurm yet")
        }
    finally:
        restart(on_slurm, before)
    submit(cells, make_site(), tmp_path, FAKE_RANK)
    assert {(one.state, one.attempt.number) for one in ended(cells)} == {("COMPLETED", 1)}


def restart(cluster, settings):
    """Start slurmctld anew with these settings; returns when it answers."""
    (cluster.folder / "slurm.conf").write_text(settings)
    cluster.stop("slurmctld")
    cluster.start("slurmctld")
    wait_for(lambda: answers(cluster))
