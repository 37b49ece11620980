"""Promise: state, root cause and sentence of an outcome follow from how each rank ended, by this table."""

from __future__ import annotations

import shutil
import signal

import pytest

from harness.launchers.launch import request_cancel
from harness.launchers.ranks.outcome import RankDeath, RanksEnd, outcome_of_ranks, slurm_killed
from harness.launchers.ranks.watching import Stop, stop_request
from harness.runs.checkpoint_store import FORMAT_VERSION, CheckpointStore, Manifest
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import CheckpointRecord, FailureRecord, to_line
from tests.harness.launching.conftest import evaluation_line

KILLED, ENDED = -signal.SIGKILL, -signal.SIGTERM
SAVED = 75


def died(exit_code, own=True):
    return exit_code, own


@pytest.fixture
def outcome(make_attempt, make_cell):
    """The outcome of an attempt whose ranks ended so, in this order; rank r is at step 10 + r."""

    def of(
        *deaths, reason="ranks", errors=None, result=None, oom=False, checkpoint=None, lines="", cell=None
    ):
        attempt = make_attempt(cell or make_cell(len(deaths)))
        for rank in range(len(deaths)):
            heartbeat = HeartbeatWriter(attempt.heartbeat(rank))
            heartbeat.step = 10 + rank
            heartbeat.write("backward")
        attempt.records(0).write_text(lines)
        for rank, (error, message) in (errors or {}).items():
            failure = FailureRecord(rank, 10 + rank, "backward", error, message, "")
            with attempt.records(rank).open("a") as file:
                file.write(to_line(failure))
        if result is not None:
            attempt.write("result.json", result)
        if checkpoint is not None:
            store = CheckpointStore(attempt)
            store.begin(checkpoint)
            store.publish(checkpoint, Manifest(FORMAT_VERSION, checkpoint, 1, 0, "interval", 1.0, {}))
        seen = tuple(RankDeath(rank, code, own) for rank, (code, own) in enumerate(deaths))
        return outcome_of_ranks(attempt, RanksEnd(reason, seen), 1.0, 2.0, oom)

    return of


def result(reached=True, reason="target", value=0.98):
    return {
        "reached_target": reached, "stop_reason": reason, "train_seconds": 3.0, "value": value, "steps": 20,
        "parameters_sha256": "",
    }  # fmt: skip


def test_all_ranks_must_succeed_and_leave_a_result(outcome):
    done = outcome(died(0), died(0), result=result(), checkpoint=9)
    assert (done.state, done.cause, done.reached_target, done.checkpoint_step) == (
        "COMPLETED",
        "",
        True,
        None,
    )
    half = outcome(died(0), died(3), result=result(), checkpoint=9)
    assert (half.state, half.reached_target, half.checkpoint_step) == ("FAILED", None, 9)
    assert half.cause.startswith("rank 1 exited with code 3 at step 11 in backward")
    assert outcome(died(0)).cause == "every rank exited with 0, but rank 0 left no result.json"


def test_all_ranks_must_agree_that_they_were_preempted(outcome):
    saved = to_line(CheckpointRecord(0, 0, 12, "SIGUSR1", True, 0.1, 1, ""))
    states = {
        reason: outcome(died(SAVED), died(SAVED), reason=reason, lines=saved).state
        for reason in ("ranks", "preempt", "cancel", "timeout")
    }
    assert states == {
        "ranks": "PREEMPTED", "preempt": "PREEMPTED", "cancel": "CANCELLED", "timeout": "TIMEOUT",
    }  # fmt: skip
    assert outcome(died(SAVED), died(KILLED), lines=saved).state == "FAILED"


@pytest.mark.parametrize(
    ("reason", "state"), [("timeout", "TIMEOUT"), ("cancel", "CANCELLED"), ("preempt", "PREEMPTED")]
)
def test_ranks_that_their_launcher_ended_are_no_cause_and_the_last_one_is_named(outcome, reason, state):
    found = outcome(died(ENDED, own=False), died(ENDED, own=False), reason=reason)
    assert found.state == state
    assert "; the last rank was 0, at step 10 in backward" in found.cause


def test_an_attempt_has_an_outcome_though_the_one_that_it_resumed_was_deleted(make_attempt, make_cell):
    first, second = (make_attempt(make_cell()) for _ in range(2))
    second.write("launch.json", second.read("launch.json") | {"continues": 1})
    shutil.rmtree(first.path)
    killed = RanksEnd("ranks", (RankDeath(0, KILLED, own=True),))
    found = outcome_of_ranks(second, killed, 1.0, 2.0, oom_killed=False)
    assert (found.state, found.checkpoint_step) == ("FAILED", None)


def test_a_rank_that_dies_in_the_grace_of_a_time_limit_does_not_make_it_a_failure(outcome):
    assert outcome(died(1), died(KILLED, own=False), reason="timeout").state == "TIMEOUT"


LOST = ("RuntimeError", "[gloo] Connection closed by peer")
OWN = ("ValueError", "damping went away")


@pytest.mark.parametrize(
    ("deaths", "errors", "first"),
    [
        ([died(0), died(1)], {1: OWN}, 1),  # success is no cause
        ([died(ENDED, own=False), died(1)], {1: OWN}, 1),  # nor what the launcher ended
        ([died(3), died(ENDED)], {}, 0),  # nor what Slurm ended, which a wrapper need not notice in time,
        ([died(ENDED), died(3)], {}, 1),  # by whichever host's clock
        ([died(-signal.SIGUSR1), died(3)], {}, 1),  # or Hydra
        ([died(3), died(KILLED)], {}, 0),
        ([died(KILLED), died(3)], {}, 0),  # nobody kills before a rank has failed
        ([died(ENDED), died(1)], {1: LOST}, 0),  # it may have been signalled by anybody
        ([died(1), died(KILLED)], {0: LOST}, 1),  # a lost peer is a consequence
        ([died(1), died(1)], {0: LOST, 1: OWN}, 1),
        ([died(1), died(-signal.SIGSEGV)], {0: OWN}, 0),
        ([died(1), died(1)], {0: OWN, 1: OWN}, 0),  # else the first
    ],
)
def test_the_root_cause_comes_first(outcome, deaths, errors, first):
    found = outcome(*deaths, errors=errors, reason="ranks")
    assert found.ranks[0].rank == first
    assert found.cause.startswith(f"rank {first} ")


def test_the_kernels_kill_for_memory_is_the_cause_though_another_rank_had_failed(outcome):
    assert outcome(died(3), died(KILLED), oom=True).state == "OOM"
    assert outcome(died(3), died(KILLED)).state == "FAILED"


@pytest.mark.parametrize(
    ("code", "oom", "state"),
    [(KILLED, True, "OOM"), (KILLED, False, "FAILED"), (-signal.SIGSEGV, True, "FAILED")],
)
def test_a_kill_is_for_memory_only_if_the_kernel_killed_for_memory(outcome, code, oom, state):
    assert outcome(died(code), oom=oom).state == state


def test_a_miss_names_the_best_value_on_the_targets_side(outcome, make_cell):
    lines = "".join(
        evaluation_line(10 * epoch, epoch, value) for epoch, value in ((1, 0.5), (2, 0.9), (3, 0.7))
    )
    missed = outcome(died(0), result=result(reached=False, reason="epochs", value=0.7), lines=lines)
    assert missed.cause == "target accuracy >= 0.97 not reached: best 0.9 after 3 epochs"
    lower = make_cell().model_dump() | {"target": {"metric": "accuracy", "at_most": 0.1}}
    lower = type(make_cell()).model_validate(lower)
    missed = outcome(
        died(0), result=result(reached=False, reason="epochs", value=0.7), lines=lines, cell=lower
    )
    assert missed.cause == "target accuracy <= 0.1 not reached: best 0.5 after 3 epochs"


@pytest.mark.parametrize(
    ("request_", "left", "preempted", "stop"),
    [
        (None, 1000.0, False, None),
        (None, 59.0, False, Stop("timeout", save=True)),  # within the grace of 60 s
        (None, -1.0, False, Stop("timeout", save=False)),
        (None, 1000.0, True, Stop("preempt", save=True)),
        ("checkpoint", 1000.0, False, Stop("cancel", save=True)),
        ("checkpoint", -1.0, False, Stop("timeout", save=False)),
        ("now", 1000.0, True, Stop("cancel", save=False)),
        ("now", -1.0, False, Stop("cancel", save=False)),
    ],
)
def test_why_ranks_have_to_end_and_whether_they_may_save(
    make_attempt, make_cell, site, request_, left, preempted, stop
):
    attempt = make_attempt(make_cell())
    if request_ is not None:
        request_cancel(attempt, checkpoint=request_ == "checkpoint")
    assert stop_request(attempt, site.save_seconds(1), left, preempted=preempted) == stop


def test_a_short_run_is_not_asked_to_save_before_half_of_its_time(make_attempt, make_cell, site):
    short = site.model_copy(update={"timeout_minutes": 0.5})  # 30 s, with a grace of 60 s
    attempt = make_attempt(make_cell())
    assert stop_request(attempt, short.save_seconds(1), 16.0, preempted=False) is None
    assert stop_request(attempt, short.save_seconds(1), 14.0, preempted=False) == Stop("timeout", save=True)


@pytest.mark.parametrize(
    ("output", "killed"),
    [  # messages of slurmstepd and srun 20.11 to 23.11
        (
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have",
            True,
        ),
        ("srun: error: n1: task 0: Out Of Memory", True),
        ("srun: error: bloom01: task 3: Killed", False),
    ],
)
def test_a_kill_is_for_memory_if_slurm_reports_it_and_not_because_of_a_nodes_name(output, killed):
    assert slurm_killed(output) == killed
