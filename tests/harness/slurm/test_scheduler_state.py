"""Promise: states of attempts come from their own cluster's Slurm only, in few passes over its jobs."""

import json
import os
import pwd

import pytest

from harness.launchers.slurm import scheduler_state
from harness.launchers.slurm.scheduler import Job
from harness.launchers.slurm.scheduler_state import attempt_states
from harness.runs.store import Attempt
from harness.runs.stored_files import user_name


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

    def report(cluster="hill", **states):
        jobs = {name: Job(name, state, state, "", "", 0) for name, state in states.items()}
        monkeypatch.setattr(scheduler_state, "jobs_of", lambda _users: jobs)
        monkeypatch.setattr(scheduler_state, "accounted", lambda _ids: {})
        monkeypatch.setattr(scheduler_state, "cluster_name", lambda: cluster)
        monkeypatch.setattr(scheduler_state, "down_nodes", lambda: frozenset({"n1"}))

    return report


def test_the_number_of_passes_over_the_jobs_does_not_grow_with_them(submitted, slurm, monkeypatch):
    passes = []

    class Counting(dict):
        def values(self):
            passes.append(len(self))
            return super().values()

    attempts = submitted(20)
    ids = Counting(scheduler_state.scheduler_ids(attempts))
    monkeypatch.setattr(scheduler_state, "scheduler_ids", lambda _attempts: ids)
    slurm(**{f"77_{number}": "RUNNING" for number in range(20)})
    assert attempt_states(attempts) == {}
    assert len(passes) < 5


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


def test_the_user_comes_from_the_system_or_is_its_number_and_never_a_variable(monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody")
    assert user_name() == pwd.getpwuid(os.getuid()).pw_name
    assert user_name(0) == "root"

    def unknown(_number):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert (user_name(), user_name(65_001)) == (str(os.getuid()), "65001")
