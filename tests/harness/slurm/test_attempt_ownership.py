"""Promise: a job runs its attempts once, ends cancelled ones, and writes why. No Slurm runs here."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from harness.errors import BudgetError, ForeignError, SchedulerError
from harness.launchers.cost import CostEstimate, open_budget
from harness.launchers.launch import Launch, RanksStarted, request_cancel
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.launchers.slurm import batch_job, launcher
from harness.launchers.slurm.batch_job import acquire_attempt
from harness.launchers.slurm.job_layout import lay_out
from harness.launchers.slurm.launcher import SlurmLauncher
from harness.launchers.slurm.sbatch import batch_text
from harness.launchers.slurm.scheduler import Cluster, Job, NoAnswerError
from harness.launchers.slurm.submission_manifest import SubmissionManifest
from harness.runs.attempt_outcome import Outcome
from harness.runs.store import Attempt, sweep_folder
from harness.study.submit import submit


@pytest.fixture
def listed(tmp_path, make_cell, make_site):
    """A manifest with one job per attempt, submitted as array 77."""

    def make(count=1):
        folder = sweep_folder("study", tmp_path)
        cells = [make_cell(seed=seed) for seed in range(count)]
        items = [(folder.stage(cell).new_attempt(), cell) for cell in cells]
        launches = {attempt: SlurmLauncher().plan(cell, make_site()) for attempt, cell in items}
        ((layout, jobs),) = lay_out(items, make_site()).items()
        manifest = SubmissionManifest.plan(folder, layout, launches, jobs)
        manifest.write()
        for number, attempt in manifest.attempts():
            manifest.launch_of(number, attempt).write(attempt)
        manifest.record_submission(job_id="77", cluster="hill")
        return manifest, [attempt for attempt, _ in items]

    return make


@pytest.fixture
def as_job(monkeypatch):
    """Act as job `number` of array 77, after so many restarts."""

    def become(number, restarts):
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))

    return become


@pytest.fixture
def scancel_calls(monkeypatch):
    """Calls of scancel, while Slurm has jobs in these `states`."""

    def watch(cluster="hill", **states):
        calls = []
        jobs = {name: Job(name, state, state, "", "", 0) for name, state in states.items()}
        monkeypatch.setattr(launcher, "jobs_of", lambda _ids: jobs)
        monkeypatch.setattr(launcher, "this_cluster", lambda: Cluster(cluster, False))
        monkeypatch.setattr(launcher, "end_jobs", lambda array, indexes: calls.append((array, indexes)))
        return calls

    return watch


def begin(attempt):
    RanksStarted(5.0, (), ()).write(attempt)
    return attempt


def test_a_restarted_job_ends_an_attempt_that_was_cancelled_meanwhile_with_its_checkpoint(listed, as_job):
    manifest, (attempt,) = listed()
    as_job(0, 0)
    begin(acquire_attempt(attempt, manifest))
    saved = attempt.path / "checkpoints" / "step-00000120"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(json.dumps({}))
    request_cancel(attempt)
    as_job(0, 1)
    assert acquire_attempt(attempt, manifest) is None
    assert [one.number for one in attempt.cell_folder.attempts()] == [1]
    outcome = attempt.outcome()
    assert (outcome.state, outcome.checkpoint_step, outcome.started_at) == ("CANCELLED", 120, 5.0)
    assert outcome.cause == (
        "cancelled before its job was started again; a retry resumes from its checkpoint at step 120"
    )


def test_a_job_restarted_twice_ends_its_second_attempt_if_that_was_cancelled(listed, as_job):
    manifest, (first,) = listed()
    as_job(0, 0)
    begin(acquire_attempt(first, manifest))
    as_job(0, 1)
    second = begin(acquire_attempt(first, manifest))
    request_cancel(second)
    as_job(0, 2)
    assert acquire_attempt(first, manifest) is None
    assert [one.outcome().state for one in first.cell_folder.attempts()] == ["PREEMPTED", "CANCELLED"]


def test_cancelling_removes_requeued_jobs_from_the_queue_and_lets_running_ones_end_themselves(
    listed, as_job, scancel_calls
):
    manifest, attempts = listed(4)
    for number in (0, 1, 2):
        as_job(number, 0)
        begin(acquire_attempt(manifest.slots(number)[0][0], manifest))
    order = [manifest.slots(number)[0][0] for number in range(4)]
    order[2].write_outcome(outcome_without_ranks("COMPLETED", "", 1.0))
    states = {"77_0": "PENDING", "77_1": "RUNNING", "77_2": "COMPLETED", "77_3": "PENDING"}
    calls = scancel_calls(**states)
    SlurmLauncher().cancel(attempts)
    assert calls == [("77", [0, 3])]


def test_cancelling_from_another_cluster_touches_none_of_its_jobs(listed, scancel_calls):
    _, attempts = listed()
    calls = scancel_calls(cluster="dale")
    with pytest.raises(SchedulerError, match="are on cluster hill, and this is dale: cancel there"):
        SlurmLauncher().cancel(attempts)
    assert calls == []


def test_a_budget_is_per_start_where_jobs_may_start_again(make_cell, make_site):
    once, again = (
        SlurmLauncher().estimate_cost([make_cell()], make_site(requeue=one)) for one in (False, True)
    )
    assert str(once).endswith(" core-hours")
    assert str(again) == f"{once} per start, and Slurm may start a job again (slurm.requeue)"
    with pytest.raises(BudgetError, match=r"core-hours per start, .*, the budget is 0\.1: "):
        again.refuse_beyond(0.1)


def test_the_outcome_has_the_error_of_a_supervisor_that_failed(listed, as_job, monkeypatch, capsys):
    manifest, attempts = listed()
    as_job(0, 0)
    monkeypatch.setattr(batch_job.signal, "signal", lambda *_: None)

    def fail(*_):
        raise KeyError("node")

    monkeypatch.setattr(batch_job.SrunRanks, "run", fail)
    assert batch_job.Supervisor(manifest, 0).run() == 1
    outcome = attempts[0].outcome()
    assert (outcome.state, outcome.cause) == ("FAILED", "its supervisor failed: KeyError: 'node'")
    assert "Traceback" in capsys.readouterr().err


def test_a_start_that_slurm_repeats_after_a_preemption_gives_no_time_back_twice(listed, as_job, monkeypatch):
    manifest, (attempt,) = listed()
    cost, minutes = manifest.layout.estimate_cost(manifest.site), manifest.layout.minutes(manifest.site)
    two_jobs = CostEstimate(core_hours=2 * cost.counted)
    name = open_budget(manifest.sweep, two_jobs.counted, two_jobs)
    manifest = replace(manifest, launch=manifest.launch.model_copy(update={"budget": name}))
    now = [0.0]
    monkeypatch.setattr("harness.launchers.cost.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(batch_job.signal, "signal", lambda *_: None)
    monkeypatch.setattr(batch_job.Supervisor, "_requeue", lambda _: "")
    monkeypatch.setattr(batch_job, "slurm", lambda _: SimpleNamespace(requeue=True, signal_seconds=None))

    def start(state, share_of_limit):
        def end(*_):
            now[0] += share_of_limit * minutes * 60
            return Outcome(state, "it ended", None, "error", 1.0, 2.0)

        monkeypatch.setattr(batch_job.SrunRanks, "run", end)
        assert batch_job.Supervisor(manifest, 0).run() == 0
        return Attempt(manifest.sweep.path / "budgets").read(f"{name}.json")["committed"] / cost.counted

    as_job(0, 0)
    assert start("PREEMPTED", 0.25) == 2.0
    assert attempt.outcome() is None
    as_job(0, 1)
    assert start("COMPLETED", 0.5) == pytest.approx(1.5)  # of this job half, and all of the other


@pytest.mark.parametrize("ended_by_slurm", [True, False])
def test_a_requeue_is_done_if_slurm_ends_the_job_before_scontrol_has_its_answer(
    listed, monkeypatch, ended_by_slurm
):
    manifest, (following,) = listed()
    supervisor = batch_job.Supervisor(manifest, 0)

    def end(_job):
        if ended_by_slurm:
            supervisor._on_signal(15, None)
        raise NoAnswerError("scontrol ended with -15")

    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(batch_job, "requeue", end)
    monkeypatch.setattr(batch_job, "_ENDED_SECONDS", 0.1)
    supervisor._following.append(following)
    supervisor._start_again()
    outcome = following.outcome()
    assert (outcome is None) == ended_by_slurm
    assert outcome is None or "Slurm did not requeue its job: scontrol ended with -15" in outcome.cause


def test_the_files_of_a_submission_keep_their_keys(listed):
    manifest, (attempt,) = listed()
    content = json.loads((manifest.path / "manifest.json").read_text())
    assert set(content) == {"shape", "launch", "jobs", "continues", "orders", "crc32"}
    assert content["shape"] == {"world_size": 4, "nodes": 2, "slots": 1, "length": 1}
    launch = json.loads((attempt.path / "launch.json").read_text())
    assert (launch["manifest"], launch["manifest_job"]) == (manifest.path.name, 0)
    assert SubmissionManifest.read(manifest.path) == manifest


def test_every_attempt_of_an_array_has_its_own_place_in_the_order_of_the_submission(
    tmp_path, make_cell, make_site, monkeypatch
):
    monkeypatch.setattr(launcher, "submit_manifest", lambda _manifest: "77")
    monkeypatch.setattr(launcher, "this_cluster", lambda: Cluster("hill", False))
    cells = [make_cell(seed=seed) for seed in range(3)]  # one to a block, so that chance decides nothing
    submit(cells, make_site(), tmp_path)
    folder = sweep_folder("study", tmp_path)
    launches = [Launch.read(folder.cell_folder(cell).latest()) for cell in cells]
    assert [launch.order for launch in launches] == [0, 1, 2]

    (path,) = (folder.path / "jobs").iterdir()
    content = Attempt(path).read("manifest.json")
    del content["orders"]  # as older versions wrote it
    Attempt(path).write("manifest.json", content)
    older = SubmissionManifest.read(path)
    assert [older.launch_of(number, attempt).order for number, attempt in older.attempts()] == [None] * 3


def test_a_manifest_that_others_can_have_written_is_not_submitted_run_or_used_to_end_jobs(
    listed, as_job, monkeypatch, scancel_calls
):
    manifest, (attempt,) = listed()
    calls = scancel_calls()
    as_job(0, 0)
    manifest.path.chmod(0o770)
    request_cancel(attempt)
    with pytest.raises(ForeignError, match=f"{manifest.path} may be written by other users"):
        SlurmLauncher().cancel([attempt])
    assert calls == []
    with pytest.raises(ForeignError, match="shared_runs"):
        batch_job.main(manifest.path, shared_runs=False)
    (manifest.path / "submitted.json").unlink()
    monkeypatch.setattr(launcher, "find_array", lambda *_: pytest.fail("Slurm was asked"))
    with pytest.raises(ForeignError, match="may be written by other users"):
        SlurmLauncher().finish_submission(manifest.sweep, shared_runs=False)
    manifest.path.chmod(0o700)
    attempt.path.chmod(0o777)
    assert batch_job.Supervisor(manifest, 0).run() == 1
    outcome = attempt.outcome()
    assert outcome.cause.startswith(f"its supervisor failed: ForeignError: {attempt.path} may be written by")


def test_jobs_of_a_site_with_shared_runs_are_told_so(listed, make_site):
    manifest, _ = listed()
    assert "--shared-runs" not in batch_text(manifest)
    site = make_site().model_copy(update={"shared_runs": True})
    shared = replace(manifest, launch=manifest.launch.model_copy(update={"site": site}))
    assert f"batch_job {manifest.path} --shared-runs" in batch_text(shared)
