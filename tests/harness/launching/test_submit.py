"""Promise: submit may be repeated and interrupted; each cell runs once."""

import json
import os
import shutil
import signal
from itertools import pairwise

import pytest

from harness.errors import SiteError
from harness.launchers.launch import Launch, ProcessIdentity, RanksStarted
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.launchers.site_profile import Site
from harness.runs.store import sweep_folder
from harness.runs.stored_files import read_as
from harness.study.status import is_stalled, read_statuses
from harness.study.submit import cancel, in_blocks, retry, submit
from tests.harness.launching.conftest import FAKE_RANK, digits_cell
from tests.waiting import wait_for as wait_until

pytestmark = pytest.mark.ranks


@pytest.fixture
def folder(tmp_path):
    return sweep_folder("study", tmp_path)


@pytest.fixture
def finish(folder, wait_for):
    """Wait until nothing is in flight and give the states by seed."""

    def done(cells):
        wait_for(lambda: all(one.final for one in read_statuses(folder, cells)))
        return {one.cell.seed: one.state for one in read_statuses(folder, cells)}

    return done


@pytest.fixture(scope="module")
def ended_once(tmp_path_factory):
    """The study of `ended`, run once."""
    root = tmp_path_factory.mktemp("ended")
    cells = [digits_cell(seed=0), digits_cell(seed=1, act="exit", once=True)]
    folder = sweep_folder("study", root)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KRONSCALE_LOCKS", str(root / "locks"))
        submit([*cells, cells[0]], Site(name="test", oversubscribe=True), root, FAKE_RANK)
        wait_until(lambda: all(one.final for one in read_statuses(folder, cells)))
        wait_until(lambda: queue(folder) is None)
    return folder, cells


@pytest.fixture
def ended(ended_once, folder):
    """A test's own copy of a study with a completed cell and one whose first attempt failed."""
    before, cells = ended_once
    shutil.copytree(before.path, folder.path)
    return cells


def queue(folder):
    raw = folder.path / "queue.json"
    return read_as(ProcessIdentity, raw) if raw.exists() else None


def test_cells_run_once_in_order_and_never_more_at_a_time_than_locks(
    make_cell, site, tmp_path, command, folder, finish, cpus
):
    cells = [make_cell(seed=seed, steps=10) for seed in range(3)] + [make_cell(cpus, seed=3)]
    assert submit(cells, site, tmp_path, command).new == tuple(cells)
    assert finish(cells) == dict.fromkeys(range(4), "COMPLETED")
    spans = []
    for status in read_statuses(folder, cells):
        assert status.attempt.number == 1
        for rank in range(status.cell.world_size):
            used = json.loads((status.attempt.path / f"used-{rank}.json").read_text())
            spans += [(used["from"], 1, used["cpus"]), (used["to"], -1, used["cpus"])]
    busy = []
    for _, change, (cpu,) in sorted(spans):
        assert (cpu in busy) == (change < 0), "two ranks on one CPU"
        (busy.append if change > 0 else busy.remove)(cpu)
    started = [status.started_at for status in read_statuses(folder, cells)]
    assert started == sorted(started)


def test_deleting_a_cells_folder_makes_exactly_that_cell_run_again(
    ended, site, tmp_path, command, folder, finish
):
    good, bad = ended
    before = folder.cell_folder(bad).latest().outcome()
    shutil.rmtree(folder.cell_folder(good).path)
    assert submit(ended, site, tmp_path, command).new == (good,)
    assert finish(ended) == {0: "COMPLETED", 1: "FAILED"}
    assert folder.cell_folder(bad).latest().outcome() == before


def test_a_killed_queue_loses_nothing(make_cell, site, tmp_path, command, folder, finish, wait_for):
    cells = [make_cell(seed=seed, steps=30) for seed in range(3)]
    one_at_a_time = site.model_copy(update={"cpus": 1})
    submit(cells, one_at_a_time, tmp_path, command)
    wait_for(lambda: any(one.state == "RUNNING" for one in read_statuses(folder, cells)))
    os.kill(queue(folder).pid, signal.SIGKILL)
    wait_for(lambda: not queue(folder).alive())
    assert is_stalled(folder, read_statuses(folder, cells))
    assert submit(cells, one_at_a_time, tmp_path, command).new == ()
    assert finish(cells) == dict.fromkeys(range(3), "COMPLETED")
    assert [len(one.attempts()) for one in folder.cell_folders()] == [1, 1, 1]
    wait_for(lambda: queue(folder) is None)


def test_retry_gives_only_failed_cells_another_attempt(ended, site, tmp_path, command, folder, finish):
    assert retry(ended, site, tmp_path, command).new == (ended[1],)
    assert finish(ended) == {0: "COMPLETED", 1: "COMPLETED"}
    assert [len(folder.cell_folder(cell).attempts()) for cell in ended] == [1, 2]
    assert retry(ended, site, tmp_path, command).new == ()


def test_cancel_ends_pending_and_running_cells_before_it_returns(
    make_cell, site, tmp_path, command, folder, wait_for
):
    cells = [make_cell(seed=seed, steps=3000) for seed in range(3)]
    submit(cells, site.model_copy(update={"cpus": 1}), tmp_path, command)
    wait_for(lambda: read_statuses(folder, cells)[0].step)
    assert submit(cells, site, tmp_path, command).in_flight == tuple(cells)
    assert cancel(cells, tmp_path) == cells
    statuses = read_statuses(folder, cells)
    assert [one.state for one in statuses] == ["CANCELLED"] * 3
    assert ["at step" in one.cause for one in statuses] == [True, False, False]
    wait_for(lambda: queue(folder) is None)


def test_a_running_cell_with_a_damaged_launch_file_is_cancelled_with_the_others(
    make_cell, make_attempt, tmp_path, monkeypatch
):
    cells = [make_cell(seed=seed) for seed in range(2)]
    running, waiting = (make_attempt(cell) for cell in cells)
    RanksStarted(1.0, (0,), ()).write(running)
    running.write("supervisor.json", ProcessIdentity.mine().to_dict())
    (running.path / "launch.json").write_text("")

    def end(_):
        return running.write_outcome(outcome_without_ranks("CANCELLED", "cancelled while running"))

    monkeypatch.setattr(ProcessIdentity, "terminate", end)
    assert cancel(cells, tmp_path) == cells
    assert [one.outcome().state for one in (running, waiting)] == ["CANCELLED"] * 2


def test_a_cell_that_the_site_can_never_run_is_refused_before_anything_is_written(
    make_cell, site, tmp_path, command, folder
):
    strict = site.model_copy(update={"oversubscribe": False, "cpus": 1})
    with pytest.raises(SiteError, match=r"needs 2 CPUs.*has 1"):
        submit([make_cell(seed=1), make_cell(2)], strict, tmp_path, command)
    assert list(folder.cell_folders()) == []
    with pytest.raises(SiteError, match="cpus=4000"):
        submit([make_cell()], site.model_copy(update={"cpus": 4000}), tmp_path, command)


def test_a_job_that_ends_before_its_ranks_start_is_a_failure_and_not_waited_for(
    make_cell, site, tmp_path, command, folder, finish, monkeypatch
):
    cell = make_cell()
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "no folder"))
    (tmp_path / "no folder").touch()
    submit([cell], site, tmp_path, command)
    assert finish([cell]) == {0: "FAILED"}
    cause = read_statuses(folder, [cell])[0].cause
    assert "before it started a rank" in cause
    log = folder.cell_folder(cell).latest().path / cause.rsplit("see ", 1)[1]
    assert "must be a folder with mode 1777" in log.read_text()


def test_one_at_a_time_no_cell_runs_beside_another_and_each_has_its_place_in_the_order(
    make_cell, site, tmp_path, command, folder, finish, cpus
):
    cells = [make_cell(seed=seed, steps=5) for seed in range(3)]
    submit(cells, site.model_copy(update={"one_at_a_time": True}), tmp_path, command)
    assert finish(cells) == dict.fromkeys(range(3), "COMPLETED")
    attempts = [one.attempt for one in read_statuses(folder, cells)]
    used = [json.loads((attempt.path / "used-0.json").read_text()) for attempt in attempts]
    assert all(before["to"] <= after["from"] for before, after in pairwise(used))
    assert all(len(one["cpus"]) == 1 for one in used)  # the rank has its own, not all that are held
    launches = [Launch.read(attempt) for attempt in attempts]
    assert [one.order for one in launches] == [0, 1, 2]
    assert len({one.order_seed for one in launches}) == 1
    assert launches[0].order_seed is not None
    started = [RanksStarted.read(attempt) for attempt in attempts]
    assert all(len(one.cpus) == cpus for one in started)
    jobs = [next((attempt.path / "submitit").glob("*_submitted.pkl")) for attempt in attempts]
    submitted_at = [job.stat().st_mtime for job in jobs]  # before its supervisor starts
    ended_at = [attempt.outcome().ended_at for attempt in attempts]
    assert all(ended <= came for ended, came in zip(ended_at[:-1], submitted_at[1:], strict=True))


def test_cells_start_in_blocks_of_one_seed_with_the_arms_mixed(make_cell):
    cells = [make_cell(world_size=size, seed=seed) for size in (1, 2, 4) for seed in range(4)]
    ordered = in_blocks(cells)
    assert [cell.seed for cell in ordered] == [seed for seed in range(4) for _ in range(3)]
    assert sorted(cell.id for cell in ordered) == sorted(cell.id for cell in cells)
    assert len({tuple(cell.world_size for cell in ordered[i : i + 3]) for i in range(0, 12, 3)}) > 1
    assert in_blocks(cells[::-1]) == ordered
    first = {tuple(cell.id for cell in in_blocks(cells, order_seed)) for order_seed in range(20)}
    assert len(first) > 10  # a submission draws the order anew
