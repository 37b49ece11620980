"""Promise: a run goes on by itself as long as it may, from its own attempt, and all of its segments count."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cli import main
from harness.errors import StoredFileError
from harness.launchers import LAUNCHERS
from harness.launchers.cost import CostEstimate, StartBudget, open_budget
from harness.launchers.launch import Launch, RanksStarted, request_cancel
from harness.launchers.local import LocalLauncher, supervisor
from harness.launchers.ranks.outcome import RankDeath, RanksEnd, outcome_of_ranks, outcome_without_ranks
from harness.launchers.resuming import continued
from harness.launchers.site_profile import Site
from harness.runs.attempt_outcome import Outcome
from harness.runs.checkpoint_store import FORMAT_VERSION, CheckpointStore, Manifest
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import SegmentRecord, to_line
from harness.runs.store import Attempt, CellFolder, sweep_folder
from harness.study.status import read_statuses
from harness.study.submit import cancel, retry, submit
from tests.harness.launching import counting_rank
from tests.harness.launching.conftest import evaluation_line
from tests.harness.launching.counting_rank import digest_of

COUNTING_RANK = (sys.executable, str(Path(counting_rank.__file__)))
LONG = CostEstimate(core_hours=0.5)  # of one start
NO_BUDGET = None
STUCK = "two attempts in a row saved no checkpoint after step"


@pytest.fixture
def met_limit(make_cell, tmp_path):
    """An attempt that met its time limit with a checkpoint at step 120, and its outcome."""

    def make(most=3, continuation=0, saved=120, first_step=0, budget=NO_BUDGET, progressed=True):
        folder = sweep_folder("study", tmp_path)
        attempt = folder.stage(make_cell()).new_attempt()
        site = Site(name="test", max_continuations=most)
        launch = LAUNCHERS["local"].plan(make_cell(), site)
        update = {"continuation": continuation, "budget": budget, "progressed": progressed}
        launch = launch.model_copy(update=update).identified(attempt)
        launch.write(attempt)
        segment = {"rank": 0, "segment": 0, "first_step": first_step, "attempt": None, "started_at": 1.0}
        attempt.write("segment.json", {**segment, "away_seconds": 0.0, "bitwise": True, "notes": []})
        if saved is not None:
            path = attempt.path / "checkpoints" / f"step-{saved:08}"
            path.mkdir(parents=True)
            (path / "manifest.json").write_text("{}")
        return attempt, launch, Outcome("TIMEOUT", "stopped", None, "error", 1.0, 2.0, checkpoint_step=saved)

    return make


def follow(met, account=None):
    attempt, launch, outcome = met
    folder = sweep_folder("study", attempt.path.parents[2])
    budget = account or StartBudget(folder, launch.budget, LONG, 30.0, alone=True)
    return continued(attempt, launch, outcome, budget)


def test_the_next_attempt_is_pending_and_continues_the_first_before_that_has_an_outcome(met_limit):
    attempt, launch, _ = met = met_limit()
    outcome, following = follow(met)
    assert (outcome.state, outcome.cause) == ("TIMEOUT", "stopped; continued by attempt 2")
    assert attempt.outcome() is None
    then = Launch.read(following)
    assert (following.number, then.continues, then.continuation) == (2, 1, 1)
    assert then.continues_id == launch.id != then.id
    assert following.lineage() == [following, attempt]
    (status,) = read_statuses(sweep_folder("study", attempt.path.parents[2]))
    assert (status.state, status.attempt) == ("PENDING", following)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"continuation": 3}, "; not continued: max_continuations=3 of site test is reached"),
        ({"saved": None, "progressed": False}, f"; not continued: {STUCK} 0"),
        ({"first_step": 120, "progressed": False}, f"; not continued: {STUCK} 120"),
        ({"most": 0}, ""),
    ],
)
def test_without_right_or_progress_it_is_not_continued_and_the_cause_says_so(met_limit, change, why):
    outcome, following = follow(met_limit(**change))
    assert (following, outcome.state, outcome.cause) == (None, "TIMEOUT", f"stopped{why}")


def test_a_first_attempt_without_progress_is_followed_by_another_from_where_it_began(met_limit):
    _, following = follow(met_limit(saved=None))
    launch = Launch.read(following)
    assert (launch.continues, launch.continuation, launch.progressed) == (None, 1, False)
    _, following = follow(met_limit(progressed=False))
    assert Launch.read(following).progressed


def test_a_run_whose_first_step_is_not_known_ends_with_its_outcome_and_says_why(met_limit):
    attempt, *_ = met = met_limit()
    (attempt.path / "segment.json").write_text("")
    outcome, following = follow(met)
    assert (following, outcome.state) == (None, "TIMEOUT")
    why = f"the next attempt could not be prepared: {attempt.path / 'segment.json'}: holds nothing"
    assert outcome.cause.startswith(f"stopped; not continued: {why}")


def test_what_was_cancelled_meanwhile_is_not_continued(met_limit):
    attempt, *_ = met = met_limit()
    request_cancel(attempt)
    assert follow(met)[1] is None


def test_a_budget_pays_for_starts_until_one_more_could_exceed_it_and_gets_unused_time_back(
    met_limit, tmp_path, monkeypatch
):
    clock = SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime)
    monkeypatch.setattr("harness.launchers.cost.time", clock)
    now, folder = [1000.0], sweep_folder("study", tmp_path)
    folder.make()
    name = open_budget(folder, 1.2, LONG)  # one start could cost 0.5

    def start_for(minutes):
        account = StartBudget(folder, name, LONG, 30.0, alone=True)
        now[0] += minutes * 60
        return follow(met_limit(budget=name), account)

    assert start_for(15)[1] is not None  # 0.25 used, and the next one could cost 0.5
    outcome, following = start_for(30)  # 0.75 used: 1.25 with another one
    assert following is None
    assert outcome.cause == (
        "stopped; not continued: the budget of 1.2 core-hours has 0.45 left, and another start could cost 0.5"
    )


def test_slots_of_one_job_pay_once_for_its_next_start(met_limit, tmp_path):
    folder = sweep_folder("study", tmp_path)
    folder.make()
    name = open_budget(folder, 1.0, LONG)
    job = StartBudget(folder, name, LONG, 30.0, alone=False)
    assert [follow(met_limit(budget=name), job)[1] is not None for _ in range(2)] == [True, True]
    other = StartBudget(folder, name, LONG, 30.0, alone=False)
    assert "has 0 left" in follow(met_limit(budget=name), other)[0].cause


def test_what_is_cancelled_before_it_starts_costs_nothing_however_long_it_waited(
    make_cell, make_attempt, site, tmp_path, monkeypatch
):
    quarters = itertools.count(0.0, 900.0)  # each look at the clock is a quarter of an hour later
    clock = SimpleNamespace(monotonic=lambda: next(quarters), strftime=time.strftime)
    monkeypatch.setattr("harness.launchers.cost.time", clock)
    monkeypatch.setattr(supervisor.signal, "signal", lambda *_: None)
    folder = sweep_folder("study", tmp_path)
    folder.make()
    cells = [make_cell(seed=seed) for seed in range(3)]  # an hour on one CPU each
    name = open_budget(folder, 9.0, LAUNCHERS["local"].estimate_cost(cells, site))
    attempts = [make_attempt(cell) for cell in cells]
    for attempt in attempts:
        attempt.write("launch.json", attempt.read("launch.json") | {"budget": name})

    def committed():
        return Attempt(folder.path / "budgets").read(f"{name}.json")["committed"]

    assert committed() == 3.0
    cancel(cells[:1], tmp_path)  # as it waits in the queue
    assert committed() == 2.0
    request_cancel(attempts[1])  # as its supervisor waits for locks
    assert supervisor.supervise_attempt(str(attempts[1].path)) == "CANCELLED"
    assert committed() == 1.0
    cancel(cells[:2], tmp_path)
    assert supervisor.supervise_attempt(str(attempts[1].path)) is None
    assert committed() == 1.0


def test_cancelling_what_waits_to_be_continued_names_its_checkpoint(met_limit, make_cell, tmp_path):
    _, following = follow(met_limit())
    assert cancel([make_cell()], tmp_path) == [make_cell()]
    outcome = following.outcome()
    cause = "cancelled before it started; a retry resumes from its checkpoint at step 120"
    assert (outcome.state, outcome.cause, outcome.checkpoint_step) == ("CANCELLED", cause, 120)


def run_to_its_end(cell, site, root, wait_for, **terms):
    submit([cell], site, root, COUNTING_RANK, **terms)
    wait_for(lambda: read_statuses(sweep_folder("study", root), [cell])[0].final)
    return sweep_folder("study", root).cell_folder(cell).attempts()


def test_cancelling_a_running_attempt_at_once_names_the_checkpoint_that_it_had(met_limit):
    attempt, *_ = met_limit()
    killed = RanksEnd("cancel", (RankDeath(0, -15, own=False),))
    outcome = outcome_of_ranks(attempt, killed, 1.0, 2.0, oom_killed=False)
    cause = "cancelled while running; the last rank was 0, before its first step; "
    assert outcome.state == "CANCELLED"
    assert outcome.cause == f"{cause}a retry resumes from its checkpoint at step 120"


@pytest.mark.ranks
def test_a_run_longer_than_its_limit_ends_like_one_without(make_cell, tmp_path, wait_for):
    site = Site(name="test", timeout_minutes=0.1, max_continuations=30)
    cell = make_cell(steps=40, step_seconds=0.1)
    *cut, last = run_to_its_end(cell, site, tmp_path, wait_for)
    assert cut, last.outcome().cause
    for number, attempt in enumerate(cut, start=1):
        outcome = attempt.outcome()
        assert outcome.state == "TIMEOUT"
        assert outcome.cause.endswith(f"step {outcome.checkpoint_step}; continued by attempt {number + 1}")
    assert last.outcome().state == "COMPLETED"
    # Each resumes from the newest that saved a checkpoint: on a busy machine one may be cut before it does.
    steps = [0, *(attempt.outcome().checkpoint_step or 0 for attempt in cut)]
    saved = [
        attempt
        for attempt, (before, after) in zip(cut, itertools.pairwise(steps), strict=True)
        if after > before
    ]
    assert last.lineage() == [last, *saved[::-1]]
    assert last.read("result.json")["parameters_sha256"] == digest_of(40)


@pytest.mark.ranks
def test_a_run_that_has_used_up_its_budget_ends_with_its_checkpoint(make_cell, tmp_path, wait_for):
    """Of two starts with their whole limit, of which each ends after half of it: three starts."""
    site = Site(name="test", timeout_minutes=0.1, max_continuations=30)
    cell = make_cell(steps=100_000, step_seconds=0.01)
    *cut, last = run_to_its_end(cell, site, tmp_path, wait_for, budget=2.1 * 0.1 / 60)
    assert 1 <= len(cut) <= 3
    assert all("; continued by attempt" in one.outcome().cause for one in cut)
    outcome = last.outcome()
    assert outcome.state == "TIMEOUT"
    assert "; not continued: the budget of 0.0035 core-hours has 0.0" in outcome.cause
    assert outcome.checkpoint_step > cut[-1].outcome().checkpoint_step > 0


@pytest.fixture
def retried(tmp_path, make_cell, site, monkeypatch):
    """A cell's folder with a failed attempt that saved a checkpoint, and the attempt that continues it."""
    monkeypatch.setattr(LocalLauncher, "finish_submission", lambda *_, **__: None)

    def make(name):
        root = tmp_path / name
        submit([make_cell()], site, root)
        folder = sweep_folder("study", root).cell_folder(make_cell())
        store = CheckpointStore(folder.latest())
        store.begin(7)
        store.publish(7, Manifest(FORMAT_VERSION, 7, 1, 0, "interval", 1.0, {}))
        folder.latest().write_outcome(outcome_without_ranks("FAILED", "killed"))
        retry([make_cell()], site, root)
        return folder

    return make


def test_attempts_have_identities_and_name_the_one_that_they_continue(retried):
    first, second = (Launch.read(attempt) for attempt in retried("here").attempts())
    assert first.continues_id is None
    assert (second.continues, second.continues_id) == (1, first.id)
    assert len({first.id, second.id, None}) == 3


def test_an_attempt_that_was_copied_beside_another_run_does_not_join_it(retried):
    here, there = retried("here"), retried("there")
    assert [one.number for one in here.latest().lineage()] == [2, 1]
    shutil.rmtree(here.path / "attempt-2")
    shutil.copytree(there.path / "attempt-2", here.path / "attempt-2")
    with pytest.raises(
        StoredFileError, match=r"attempt-2/launch.json: continues=1 .* copied into each other"
    ):
        here.latest().lineage()


def test_attempts_of_older_versions_are_joined_by_their_numbers(retried):
    folder = retried("here")
    for attempt in folder.attempts():
        launch = attempt.read("launch.json")
        attempt.write(
            "launch.json", {name: launch[name] for name in launch if name not in ("id", "continues_id")}
        )
    assert [one.number for one in folder.latest().lineage()] == [2, 1]


MISSED = {"reached_target": False, "stop_reason": "epochs", "train_seconds": 1.0, "value": 0.8, "steps": 40,
          "parameters_sha256": "0" * 64}  # fmt: skip


def write_records(attempt, first_step, *evaluations):
    """Write rank 0's records: its first step, and (step, value) of evaluations; ten steps per epoch."""
    lines = [to_line(SegmentRecord(0, 0, first_step, None, 0.0, 0.0, True))]
    lines += [evaluation_line(step, step / 10, value) for step, value in evaluations]
    attempt.records(0).write_text("".join(lines))


@pytest.fixture
def second_segment(make_cell, make_attempt):
    """The second attempt, second_segment at step 20 of a first one that had reached step 30."""
    cell = make_cell()
    first, second = make_attempt(cell), make_attempt(cell)
    launch = Launch.read(second)
    launch.model_copy(update={"continues": 1}).write(second)
    write_records(first, 0, (10, 0.9), (20, 0.95), (30, 0.99))
    return second


def test_the_best_value_is_the_best_of_all_segments_but_for_what_was_done_again(second_segment):
    write_records(second_segment, 20, (30, 0.7), (40, 0.8))
    second_segment.write("result.json", MISSED)
    outcome = outcome_of_ranks(second_segment, RanksEnd("ranks", (RankDeath(0, 0, True),)), 0.0, 1.0, False)
    assert outcome.cause == "target accuracy >= 0.97 not reached: best 0.95 after 4 epochs"


def test_a_run_that_was_not_evaluated_since_it_was_resumed_shows_the_value_before(second_segment, tmp_path):
    write_records(second_segment, 20)
    RanksStarted(time.time(), (0,), ()).write(second_segment)
    HeartbeatWriter(second_segment.heartbeat(0)).write("forward")
    second_segment.write("supervisor.json", {"host": "elsewhere", "pid": 1, "created": 0.0})
    (seen,) = read_statuses(sweep_folder("study", tmp_path))
    assert (seen.state, seen.value) == ("RUNNING", 0.95)


@pytest.fixture
def renamed(make_attempt, make_cell):
    """A pending attempt at a cell that has another id in this version."""

    def make(**cell):
        attempt = make_attempt(make_cell(**cell))
        then = attempt.path.parent.with_name(f"sgd-p1-s{cell.get('seed', 0)}-0123456789")
        attempt.path.parent.rename(then)
        return CellFolder(then).latest()

    return make


def test_a_retry_of_cells_of_another_version_says_what_to_do(tmp_path, renamed, capsys):
    renamed().write_outcome(outcome_without_ranks("FAILED", "it was killed"))
    assert main(["retry", "study", "--runs", str(tmp_path), "--site", "local"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith(
        "error: no cell of study can be started again by this version of Kronscale; retry"
    )
