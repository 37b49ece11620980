"""Promise: Slurm is asked seldom, of the own cluster only, and its reasons are shown in words.

No Slurm runs here: `squeue` is a program that logs its calls and answers as Slurm does.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli import main
from harness.launchers.launch import RanksStarted
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.launchers.slurm import scheduler, scheduler_state
from harness.launchers.slurm.launcher import SlurmLauncher
from harness.launchers.slurm.scheduler import Cluster, Job, PartitionState, partition_states
from harness.launchers.slurm.scheduler_state import asks_about_nodes, attempt_states, waiting_in_words
from harness.runs.store import Attempt, sweep_folder
from harness.runs.stored_files import user_name
from harness.study.status import LauncherReports, read_statuses


@pytest.fixture
def submitted(tmp_path):
    """Attempts in one manifest, submitted as jobs 77_0, 77_1, ..."""

    def make(count, **submission):
        manifest = Attempt(tmp_path / "study" / "jobs" / "c")
        manifest.path.mkdir(parents=True)
        (manifest.path / "submitted.json").write_text(json.dumps({"job_id": "77", **submission}))
        attempts = [Attempt(tmp_path / "study" / f"cell{number}" / "attempt-1") for number in range(count)]
        for number, attempt in enumerate(attempts):
            attempt.path.mkdir(parents=True)
            launch = {"user": "me", "manifest": "c", "manifest_job": number}
            (attempt.path / "launch.json").write_text(json.dumps(launch))
        return attempts

    return make


@pytest.fixture
def slurm(monkeypatch):
    """Have Slurm report these states of jobs."""

    def report(cluster="hill", hides_jobs=False, **states):
        jobs = {name: Job(name, state, state, "", "", 0) for name, state in states.items()}
        monkeypatch.setattr(scheduler_state, "jobs_of", lambda _ids: jobs)
        monkeypatch.setattr(scheduler_state, "accounted", lambda _ids: {})
        monkeypatch.setattr(scheduler_state, "this_cluster", lambda: Cluster(cluster, hides_jobs))
        monkeypatch.setattr(scheduler_state, "down_nodes", lambda: frozenset({"n1"}))

    return report


def test_another_clusters_slurm_decides_nothing_and_the_cause_names_the_right_one(submitted, slurm):
    (one,) = submitted(1, cluster="hill")
    slurm(cluster="dale")
    found = attempt_states([one])[one]
    assert (found.state, found.sure) == (None, False)
    assert found.cause == "job 77_0 is on cluster hill, and this is dale: run kronscale there"


@pytest.mark.parametrize("submission", [{"cluster": "hill"}, {}])
def test_a_job_that_its_own_cluster_no_longer_knows_is_lost(submitted, slurm, submission):
    (one,) = submitted(1, **submission)
    slurm()
    assert (attempt_states([one])[one].state, attempt_states([one])[one].sure) == ("LOST", True)


def test_another_user_s_job_that_slurm_hides_is_not_lost(submitted, slurm):
    (one,) = submitted(1)
    slurm(hides_jobs=True)
    found = attempt_states([one])[one]
    assert (found.state, found.sure) == (None, False)
    assert found.cause == f"Slurm does not show job 77_0 of me to {user_name()}: me has to ask"
    slurm(hides_jobs=True, **{"77_0": "CANCELLED"})  # an operator sees it
    assert (attempt_states([one])[one].state, attempt_states([one])[one].sure) == ("CANCELLED", True)


def test_the_user_comes_from_the_system_or_is_its_number_and_never_a_variable(monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody")
    assert user_name() == pwd.getpwuid(os.getuid()).pw_name
    assert user_name(0) == "root"

    def unknown(_number):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert (user_name(), user_name(65_001)) == (str(os.getuid()), "65001")


SINFO = "main|2|idle\nmain|1|draining\nmain|1|down*\nurgent|3|mixed\nurgent|1|idle*\n"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("", "job 7_0 waits"),
        ("Licenses", "job 7_0 waits: Licenses"),
        (
            "PartitionDown",
            "job 7_0 waits: partition main is down; it starts when that is up again (PartitionDown)",
        ),
        (
            "Resources",
            "job 7_0 waits: nodes are not free; 2 of 4 nodes of main are drained or down (Resources)",
        ),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-4]",
            "job 7_0 waits: nodes that it needs are down, drained or reserved; it starts when they are back; "
            "2 of 4 nodes of main are drained or down (ReqNodeNotAvail)",
        ),
        (
            "JobHeldUser",
            "job 7_0 waits: its user holds it; scontrol release 7 lets it start (JobHeldUser)",
        ),
        ("BeginTime", "job 7_0 waits: Slurm starts a job again only after a pause (BeginTime)"),
    ],
)
def test_a_reason_is_shown_in_words_or_as_it_is(reason, words):
    job = Job("7_0", "PENDING", "PENDING", "", reason, 0, "main")
    assert waiting_in_words(job, {"main": PartitionState(4, 2)}) == words


def test_nodes_that_take_no_jobs_are_counted_by_partition(monkeypatch):
    monkeypatch.setattr(scheduler, "run_command", lambda _words: SINFO)
    assert partition_states() == {"main": PartitionState(4, 2), "urgent": PartitionState(4, 1)}


def test_all_nodes_usable_are_not_mentioned_and_partitions_are_asked_for_only_where_they_explain_something():
    job = Job("7_0", "PENDING", "PENDING", "", "Priority", 0, "main")
    assert (
        waiting_in_words(job, {"main": PartitionState(4, 0)})
        == "job 7_0 waits: other jobs come first (Priority)"
    )
    assert asks_about_nodes(job)
    assert not asks_about_nodes(Job("7_0", "PENDING", "PENDING", "", "BeginTime", 0, "main"))


JOBS = 4


@pytest.fixture
def squeue_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often squeue was called so far; it reports the jobs 77_0 to 77_3 as pending."""
    programs, log = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    rows = "".join(f"77|{number}|78|PENDING||batch|Priority|0\n" for number in range(JOBS))
    (tmp_path / "rows").write_text(rows)
    (programs / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {log}\ncat {tmp_path / "rows"}\n')
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def pending_sweep(tmp_path: Path, make_cell, make_site) -> Callable[[str], list[Attempt]]:
    """Attempts of a sweep, pending in Slurm's queue."""

    def make(sweep: str) -> list[Attempt]:
        folder = sweep_folder(sweep, tmp_path / "runs")
        attempts = []
        for number in range(JOBS):
            cell = make_cell(seed=number).model_copy(update={"sweep": sweep})
            attempts.append(folder.stage(cell).new_attempt())
            launch = SlurmLauncher().plan(cell, make_site())
            update = {"manifest": "c", "manifest_job": number}
            launch.model_copy(update=update).write(attempts[-1])
        manifest = Attempt(folder.path / "jobs" / "c")
        manifest.path.mkdir(parents=True)
        manifest.write("submitted.json", {"job_id": "77"})
        return attempts

    return make


def test_a_watcher_asks_seven_times_in_the_first_minute_and_then_twice_a_minute(
    tmp_path, pending_sweep, squeue_calls
):
    pending_sweep("study")
    now = [0.0]
    reports = LauncherReports(clock=lambda: now[0])
    after: dict[int, int] = {}
    for second in range(0, 600, 2):  # as often as a short `status` allows
        now[0] = float(second)
        statuses = read_statuses(sweep_folder("study", tmp_path / "runs"), None, reports)
        assert {one.cause.partition(": ")[2] for one in statuses} == {"other jobs come first (Priority)"}
        after[second] = squeue_calls()
    assert after[58] <= 7
    assert after[598] - after[58] <= 18
    assert after[598] - after[298] >= 9  # it goes on asking


def test_starts_and_ends_show_at_once_and_without_a_call(tmp_path, pending_sweep, squeue_calls):
    first = pending_sweep("study")[0]
    reports = LauncherReports(clock=lambda: 0.0)
    folder = sweep_folder("study", tmp_path / "runs")

    def states() -> list[str]:
        found = read_statuses(folder, None, reports)
        return [one.state for one in sorted(found, key=lambda one: one.cell.seed)]

    assert states() == ["PENDING"] * JOBS
    RanksStarted(1.0, (), ()).write(first)
    assert states() == ["RUNNING", *["PENDING"] * (JOBS - 1)]
    first.write_outcome(outcome_without_ranks("FAILED", "as the test says"))
    assert states() == ["FAILED", *["PENDING"] * (JOBS - 1)]
    assert squeue_calls() == 1


def test_jobs_of_different_sweeps_are_told_apart(tmp_path, pending_sweep, squeue_calls, capsys):
    """Manifests of two sweeps may have the same name, but not the same jobs."""
    pending_sweep("one")
    pending_sweep("two")
    Attempt(tmp_path / "runs" / "two" / "jobs" / "c").write("submitted.json", {"job_id": "99"})
    (tmp_path / "rows").write_text(
        (tmp_path / "rows").read_text()
        + "".join(f"99|{number}|78|PENDING||batch|Resources|0\n" for number in range(JOBS))
    )
    capsys.readouterr()
    assert main(["status", "--json", "--runs", str(tmp_path / "runs")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["sweep"], row["cause"].rpartition(" ")[2]) for row in rows} == {
        ("one", "(Priority)"), ("two", "(Resources)"),
    }  # fmt: skip
    assert squeue_calls() == 1
