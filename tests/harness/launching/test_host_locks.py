"""Promise: no CPU is locked twice, every wait ends, the killed free theirs; `status` says who has what."""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from harness.cli import main
from harness.launchers.launch import ProcessIdentity
from harness.launchers.local.host_locks import holders, lock_folder, locked
from harness.launchers.local.queue import pending
from harness.launchers.slurm import scheduler_state
from harness.launchers.slurm.scheduler import Job
from harness.runs.store import sweep_folder
from harness.study.status import read_statuses
from harness.study.submit import cancel

POOL = tuple(range(4))
FORK = multiprocessing.get_context("fork")


def hold(needed, seconds, journal, name, times=1):
    for _ in range(times):
        with locked([("cpu", POOL, needed)]) as got:
            lines = [f"{time.monotonic()} take {cpu} {name}" for cpu in got[0]]
            append(journal, lines)
            time.sleep(seconds)
            append(journal, [f"{time.monotonic()} free {cpu} {name}" for cpu in got[0]])


def append(journal, lines):
    with journal.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def read(journal):
    rows = [line.split() for line in journal.read_text().splitlines()]
    return sorted((float(when), act, int(cpu), name) for when, act, cpu, name in rows)


def start(*arguments, **options):
    process = FORK.Process(target=hold, args=arguments, kwargs=options)
    process.start()
    return process


def test_supervisors_of_many_sizes_at_once_never_share_a_lock_and_all_end(tmp_path):
    journal = tmp_path / "journal"
    supervisors = [start(needed, 0.02, journal, f"g{needed}", times=5) for needed in (1, 2, 3, 4, 1, 2)]
    for supervisor in supervisors:
        supervisor.join(120)
        assert supervisor.exitcode == 0
    held = set()
    for _, act, cpu, _ in read(journal):
        if act == "take":
            assert cpu not in held
            held.add(cpu)
        else:
            held.remove(cpu)


def hold_until(ended, journal, name):
    while not ended.is_set():
        hold(1, 0.01, journal, name)


def test_a_supervisor_that_needs_many_locks_is_not_starved_by_others(tmp_path, wait_for):
    """Others take locks again and again, until it has had its own: starved, it would never get them."""
    journal, ended = tmp_path / "journal", FORK.Event()
    names = {f"narrow-{number}" for number in range(4)}
    narrow = [FORK.Process(target=hold_until, args=(ended, journal, name)) for name in names]
    for supervisor in narrow:
        supervisor.start()
    wait_for(lambda: journal.exists() and {row[3] for row in read(journal)} == names)
    wide = start(4, 0.0, journal, "wide")
    wide.join(120)
    ended.set()
    for supervisor in narrow:
        supervisor.join()
    assert wide.exitcode == 0
    assert [act for _, act, _, name in read(journal) if name == "wide"] == ["take"] * 4 + ["free"] * 4


def test_the_kernel_frees_the_locks_of_a_supervisor_killed_with_sigkill(tmp_path, wait_for):
    journal = tmp_path / "journal"
    holder = start(4, 600, journal, "dead")
    wait_for(journal.exists)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with locked([("cpu", POOL, 4)]) as got:
        assert got == [POOL]


def test_a_wait_for_locks_can_be_given_up_and_lets_others_wait():
    with locked([("cpu", POOL, 3)]):
        with locked([("cpu", POOL, 2)], give_up=lambda: True) as got:
            assert got is None
        with locked([("cpu", POOL, 1)]) as got:
            assert got == [(3,)]


def waiting(pools, label, got, ended):
    with locked(pools, label=label) as found:
        got.put((label, found))
        ended.wait(60)


def test_what_is_free_is_kept_for_the_first_that_waits_until_that_is_killed(tmp_path, wait_for):
    """Three of four are held, and one waits for all: nobody may take the fourth before it."""
    got, ended = FORK.Queue(), FORK.Event()

    def start_waiting(label, needed):
        process = FORK.Process(target=waiting, args=([("cpu", POOL, needed)], label, got, ended))
        process.start()
        return process

    processes = [start_waiting("holder", 3)]
    try:
        assert got.get(timeout=60)[0] == "holder"
        processes.append(start_waiting("wide", 4))
        wait_for(lambda: holders().get("cpu-0-queue") == "wide")
        processes.append(start_waiting("narrow", 1))
        with pytest.raises(queue.Empty):
            got.get(timeout=0.5)
        with locked([("cpu", (5, 6), 1)]) as elsewhere:  # nobody waits for these
            assert elsewhere == [(5,)]
        processes[1].kill()
        assert got.get(timeout=60) == ("narrow", [(3,)])
        assert "cpu-0-queue" not in holders()
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("used", [True, False])
def test_two_processes_may_make_the_folder_of_locks_at_the_same_time(tmp_path, monkeypatch, used):
    chmod, folder, others = Path.chmod, tmp_path / "locks", []

    def chmod_late(path, mode):
        if not others:  # another process makes the folder, and may use it, before this one sets the mode
            others.append("comes")
            others.append(lock_folder())
            if used:
                (folder / "door.lock").touch()
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", chmod_late)
    assert lock_folder() == folder
    assert others[1:] == [folder]
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]
    assert [path.name for path in folder.iterdir()] == (["door.lock"] if used else [])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as other users")
def test_users_of_a_host_share_its_locks_and_see_who_has_them(monkeypatch, wait_for):
    """Two users, neither of whom is root or owns the folder."""
    folder = Path(tempfile.mkdtemp(prefix="kronscale-test-"))
    folder.chmod(0o755)
    monkeypatch.setenv("KRONSCALE_LOCKS", str(folder / "locks"))
    lock_folder()
    got = FORK.Queue()

    def as_user(user, needed, label):
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        waiting([("cpu", POOL, needed)], label, got, FORK.Event())

    label = "/home/x/runs/demo/sgd-p2-s0-0123456789/attempt-1"
    first = FORK.Process(target=as_user, args=(65001, 3, label))
    second = FORK.Process(target=as_user, args=(65002, 2, "second"))
    try:
        first.start()
        assert got.get(timeout=60) == (label, [(0, 1, 2)])
        assert holders() == dict.fromkeys(("cpu-0", "cpu-1", "cpu-2"), f"{label} of user 65001")
        second.start()
        wait_for(lambda: holders().get("cpu-0-queue") == "second of user 65002")
        with pytest.raises(queue.Empty):
            got.get_nowait()
        first.kill()
        assert got.get(timeout=60) == ("second", [(0, 1)])
        assert holders()["cpu-0"] == "second of user 65002"
        second.kill()
        second.join()
        with locked([("cpu", POOL, 4)]) as found:
            assert found == [POOL]
    finally:
        for user in (first, second):
            if user.pid is not None:
                user.kill()
                user.join()
        shutil.rmtree(folder)


TWO_CPUS = [("cpu", (0, 1, 2, 3), 2)]


def test_a_lock_names_its_holder_while_it_is_held(tmp_path):
    assert holders() == {}
    with locked(TWO_CPUS, label="/runs/demo/sgd-p2-s0-0123456789/attempt-1"):
        assert holders() == dict.fromkeys(("cpu-0", "cpu-1"), "/runs/demo/sgd-p2-s0-0123456789/attempt-1")
        with locked([("cpu", (2,), 1)]):
            assert holders()["cpu-2"].startswith("process ")
    assert holders() == {}


def test_the_first_waits_for_locks_and_the_others_for_the_first(make_cell, make_attempt, tmp_path):
    cells = [make_cell(2, seed=seed) for seed in range(3)]
    attempts = [make_attempt(cell, oversubscribe=False) for cell in cells]
    for attempt in attempts:
        launch = attempt.read("launch.json")
        attempt.write("launch.json", launch | {"cpus": [0, 1, 2, 3], "cpus_per_rank": 2})
    attempts[0].write("supervisor.json", ProcessIdentity.mine().to_dict())
    folder = sweep_folder("study", tmp_path)
    with locked(TWO_CPUS, label="/runs/other/k-p2-s0-0123456789/attempt-3"):
        causes = [one.cause for one in read_statuses(folder, cells)]
    assert causes[0] == "waits for 4 of 4 CPUs; other/k-p2-s0-0123456789 holds 2"
    assert causes[1:] == [f"queued behind {cells[0].id}"] * 2
    assert {one.state for one in read_statuses(folder, cells)} == {"PENDING"}


def test_where_cells_run_one_at_a_time_none_has_a_supervisor_while_another_runs(
    make_cell, make_attempt, tmp_path
):
    cells = [make_cell(2, seed=seed) for seed in range(2)]
    for attempt in map(make_attempt, cells):
        launch = attempt.read("launch.json")
        site = launch["site"] | {"one_at_a_time": True}
        attempt.write("launch.json", launch | {"cpus": [0, 1, 2, 3], "site": site})
    with locked(TWO_CPUS, label="/runs/study/k-p2-s7-0123456789/attempt-1"):
        causes = [one.cause for one in read_statuses(sweep_folder("study", tmp_path), cells)]
    assert causes == ["waits for 4 of 4 CPUs; study/k-p2-s7-0123456789 holds 2"] * 2


def test_what_a_cell_has_already_counts(make_cell, make_attempt, tmp_path):
    cell = make_cell(2)
    attempt = make_attempt(cell)
    attempt.write("launch.json", attempt.read("launch.json") | {"cpus": [0, 1, 5, 7], "cpus_per_rank": 2,
                                                                "oversubscribed": False})  # fmt: skip
    attempt.write("supervisor.json", ProcessIdentity.mine().to_dict())
    folder = sweep_folder("study", tmp_path)
    with (
        locked([("cpu", (0, 1), 2)], label=str(attempt.path.resolve())),
        locked([("cpu", (5,), 1)], label="/runs/demo/a-p1-s0-0123456789/attempt-1"),
        locked([("cpu", (7,), 1)], label="/runs/demo/b-p1-s0-0123456789/attempt-1"),
    ):
        (one,) = read_statuses(folder, [cell])
    assert one.cause == (
        "waits for 4 of 4 CPUs; demo/a-p1-s0-0123456789 holds 1, demo/b-p1-s0-0123456789 holds 1"
    )
    assert read_statuses(folder, [cell])[0].cause == ""  # all are free: it starts at any moment


def test_a_cell_whose_supervisor_is_not_known_holds_up_no_other_and_can_be_cancelled(
    make_cell, make_attempt, tmp_path, capsys
):
    cells = [make_cell(seed=seed) for seed in range(2)]
    damaged, whole = (make_attempt(cell) for cell in cells)
    path, folder = damaged.path / "supervisor.json", sweep_folder("study", tmp_path)
    path.write_text("")
    assert list(pending(folder)) == [whole]
    assert capsys.readouterr().err.startswith(f"kronscale: passed over: {path}: holds nothing")
    first, second = read_statuses(folder, cells)
    assert (first.state, second.state, second.cause) == ("PENDING", "PENDING", "")
    assert first.cause.startswith(f"no queue starts it: {path}: holds nothing")
    assert first.cause.endswith("; cancel it, then retry it")
    assert cancel(cells, tmp_path) == cells
    assert [one.state for one in read_statuses(folder, cells)] == ["CANCELLED"] * 2


def test_a_pending_job_has_the_schedulers_reason(make_cell, make_attempt, tmp_path, monkeypatch, capsys):
    cell = make_cell()
    attempt = make_attempt(cell)
    launch = attempt.read("launch.json") | {"launcher": "slurm", "manifest": "m1", "manifest_job": 4}
    attempt.write("launch.json", launch)
    manifest = tmp_path / "study" / "jobs" / "m1"
    manifest.mkdir(parents=True)
    (manifest / "submitted.json").write_text('{"job_id": "77"}')
    job = Job("77_4", "PENDING", "PENDING", "", "QOSMaxGRESPerUser", 0)
    monkeypatch.setattr(scheduler_state, "jobs_of", lambda ids: {"77_4": job})
    assert main(["status", "study", "--runs", str(tmp_path)]) == 0
    assert "job 77_4 waits: QOSMaxGRESPerUser" in " ".join(capsys.readouterr().out.split())
