"""Promise: doctor finds faults in what ranks report, and advises what to do about each."""

from dataclasses import replace

import pytest

from harness.doctor.examine import probe_cell
from harness.doctor.ranks import check_job
from harness.study.status import CellStatus
from tests.harness.doctor_reports import RANK, findings, make_site


def test_correct_ranks_give_no_warning():
    found = findings({})
    assert {one.state for one in found.values()} <= {"ok", "skipped"}
    assert found["all-reduce"].found == "right over gloo; 4 MiB take 4 ms"
    assert found["data"].found == "KRONSCALE_DATA is not set: the embedded data are there"


@pytest.mark.parametrize(
    ("ranks", "check", "state", "found", "advice"),
    [
        ({1: {"sum_error": "9 instead of 10"}}, "all-reduce", "fault", "rank 1: 9 instead of", "backend"),
        ({1: {"backend": None}}, "all-reduce", "skipped", "not all ranks joined", ""),
        (
            {1: {"versions": {**RANK.versions, "torch": "2.7"}}},
            "software", "fault", "torch 2.6 on rank 0; torch 2.7 on rank 1; torch 2.6", "slurm.setup",
        ),
        ({1: {"versions": {"python": "3.11.7", "torch": "2.6"}}}, "software", "ok", "the same", ""),
        ({1: {"cpus": (0, 1)}}, "CPUs", "warning", "ranks 0 and 1 on a may use the same", "--cpu-bind=cores"),
        (
            {rank: {"device_id": "x", "gpus": ("H100",)} for rank in range(4)},
            "GPUs", "warning", "rank 0 computes on its CPUs beside H100", "gpus_per_rank: 1",
        ),
        (
            {rank: {"data": "/data", "data_seen": rank != 3} for rank in range(4)},
            "data", "fault", "rank 3 on b does not see KRONSCALE_DATA=/data", "launch_prefix",
        ),
    ],
)  # fmt: skip
def test_a_problem_in_a_report_is_found(ranks, check, state, found, advice):
    one = findings(ranks)[check]
    assert (one.state, found in one.found, advice in one.advice) == (state, True, True), one


def on_gpus(**changes):
    ranks = {rank: {"device_id": f"{rank}", "gpus": ("H100",) * 2} for rank in range(4)}
    return {rank: {**own, **changes.get(f"rank{rank}", {})} for rank, own in ranks.items()}


@pytest.mark.parametrize(
    ("ranks", "state", "found", "advice"),
    [
        (on_gpus(), "ok", "one per rank, each rank sees all GPUs of its host's ranks: H100", ""),
        (
            on_gpus(rank2={"gpus": ("H100",)}),
            "fault",
            "rank 2 on b sees 1 of its host's 2 GPUs",
            "--gpu-bind",
        ),
        (on_gpus(rank3={"device_id": "2"}), "fault", "ranks 2, 3 on b share a GPU", "slurm.ranks_per_node"),
        (on_gpus(rank1={"device_id": "", "gpus": ()}), "fault", "rank 1 on a sees no GPU", "torch build"),
        (on_gpus(rank3={"gpus": ("A100",) * 2}), "warning", "A100, H100", "slurm.constraint"),
    ],
)
def test_missing_hidden_shared_and_mixed_gpus_are_found(ranks, state, found, advice):
    one = findings(ranks, make_site(gpus_per_rank=1))["GPUs"]
    assert (one.state, found in one.found, advice in one.advice) == (state, True, True), one


def test_too_few_cpus_are_a_fault_and_oversubscribed_ones_a_warning():
    assert findings({}, make_site(cpus_per_rank=2))["CPUs"].state == "fault"
    assert findings({}, make_site("local"), oversubscribed=True, cpus=(0, 1))["CPUs"].state == "warning"


@pytest.mark.parametrize(
    ("state", "cause", "found", "advice"),
    [
        (
            "PENDING",
            "job 7_0 waits: Priority",
            "PENDING after 5 s, cancelled: job 7_0 waits: Priority",
            "--wait",
        ),
        ("RUNNING", "", "RUNNING after 5 s, cancelled: 1 of 4 ranks were done", "logs/"),
        ("FAILED", "srun started no rank and ended with 1: no", "FAILED: srun started no rank", "srun.log"),
        (
            "FAILED",
            "job 7_0 on n1 ended FAILED before the attempt started",
            "before the attempt started",
            "nodes see the runs folder",
        ),
        ("FAILED", "rank 1 failed before its first step: SiteError: no", "rank 1 failed", "logs/"),
    ],
)
def test_a_job_that_did_not_complete_is_a_fault_with_its_cause(state, cause, found, advice):
    status = CellStatus(probe_cell(4), state, cause=cause)
    one = check_job(status, [RANK, replace(RANK, rank=1, backend=None)], 5, make_site())
    assert (one.state, found in one.found, advice in one.advice) == ("fault", True, True), one
