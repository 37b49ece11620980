"""Promise: whatever a cluster does to running cells, each ends with the true state and cause.

The outcomes are tabulated in harness/launchers/slurm/README.md.
"""

import contextlib
import json
import re
import subprocess
import sys

import psutil
import pytest

from harness.cli import main
from harness.study.submit import cancel, retry, submit
from tests.harness.slurm.conftest import FAKE_RANK
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

FOREVER = 100_000

FILLS_THE_DISK = (  # when the heartbeats of both ranks are on it
    sys.executable, "-c",
    "import os, sys; from pathlib import Path; from harness.runs.heartbeat import HeartbeatWriter\n"
    "a = Path(sys.argv[1]); rank = int(sys.argv[3])\n"
    "beat = HeartbeatWriter(a / f'rank-{rank:05}.heartbeat')\n"
    "beat.step = 7; beat.write('update')\n"
    "while sum(b'update' in beat.read_bytes() for beat in a.glob('rank-*.heartbeat')) < 2: pass\n"
    "with (a / f'rank-{rank:05}.jsonl').open('ab') as file:\n"
    "    while True: file.write(bytes(4096)); file.flush()\n",
)  # fmt: skip


def test_kill_9_of_a_rank_is_the_cause_with_its_step_and_ends_the_others(
    on_slurm, tmp_path, make_cell, make_site, ended
):
    cells = [make_cell(act="kill", at_rank=3, steps=FOREVER), make_cell(seed=1)]
    submit(cells, make_site(), tmp_path, FAKE_RANK)
    killed, other = ended(cells)
    assert killed.state == "FAILED"
    assert killed.cause == "rank 3 was killed by SIGKILL at step 1 in backward"
    assert len(killed.attempt.outcome().ranks) == 4
    assert other.state == "COMPLETED"
    assert not ranks_of(killed.attempt)


def test_a_node_that_loses_power_is_named_and_its_cell_can_be_retried(
    on_slurm, tmp_path, make_cell, make_site, ended, training
):
    cell = make_cell(steps=FOREVER)
    submit([cell], make_site(), tmp_path, FAKE_RANK)
    attempt = training(cell)
    node = next(one for one in nodes_of(attempt) if one != head_of(attempt))
    on_slurm.kill(f"slurmd-{node}")
    try:
        (lost,) = ended([cell])
        assert lost.state == "NODE_FAIL"
        assert node in lost.cause
        assert lost.attempt.outcome().failed_nodes == (node,)
        wait_for(lambda: not ranks_of(attempt))
    finally:
        on_slurm.start(f"slurmd-{node}")
        wait_for(lambda: "4 idle" in on_slurm.run("sinfo", "-h", "-p", "main", "-o", "%D %t"))
    assert retry([cell], make_site(), tmp_path, FAKE_RANK).new == (cell,)
    assert training(cell, 2).number == 2


def test_the_loss_of_the_supervisor_s_node_is_seen_by_status(
    on_slurm, tmp_path, make_cell, make_site, ended, training
):
    cell = make_cell(steps=FOREVER)
    submit([cell], make_site(), tmp_path, FAKE_RANK)
    attempt = training(cell)
    node = head_of(attempt)
    on_slurm.kill(f"slurmd-{node}")
    try:
        (lost,) = ended([cell])
        assert lost.state == "NODE_FAIL"
        assert f"{node} is down" in lost.cause
        assert "last seen at step" in lost.cause
        assert attempt.outcome() is not None  # written while Slurm still knows the job
    finally:
        on_slurm.start(f"slurmd-{node}")
        wait_for(lambda: "4 idle" in on_slurm.run("sinfo", "-h", "-p", "main", "-o", "%D %t"))


def test_ranks_whose_slurmstepd_is_killed_are_ended_and_the_cause_names_the_node(
    on_slurm, tmp_path, make_cell, make_site, ended, training
):
    cell = make_cell(steps=FOREVER)  # the other ranks would not notice: they do not communicate
    submit([cell], make_site(), tmp_path, FAKE_RANK)
    attempt = training(cell)
    node = next(one for one in nodes_of(attempt) if one != head_of(attempt))
    rank = next(one for one in ranks_of(attempt) if one.environ()["SLURMD_NODENAME"] == node)
    next(one for one in rank.parents() if one.name().startswith("slurmstepd")).kill()
    (lost,) = ended([cell])
    assert lost.state == "NODE_FAIL"
    assert lost.cause.startswith(f"slurmstepd on node {node} is gone, and its ranks (2, 3) were ended; rank ")
    assert lost.attempt.outcome().failed_nodes == (node,)
    assert not ranks_of(attempt)


def test_a_requeued_job_resumes_in_a_new_attempt(
    on_slurm, tmp_path, make_cell, make_site, ended, training, look
):
    cell = make_cell(act="hang", at_step=3, once=True, steps=5)
    submit([cell], make_site(requeue=True), tmp_path, FAKE_RANK)
    training(cell)
    (job,) = on_slurm.run("squeue", "-h", "-o", "%A").split()
    on_slurm.run("scontrol", "requeue", job)
    wait_for(lambda: look(cell)[0].state == "PENDING")
    assert "requeued its job" in look(cell)[0].cause
    assert submit([cell], make_site(), tmp_path, FAKE_RANK).in_flight == (cell,)

    def started() -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):  # fails until the job has ended
            on_slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        return look(cell)[0].attempt.number == 2

    wait_for(started)
    (done,) = ended([cell])
    assert (done.state, done.attempt.number) == ("COMPLETED", 2)
    first, _second = done.attempt.cell_folder.attempts()
    assert first.outcome().state == "PREEMPTED"
    assert "resumed by attempt 2" in first.outcome().cause


def test_cancelling_a_requeued_job_removes_it_from_the_queue(
    on_slurm, tmp_path, make_cell, make_site, training, look
):
    cell = make_cell(steps=FOREVER)
    submit([cell], make_site(requeue=True), tmp_path, FAKE_RANK)
    training(cell)
    (job,) = on_slurm.run("squeue", "-h", "-o", "%A").split()
    on_slurm.run("scontrol", "requeue", job)
    wait_for(lambda: look(cell)[0].state == "PENDING")
    assert cancel([cell], tmp_path) == [cell]
    (one,) = look(cell)
    assert (one.state, one.attempt.number) == ("CANCELLED", 1)
    wait_for(lambda: not on_slurm.run("squeue", "--noheader"))


def test_a_job_that_slurm_requeues_because_its_slurmd_is_gone_resumes_though_its_supervisor_lives(
    on_slurm, tmp_path, make_cell, make_site, ended, training, look
):
    cell = make_cell(world_size=2, act="hang", at_step=3, once=True, steps=5)
    submit([cell], make_site(requeue=True), tmp_path, FAKE_RANK)
    attempt = training(cell)
    node = head_of(attempt)
    on_slurm.stop(f"slurmd-{node}")
    try:
        wait_for(lambda: look(cell)[0].state == "PENDING")
        assert "requeued its job" in look(cell)[0].cause
        (done,) = ended([cell])
    finally:
        on_slurm.start(f"slurmd-{node}")
        wait_for(lambda: not ranks_of(attempt))
        wait_for(lambda: "4 idle" in on_slurm.run("sinfo", "-h", "-p", "main", "-o", "%D %t"))
    assert (done.state, done.attempt.number) == ("COMPLETED", 2)
    assert attempt.outcome().state == "PREEMPTED"


def test_a_time_limit_that_is_too_short_is_a_timeout(on_slurm, tmp_path, make_cell, make_site, ended):
    cell = make_cell(steps=FOREVER)
    submit([cell], make_site(timeout_minutes=0.05), tmp_path, FAKE_RANK)
    (one,) = ended([cell])
    assert one.state == "TIMEOUT"
    assert "ran longer than the site's timeout_minutes" in one.cause


def test_a_users_scancel_is_a_cancellation(on_slurm, tmp_path, make_cell, make_site, ended, training):
    cells = [make_cell(seed=seed, steps=FOREVER) for seed in range(2)]
    submit(cells, make_site(at_once=1), tmp_path, FAKE_RANK)
    training(cells[0])
    on_slurm.run("scancel", "--user=root")
    running, waiting = ended(cells)
    assert (running.state, waiting.state) == ("CANCELLED", "CANCELLED")
    assert "ended CANCELLED; last seen at step" in running.cause
    assert "before the attempt started" in waiting.cause
    assert not ranks_of(running.attempt)


def test_accounting_is_not_needed(on_slurm, tmp_path, make_cell, make_site, ended):
    on_slurm.stop("slurmdbd")
    try:
        # Once rank 2 has exited rank 1 is signalled, which its wrapper does not notice.
        failing = make_cell(seed=1, act="term", at_rank=1, also_rank=2, also_act="exit")
        cells = [make_cell(), failing]
        submit(cells, make_site(), tmp_path, FAKE_RANK)
        good, bad = ended(cells)
        assert (good.state, bad.state) == ("COMPLETED", "FAILED")
        assert "rank 2 exited with code 3" in bad.cause
    finally:
        on_slurm.start("slurmdbd")


@pytest.mark.parametrize(
    ("setup", "python", "cause"),
    [
        ("module() { echo no such module; return 28; }; module load x || exit", None, "no such module;"),
        ("set -u; echo $CONDA_SHLVL", None, "CONDA_SHLVL: unbound variable;"),
        ("", "/gone/python", "/gone/python: No such file or directory;"),
        ("", sys._base_executable, "No module named 'harness') ("),
    ],
)
def test_a_job_that_ends_before_its_supervisor_starts_shows_its_own_words(
    on_slurm, tmp_path, make_cell, make_site, ended, capsys, setup, python, cause
):
    cell = make_cell(world_size=1)
    site = make_site(setup=(setup,)).model_copy(update={"python": python})
    submit([cell], site, tmp_path, FAKE_RANK)
    (one,) = ended([cell])
    assert one.state == "FAILED"
    assert cause in one.cause
    assert "could not write" not in one.cause
    assert main(["logs", cell.id, "--runs", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert cause.rstrip(" (;") in shown.out
    assert re.search(r"no rank has started; its job has printed, in .*/job-00000.log:", shown.err)


def test_a_users_filters_of_slurms_commands_hide_no_running_job(
    on_slurm, tmp_path, make_cell, make_site, training, look, monkeypatch
):
    cell = make_cell(steps=FOREVER)
    submit([cell], make_site(), tmp_path, FAKE_RANK)
    training(cell)
    names = ("SQUEUE_PARTITION", "SQUEUE_ACCOUNT", "SACCT_STATE", "SINFO_PARTITION", "SCANCEL_PARTITION")
    on_slurm.stop("slurmdbd")
    try:
        with monkeypatch.context() as users:
            for name in names:
                users.setenv(name, "urgent")
            assert look(cell)[0].state == "RUNNING"
            users.setenv("SLURM_CLUSTERS", "urgent")
            assert look(cell)[0].state == "RUNNING"
            assert retry([cell], make_site(), tmp_path, FAKE_RANK).in_flight == (cell,)
            assert cancel([cell], tmp_path) == [cell]
    finally:
        on_slurm.start("slurmdbd")


def test_a_full_disk_is_the_cause(on_slurm, tmp_path, make_cell, make_site, ended):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs privileges")
    try:
        cell = make_cell(world_size=2)
        submit([cell], make_site(), disk, FILLS_THE_DISK)
        (one,) = ended([cell], disk)
        assert one.state == "FAILED"
        assert "at step 7 in update" in one.cause
        assert "it could not write its outcome, No space left on device" in one.cause
    finally:
        wait_for(lambda: subprocess.run(["umount", disk], check=False).returncode == 0)


EXCHANGES_BY_PMI = """
import os, socket, sys

pmi, rank = socket.socket(fileno=int(os.environ["PMI_FD"])), int(os.environ["PMI_RANK"])

def request(line):
    pmi.sendall(f"cmd={line}\\n".encode())
    return pmi.recv(65536).decode().strip()

request("init pmi_version=1 pmi_subversion=1")
longest = int(request("get_maxes").partition("vallen_max=")[2])
space = request("get_my_kvsname").partition("kvsname=")[2]
own, other = rank, (rank + 1) % int(os.environ["PMI_SIZE"])
put, expected = (chr(97 + of) * (longest - 1) * int(os.environ["TIMES"]) for of in (own, other))
request(f"put kvsname={space} key={own:063} value={put}")
request("barrier_in")
assert request(f"get kvsname={space} key={other:063}") == f"cmd=get_result rc=0 value={expected}"
assert longest >= 512  # MPICH cuts its addresses in pieces of this
request("finalize")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("times", "state", "cause"),
    [
        (1, "COMPLETED", ""),
        (3, "FAILED", "MPI's initialization failed: Slurm's mpi/pmi2 rejected a request of the ranks"),
    ],
)
def test_the_longest_value_that_pmi_allows_arrives_and_a_longer_one_is_the_cause(
    on_slurm, tmp_path, make_cell, make_site, ended, times, state, cause
):
    cell = make_cell(world_size=4)
    site = make_site(mpi="pmi2").model_copy(update={"environment": {"TIMES": str(times)}})
    submit([cell], site, tmp_path, (sys.executable, "-c", EXCHANGES_BY_PMI, *FAKE_RANK[1:]))
    (one,) = ended([cell])
    assert (one.state, one.cause) == (state, cause)


def nodes_of(attempt) -> set[str]:
    lines = [json.loads(path.read_text().splitlines()[0]) for path in attempt.path.glob("rank-*.end")]
    return {line["node"] for line in lines}


def head_of(attempt) -> str:
    return str(attempt.read("taken.json")["node"])


def ranks_of(attempt) -> list[psutil.Process]:
    words = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [process for process, line in words if str(attempt.path) in line and "--rank" in line]
