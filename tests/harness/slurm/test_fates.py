"""Promise: what Slurm says of attempts is told in few looks, and only by the Slurm that has them. None is asked here."""

import pytest

from harness.launchers.slurm import fate
from harness.launchers.slurm.fate import fates
from harness.launchers.slurm.scheduler import Job
from harness.store import Attempt


@pytest.fixture
def submitted(tmp_path):
    """Attempts in one claim, which Slurm knows as 77_0, 77_1, ..."""

    def make(count, **said):
        claim = Attempt(tmp_path / "study" / "jobs" / "c")
        claim.path.mkdir(parents=True)
        claim.write("submitted.json", {"job_id": "77", **said})
        attempts = [Attempt(tmp_path / "study" / f"cell{number}" / "attempt-1") for number in range(count)]
        for number, attempt in enumerate(attempts):
            attempt.path.mkdir(parents=True)
            attempt.write("launch.json", {"user": "me", "claim": "c", "claim_job": number})
        return attempts

    return make


@pytest.fixture
def slurm(monkeypatch):
    """Have Slurm know these states of jobs."""

    def know(**states):
        jobs = {name: Job(name, state, state, "", "", 0) for name, state in states.items()}
        monkeypatch.setattr(fate, "jobs_of", lambda _users: jobs)
        monkeypatch.setattr(fate, "accounted", lambda _ids: {})
        monkeypatch.setattr(fate, "down_nodes", lambda: frozenset({"n1"}))

    return know


def test_the_jobs_are_gone_through_a_few_times_however_many_they_are(submitted, slurm, monkeypatch):
    gone_through = []

    class Watched(dict):
        def values(self):
            gone_through.append(len(self))
            return super().values()

    attempts = submitted(20)
    ids = Watched({attempt: f"77_{number}" for number, attempt in enumerate(attempts)})
    monkeypatch.setattr(fate, "scheduler_ids", lambda _attempts: ids)
    slurm(**dict.fromkeys(ids.values(), "RUNNING"))
    assert fates(attempts) == {}
    assert len(gone_through) < 5
