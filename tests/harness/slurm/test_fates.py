"""Promise: what Slurm says of attempts is told in few looks, and by their own cluster's only."""

import json
import os
import pwd

import pytest

from harness.launchers.launch import user_name
from harness.launchers.slurm import scheduler_state as fate
from harness.launchers.slurm.scheduler import Job
from harness.launchers.slurm.scheduler_state import fates
from harness.runs.store import Attempt


@pytest.fixture
def submitted(tmp_path):
    """Attempts in one claim, which Slurm knows as 77_0, 77_1, ..."""

    def make(count, **said):
        claim = Attempt(tmp_path / "study" / "jobs" / "c")
        claim.path.mkdir(parents=True)
        (claim.path / "submitted.json").write_text(json.dumps({"job_id": "77", **said}))
        attempts = [Attempt(tmp_path / "study" / f"cell{number}" / "attempt-1") for number in range(count)]
        for number, attempt in enumerate(attempts):
            attempt.path.mkdir(parents=True)
            launch = {"user": "me", "claim": "c", "claim_job": number}
            (attempt.path / "launch.json").write_text(json.dumps(launch))
        return attempts

    return make


@pytest.fixture
def slurm(monkeypatch):
    """Have Slurm know these states of jobs."""

    def know(cluster="hill", **states):
        jobs = {name: Job(name, state, state, "", "", 0) for name, state in states.items()}
        monkeypatch.setattr(fate, "jobs_of", lambda _users: jobs)
        monkeypatch.setattr(fate, "accounted", lambda _ids: {})
        monkeypatch.setattr(fate, "cluster_name", lambda: cluster)
        monkeypatch.setattr(fate, "down_nodes", lambda: frozenset({"n1"}))

    return know


def test_the_jobs_are_gone_through_a_few_times_however_many_they_are(submitted, slurm, monkeypatch):
    gone_through = []

    class Watched(dict):
        def values(self):
            gone_through.append(len(self))
            return super().values()

    attempts = submitted(20)
    ids = Watched(fate.scheduler_ids(attempts))
    monkeypatch.setattr(fate, "scheduler_ids", lambda _attempts: ids)
    slurm(**{f"77_{number}": "RUNNING" for number in range(20)})
    assert fates(attempts) == {}
    assert len(gone_through) < 5


def test_another_cluster_s_slurm_has_no_verdict_and_names_the_one_to_ask(submitted, slurm):
    (one,) = submitted(1, cluster="hill")
    slurm(cluster="dale")
    found = fates([one])[one]
    assert (found.state, found.sure) == (None, False)
    assert found.cause == "job 77_0 is on cluster hill, and this is dale: ask there"


@pytest.mark.parametrize("said", [{"cluster": "hill"}, {}])
def test_a_job_that_its_own_cluster_has_forgotten_is_lost(submitted, slurm, said):
    (one,) = submitted(1, **said)
    slurm()
    assert (fates([one])[one].state, fates([one])[one].sure) == ("LOST", True)


def test_a_user_without_an_entry_goes_by_number_and_no_variable_is_believed(monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody")
    assert user_name() == pwd.getpwuid(os.getuid()).pw_name

    def unknown(_number):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert user_name() == str(os.getuid())
