"""Promise: however an attempt ends, its processes end within ten seconds and its outcome names the cause."""

import json
import os
import signal
from pathlib import Path

import pytest

from harness.launchers.launch import request_cancel
from harness.launchers.ranks.local import GRACE_SECONDS
from harness.launchers.ranks.watching import TERM_SECONDS
from harness.launchers.site_profile import Site


@pytest.fixture
def site(request):
    return Site(name="test", oversubscribe=True, backend=getattr(request, "param", "gloo"))


however_ranks_start = pytest.mark.parametrize("site", ["gloo", "mpi"], indirect=True)
"""As children of the supervisor, or of `mpiexec`; most promises are tried on the first alone."""


def in_training(attempt, ranks=1):
    heartbeats = [attempt.last_heartbeat(rank) for rank in range(ranks)]
    return all(last is not None and last.step >= 1 for last in heartbeats)


@pytest.mark.parametrize(
    ("act", "state", "cause"),
    [
        ("kill", "FAILED", "rank 1 was killed by SIGKILL at step 1 in backward"),
        ("crash", "FAILED", "rank 1 failed at step 1 in backward: ValueError: damping went away"),
        ("oom", "OOM", "rank 1 failed at step 1 in backward: OutOfMemoryError: CUDA out of memory."),
        (
            "exit",
            "FAILED",
            "rank 1 exited with code 3 at step 1 in backward; last line of its log: cannot find",
        ),
    ],
)
def test_the_cause_names_the_rank_that_died_and_where(
    make_cell, make_attempt, start_supervisor, act, state, cause
):
    attempt = make_attempt(make_cell(2, act=act, at_rank=1, steps=3000))
    outcome = start_supervisor(attempt).outcome()
    assert outcome.state == state
    assert outcome.cause.startswith(cause)
    assert outcome.ranks[0].rank == 1
    assert outcome.ranks[1].signal == "SIGTERM"


def test_a_rank_that_lost_its_peer_is_not_the_cause_even_if_it_dies_first(
    make_cell, make_attempt, start_supervisor
):
    attempt = make_attempt(
        make_cell(2, act="crash", at_rank=0, also_rank=1, also_act="lost_peer", at_step=50, steps=3000)
    )
    outcome = start_supervisor(attempt).outcome()
    assert outcome.cause.startswith("rank 0 failed at step 50 in backward: ValueError")
    assert outcome.ranks[1].error.startswith("RuntimeError: [gloo]")


@however_ranks_start
@pytest.mark.parametrize(("last", "first"), [("exit", "term"), ("term", "exit")])
def test_a_rank_that_was_signalled_is_not_the_cause_if_another_exited_by_itself(
    make_cell, make_attempt, start_supervisor, last, first
):
    """In either order: Slurm and Hydra end the other ranks, and the launcher need not see who was first."""
    cell = make_cell(2, act=last, at_rank=0, also_rank=1, also_act=first, at_step=2, steps=3000)
    outcome = start_supervisor(make_attempt(cell)).outcome()
    exited, ended = (0, 1) if last == "exit" else (1, 0)
    assert outcome.cause.startswith(f"rank {exited} exited with code 3 at step 2 in backward")
    assert (outcome.ranks[1].rank, outcome.ranks[1].signal) == (ended, "SIGTERM")


@however_ranks_start
def test_a_killed_rank_that_is_slow_to_disappear_is_the_cause(make_cell, make_attempt, start_supervisor):
    """Its peer noticed and ended before; only SIGTERM was sent to the killed one, so SIGKILL is not ours."""
    cell = make_cell(2, act="late_kill", at_rank=0, also_rank=1, also_act="lost_peer", steps=3000)
    outcome = start_supervisor(make_attempt(cell)).outcome()
    assert outcome.cause.startswith("rank 0 was killed by SIGKILL at step 1 in backward")
    assert outcome.ranks[1].error.startswith("RuntimeError: [gloo]")


def test_a_rank_that_ignores_sigterm_is_killed(make_cell, make_attempt, start_supervisor, wait_for):
    attempt = make_attempt(make_cell(2, act="hang", at_rank=1, steps=3000))
    supervisor = start_supervisor(attempt)
    wait_for(lambda: in_training(attempt, 2))
    first = next(pid for pid in supervisor.rank_pids() if "--rank 0 " in " ".join(_words(pid)))
    os.kill(first, signal.SIGKILL)
    outcome = supervisor.outcome()
    assert outcome.cause.startswith("rank 0 was killed by SIGKILL")
    assert outcome.ranks[1].signal == "SIGKILL"
    assert GRACE_SECONDS + TERM_SECONDS < 10  # all that the launcher waits


def _words(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@however_ranks_start
def test_grandchildren_do_not_outlive_the_attempt(
    make_cell, make_attempt, start_supervisor, wait_for, is_gone
):
    attempt = make_attempt(make_cell(act="orphan"))
    assert start_supervisor(attempt).outcome().state == "FAILED"
    names = "in-group", "own-session"
    grandchildren = [int((attempt.path / f"grandchild-{name}").read_text()) for name in names]
    wait_for(lambda: all(map(is_gone, grandchildren)))  # by a signal, which takes a while on a busy machine


@however_ranks_start
def test_ranks_do_not_outlive_a_supervisor_killed_with_sigkill(
    make_cell, make_attempt, start_supervisor, wait_for, is_gone
):
    attempt = make_attempt(make_cell(2, act="hang", steps=3000))
    supervisor = start_supervisor(attempt)
    wait_for(lambda: in_training(attempt, 2))
    ranks = supervisor.rank_pids()
    assert len([pid for pid in ranks if "--world-size" in _words(pid)]) == 2
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: all(is_gone(pid) for pid in ranks))


def test_an_attempt_past_the_sites_limit_times_out(make_cell, make_attempt, start_supervisor):
    outcome = start_supervisor(make_attempt(make_cell(2, steps=3000), timeout_minutes=0.05)).outcome()
    assert outcome.state == "TIMEOUT"
    assert "timeout_minutes" in outcome.cause


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_cancel_request_ends_the_ranks(make_cell, make_attempt, start_supervisor, wait_for, by_signal):
    attempt = make_attempt(make_cell(2, steps=3000))
    supervisor = start_supervisor(attempt)
    wait_for(lambda: in_training(attempt, 2))
    if by_signal:
        os.kill(supervisor.pid, signal.SIGTERM)
    else:
        request_cancel(attempt)
    outcome = supervisor.outcome()
    assert outcome.state == "CANCELLED"
    assert "at step" in outcome.cause


def test_ranks_get_their_own_cpus_and_a_clean_environment(
    make_cell, make_attempt, start_supervisor, monkeypatch, cpus
):
    for name in ("SLURM_CPU_BIND", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    ranks = min(2, cpus)
    attempt = make_attempt(make_cell(ranks), environment={"KRON_TEST": "yes"})
    assert start_supervisor(attempt).outcome().state == "COMPLETED"
    used = [json.loads((attempt.path / f"used-{rank}.json").read_text()) for rank in range(ranks)]
    pinned = [cpu for rank in used for cpu in rank["cpus"]]
    assert len(pinned) == len(set(pinned)) == ranks
    environment = used[0]["environment"]
    assert not {"SLURM_CPU_BIND", "OMPI_COMM_WORLD_RANK", "MASTER_PORT", "RANK"} & set(environment)
    assert environment.get("PMI_RANK", "0") == "0"
    assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    assert environment["KRON_TEST"] == "yes"


def test_more_ranks_than_cpus_share_them_all_and_are_marked(make_cell, make_attempt, start_supervisor, cpus):
    attempt = make_attempt(make_cell(2 * cpus))
    assert start_supervisor(attempt).outcome().state == "COMPLETED"
    assert attempt.read("launch.json")["oversubscribed"] is True
    used = json.loads((attempt.path / "used-0.json").read_text())
    assert len(used["cpus"]) == cpus
