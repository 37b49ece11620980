"""Promise: a job runs what it is to run, once, ends what is to end, and says so. No Slurm is asked here."""

import json

import pytest

from harness.errors import BudgetError, SchedulerError
from harness.launchers.launch import RanksStarted, request_cancel
from harness.launchers.outcome import outcome_without_ranks
from harness.launchers.slurm import batch_job as batch
from harness.launchers.slurm import launcher
from harness.launchers.slurm.attempt_ownership import acquire_attempt
from harness.launchers.slurm.job_layout import lay_out
from harness.launchers.slurm.launcher import SlurmLauncher
from harness.launchers.slurm.scheduler import Job
from harness.launchers.slurm.submission_manifest import SubmissionManifest
from harness.runs.store import sweep_folder


@pytest.fixture
def claimed(tmp_path, make_cell, make_site):
    """A claim of one job an attempt, which Slurm knows as 77."""

    def make(count=1):
        folder = sweep_folder("study", tmp_path)
        cells = [make_cell(seed=seed) for seed in range(count)]
        items = [(folder.stage(cell).new_attempt(), cell) for cell in cells]
        launches = {attempt: SlurmLauncher().plan(cell, make_site()) for attempt, cell in items}
        ((shape, jobs),) = lay_out(items, make_site()).items()
        claim = SubmissionManifest.plan(folder, shape, launches, jobs)
        claim.write()
        for number, attempt in claim.attempts():
            claim.launch_of(number, attempt).write(attempt)
        claim.settle(job_id="77", cluster="hill")
        return claim, [attempt for attempt, _ in items]

    return make


@pytest.fixture
def as_job(monkeypatch):
    """Be job `number` of array 77, started for the first time or again."""

    def become(number, restarts):
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))

    return become


@pytest.fixture
def ended(monkeypatch):
    """What scancel was told, while the jobs of `states` are known to Slurm in these states."""

    def watch(cluster="hill", **states):
        told = []
        jobs = {name: Job(name, state, state, "", "", 0) for name, state in states.items()}
        monkeypatch.setattr(launcher, "jobs_of", lambda _users: jobs)
        monkeypatch.setattr(launcher, "cluster_name", lambda: cluster)
        monkeypatch.setattr(launcher, "end_jobs", lambda array, indexes: told.append((array, indexes)))
        return told

    return watch


def begin(attempt):
    RanksStarted(5.0, (), ()).write(attempt)
    return attempt


def test_a_job_that_starts_again_ends_what_was_cancelled_meanwhile_with_its_checkpoint(claimed, as_job):
    claim, (attempt,) = claimed()
    as_job(0, 0)
    begin(acquire_attempt(attempt, claim))
    saved = attempt.path / "checkpoints" / "step-00000120"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(json.dumps({}))
    request_cancel(attempt)
    as_job(0, 1)
    assert acquire_attempt(attempt, claim) is None
    assert [one.number for one in attempt.cell_folder.attempts()] == [1]
    outcome = attempt.outcome()
    assert (outcome.state, outcome.checkpoint_step, outcome.started_at) == ("CANCELLED", 120, 5.0)


def test_a_job_that_starts_again_a_second_time_heeds_who_cancelled_its_second_attempt(claimed, as_job):
    claim, (first,) = claimed()
    as_job(0, 0)
    begin(acquire_attempt(first, claim))
    as_job(0, 1)
    second = begin(acquire_attempt(first, claim))
    request_cancel(second)
    as_job(0, 2)
    assert acquire_attempt(first, claim) is None
    assert [one.outcome().state for one in first.cell_folder.attempts()] == ["PREEMPTED", "CANCELLED"]


def test_cancelling_takes_requeued_jobs_out_of_the_queue_and_leaves_running_ones_to_end(
    claimed, as_job, ended
):
    claim, attempts = claimed(4)
    for number in (0, 1, 2):
        as_job(number, 0)
        begin(acquire_attempt(claim.slots(number)[0][0], claim))
    order = [claim.slots(number)[0][0] for number in range(4)]
    order[2].write_outcome(outcome_without_ranks("COMPLETED", "", 1.0))
    told = ended(**{"77_0": "PENDING", "77_1": "RUNNING", "77_2": "COMPLETED", "77_3": "PENDING"})
    SlurmLauncher().cancel(attempts)
    assert told == [("77", [0, 3])]


def test_cancelling_from_another_cluster_touches_none_of_its_jobs(claimed, ended):
    _, attempts = claimed()
    told = ended(cluster="dale")
    with pytest.raises(SchedulerError, match="are on cluster hill, and this is dale: cancel there"):
        SlurmLauncher().cancel(attempts)
    assert told == []


def test_a_budget_is_said_to_be_of_one_life_where_jobs_may_have_more(make_cell, make_site):
    once, again = (SlurmLauncher().hours([make_cell()], make_site(requeue=one)) for one in (False, True))
    assert str(once).endswith(" core-hours")
    assert str(again) == f"{once} a life, and a job that Slurm starts again has another (slurm.requeue)"
    with pytest.raises(BudgetError, match=r"core-hours a life, .*, the budget is 0\.1: "):
        again.refuse_beyond(0.1)


def test_a_supervisor_that_fails_says_so(claimed, as_job, monkeypatch, capsys):
    claim, attempts = claimed()
    as_job(0, 0)
    monkeypatch.setattr(batch.signal, "signal", lambda *_: None)

    def stumble(*_):
        raise KeyError("node")

    monkeypatch.setattr(batch, "run_step", stumble)
    assert batch.Supervisor(claim, 0).run() == 1
    outcome = attempts[0].outcome()
    assert (outcome.state, outcome.cause) == ("FAILED", "its supervisor failed: KeyError: 'node'")
    assert "Traceback" in capsys.readouterr().err
