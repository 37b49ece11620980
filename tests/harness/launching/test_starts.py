"""Promise: what starts, where, in which order, from which checkpoint and at what cost."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import BudgetError, CostlyError
from harness.launchers import LAUNCHERS
from harness.launchers.cost import CostEstimate
from harness.launchers.launch import Launch, ProcessIdentity, RanksStarted
from harness.launchers.local import LocalLauncher
from harness.launchers.local.host_locks import pools_of
from harness.launchers.local.queue import pending
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.launchers.resuming import continued_attempts
from harness.launchers.slurm.job_layout import JobLayout, lay_out, nodes_of
from harness.launchers.slurm.launcher import bad_nodes
from harness.launchers.slurm_profile import SlurmProfile
from harness.runs.checkpoint_store import FORMAT_VERSION, CheckpointStore, Manifest
from harness.runs.store import sweep_folder
from harness.study.site_choice import last_launch
from harness.study.status import CellStatus
from harness.study.submit import retry, submit


@pytest.fixture(autouse=True)
def _no_queue(monkeypatch):
    monkeypatch.setattr(LocalLauncher, "finish_submission", lambda *_, **__: None)


@pytest.fixture
def folder(tmp_path):
    return sweep_folder("study", tmp_path)


@pytest.fixture
def ended(tmp_path, site, folder):
    """Submit or retry a cell, save a checkpoint in its new attempt, and end that."""

    def end(cell, state="FAILED", step=7, start=submit):
        start([cell], site, tmp_path)
        attempt = folder.cell_folder(cell).latest()
        store = CheckpointStore(attempt)
        store.begin(step)
        store.publish(step, Manifest(FORMAT_VERSION, step, 1, 0, "interval", 1.0, {}))
        attempt.write_outcome(outcome_without_ranks(state, ""))
        return attempt

    return end


def continues(cell, folder):
    return Launch.read(folder.cell_folder(cell).latest()).continues


def test_a_retry_continues_the_newest_attempt_with_a_checkpoint(make_cell, site, tmp_path, folder, ended):
    cell = make_cell()
    first, second = ended(cell), ended(cell, start=retry)
    assert continued_attempts([cell], folder) == {cell.id: second}
    CheckpointStore(second).clear()
    assert continued_attempts([cell], folder) == {cell.id: first}
    retry([cell], site, tmp_path)
    assert continues(cell, folder) == 1


def test_a_fresh_retry_and_a_repetition_start_from_the_beginning(make_cell, site, tmp_path, folder, ended):
    fresh, repeated = make_cell(seed=0), make_cell(seed=1)
    ended(fresh)
    retry([fresh], site, tmp_path, fresh=True)
    assert continues(fresh, folder) is None
    ended(repeated, state="COMPLETED")
    retry([repeated], site, tmp_path, repeat=True)
    assert continues(repeated, folder) is None
    assert folder.cell_folder(repeated).latest().number == 2


def test_completed_cells_are_not_retried_and_failed_ones_not_submitted(make_cell, site, tmp_path, ended):
    good, bad = make_cell(seed=0), make_cell(seed=1)
    ended(good, state="COMPLETED")
    ended(bad)
    submission = submit([good, bad], site, tmp_path)
    assert (submission.new, submission.already_done, submission.failed_before) == ((), (good,), (bad,))
    assert retry([good, bad], site, tmp_path).new == (bad,)


def test_a_budget_answers_the_question_whether_so_much_may_be_spent(make_cell, site, tmp_path):
    dear = site.model_copy(update={"timeout_minutes": 60 * 2000.0})
    with pytest.raises(CostlyError, match="could cost 2000 core-hours"):
        submit([make_cell()], dear, tmp_path, ask=True)
    with pytest.raises(BudgetError, match="the budget is 1999"):
        submit([make_cell()], dear, tmp_path, budget=1999, ask=True)
    assert submit([make_cell()], dear, tmp_path, budget=2000, ask=True).new == (make_cell(),)


def test_gpu_hours_count_where_gpus_are_held():
    costly = CostEstimate(gpu_hours=101.0, core_hours=50.0)
    with pytest.raises(CostlyError, match="could cost 101 GPU-hours"):
        costly.refuse_unasked()
    with pytest.raises(CostlyError, match="with --yes or --budget 101, or"):  # which is then enough
        replace(costly, gpu_hours=100.2).refuse_unasked()
    with pytest.raises(BudgetError, match=r"101 GPU-hours.*the budget is 100"):
        costly.refuse_beyond(100.0)
    replace(costly, gpu_hours=99.0, core_hours=5000.0).refuse_unasked()
    replace(costly, gpu_hours=0.0, core_hours=999.0).refuse_unasked()
    with pytest.raises(CostlyError):
        replace(costly, gpu_hours=0.0, core_hours=1001.0).refuse_unasked()


def test_as_many_ranks_as_cpus_fit_and_share_none(make_cell, site, cpus):
    strict = site.model_copy(update={"oversubscribe": False})
    launcher = LAUNCHERS["local"]
    launcher.check(make_cell(cpus), strict)
    assert not launcher.plan(make_cell(cpus), strict).oversubscribed


@pytest.mark.parametrize("alone", [True, False])
def test_one_at_a_time_an_attempt_locks_the_whole_host(make_cell, site, alone):
    quiet = site.model_copy(update={"one_at_a_time": alone, "cpus_per_rank": 1})
    launch = LAUNCHERS["local"].plan(make_cell(), quiet).model_copy(update={"cpus": (0, 1, 2, 3)})
    assert pools_of(launch, 1)[0] == ("cpu", (0, 1, 2, 3), 4 if alone else 1)


def test_a_process_is_alive_by_its_number_its_start_and_its_host():
    own = ProcessIdentity.mine()
    assert own.alive()
    assert not replace(own, created=own.created - 60).alive()  # the number of an earlier process
    assert replace(own, host="elsewhere", pid=2**30).alive()  # nobody here can know
    assert not replace(own, pid=2**30).alive()


def test_a_zombie_is_not_alive(wait_for):
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    status = Path(f"/proc/{child.pid}/stat")
    wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "Z")
    assert not replace(ProcessIdentity.mine(), pid=child.pid, created=time.time()).alive()
    child.join()


def test_pending_attempts_are_taken_in_the_order_of_submission(make_cell, make_attempt, folder):
    attempts = [make_attempt(make_cell(seed=seed)) for seed in range(4)]
    for attempt, at in zip(attempts, (30.0, 10.0, 40.0, 20.0), strict=True):
        attempt.write("launch.json", attempt.read("launch.json") | {"submitted_at": at})
    RanksStarted(1.0, (0,), ()).write(attempts[3])
    assert list(pending(folder)) == [attempts[1], attempts[0], attempts[2]]


def test_a_node_is_bad_after_two_failures(make_cell, make_attempt):
    cells = [make_cell(seed=seed) for seed in range(2)]
    attempts = []
    for cell, nodes in ((cells[0], ("n1", "n2")), (cells[1], ("n2",))):
        attempts.append(make_attempt(cell))
        outcome = replace(outcome_without_ranks("NODE_FAIL", ""), failed_nodes=nodes)
        attempts[-1].write_outcome(outcome)
    assert bad_nodes(attempts) == ("n2",)


def test_the_site_is_that_of_the_newest_launch_of_any_cell(make_cell, make_attempt, folder):
    cells = [make_cell(seed=seed) for seed in range(3)]
    for cell, at in zip(cells, (20.0, 30.0, 10.0), strict=True):
        attempt = make_attempt(cell, name=f"site-{at:g}")
        attempt.write("launch.json", attempt.read("launch.json") | {"submitted_at": at})
    assert last_launch(folder).site.name == "site-30"
    assert last_launch(folder, [cells[0], cells[2]]).site.name == "site-20"


def test_the_time_left_is_that_of_the_steps_left(make_cell):
    status = CellStatus(make_cell(), "RUNNING", step=25, total_steps=100, started_at=1.0, ended_at=51.0)
    assert status.eta_seconds == 150.0
    assert replace(status, state="COMPLETED").eta_seconds is None


@pytest.mark.parametrize(("ranks", "most", "nodes"), [(4, 4, 1), (6, 4, 2), (6, 5, 2), (5, 2, 5), (8, 3, 4)])
def test_a_cell_takes_the_fewest_nodes_that_its_ranks_fill_equally(ranks, most, nodes):
    assert nodes_of(ranks, most) == nodes


def test_a_job_has_the_time_and_the_cpus_of_all_its_cells(site):
    profile = SlurmProfile(ranks_per_node=2)
    slurm = site.model_copy(update={"slurm": profile, "timeout_minutes": 29.0, "launcher": "slurm"})
    layout = JobLayout(world_size=2, nodes=1, slots=3, length=2)
    assert layout.minutes(slurm) == 2 * 29 + 2
    assert layout.estimate_cost(slurm).core_hours == pytest.approx(2 * 3 * 1.0)


def test_arms_of_a_block_share_a_job_if_the_site_pairs_them(make_cell, site):
    cells = [make_cell(seed=seed, steps=steps) for seed in range(2) for steps in (1, 2)]
    jobs = {}
    for paired in (True, False):
        profile = SlurmProfile(ranks_per_node=1, pair_arms=paired)
        found = lay_out(((cell, cell) for cell in cells), site.model_copy(update={"slurm": profile}))
        jobs[paired] = [[cell.seed for cell in slot] for jobs in found.values() for (slot,) in jobs]
    assert jobs == {True: [[0, 0], [1, 1]], False: [[0], [0], [1], [1]]}
