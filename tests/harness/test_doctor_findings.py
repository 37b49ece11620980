"""Promise: doctor finds faults in what ranks report, and advises what to do about each."""

from dataclasses import replace

import pytest

from harness.doctor.examine import probe_cell
from harness.doctor.ranks import check_job
from harness.study.status import CellStatus
from tests.harness.doctor_reports import GIB, RANK, all_ranks, findings, make_site


def test_correct_ranks_give_no_warning():
    found = findings({})
    assert {one.state for one in found.values()} <= {"ok", "skipped"}
    assert found["clocks"].found == "at most 0 µs apart"
    assert found["speed"].found.endswith("set ptrace_any: true)"), "no report lists peers"
    mates = {rank: {"exchange": {"near": (rank ^ 1,)}} for rank in range(4)}
    assert findings(mates)["speed"].found.endswith("; ranks of one host read each other's memory")
    assert findings(mates | {3: {}})["speed"].found.endswith("set ptrace_any: true)")


@pytest.mark.parametrize(
    ("ranks", "check", "state", "found", "advice"),
    [
        (
            {2: {"exchange": {"clock_readings": (1e9 + 4, 1e9 + 12, 1e9 + 14)}}},
            "clocks",
            "warning",
            "b is 3 s ahead of a",
            "chronyc",
        ),
        (
            {2: {"exchange": {"clock_readings": (1e9 + 4, 1e9 + 9.01, 1e9 + 14)}}},
            "clocks",
            "ok",
            "at most 10 ms",
            "",
        ),
        ({1: {"exchange": {"visible_seconds": 4.0}}}, "files", "warning", "after 4 s, last on a", "--runs"),
        (
            {3: {"exchange": {"visible_seconds": None}}},
            "files",
            "fault",
            "rank 3 on b did not see",
            "all nodes share",
        ),
        (
            {1: {"exchange": {"wrong_sum": "9 instead of 10 in 1 of 1 elements"}}},
            "all-reduce",
            "fault",
            "rank 1: 9 instead",
            "backend",
        ),
        ({0: {"exchange": {"large_seconds": 3.0}}}, "speed", "warning", "4 MiB 3 s", "GLOO_SOCKET_IFNAME"),
        (
            {1: {"versions": {**RANK.versions, "torch": "2.7"}}},
            "versions",
            "fault",
            "torch 2.6 on rank 0, 2, 3; torch 2.7 on rank 1",
            "slurm.setup",
        ),
        (
            {1: {"versions": {**RANK.versions, "commit": "abd"}}},
            "versions",
            "fault",
            "commit abd on rank 1",
            "slurm.setup",
        ),
        (  # git was too slow: no difference is known
            {1: {"versions": {**RANK.versions, "commit": "not known"}}},
            "versions",
            "ok",
            "the same on all ranks",
            "",
        ),
        (all_ranks(locked_memory_bytes=64 << 10), "locked memory", "warning", "64 KiB", "memlock"),
        (
            {0: {"shared_memory_bytes": 64 << 20}},
            "shared memory",
            "warning",
            "64 MiB free in /dev/shm on a",
            "--shm-size=1g",
        ),
        (
            {2: {"memory_limit_bytes": GIB}},
            "memory",
            "warning",
            "1 GiB for 2 ranks on b",
            "slurm.memory_gb_per_node to at least 4 GiB",
        ),
        (
            {2: {"address_space_bytes": GIB}},
            "memory",
            "warning",
            "rank 2: address space limited to 1 GiB",
            "ulimit -v",
        ),
        (
            {1: {"cpus": (0, 1)}},
            "CPUs",
            "warning",
            "ranks 0 and 1 on a may use the same CPUs",
            "--cpu-bind=cores",
        ),
        ({1: {"threads": 8}}, "CPUs", "warning", "8 threads on 1 CPUs", "OMP_NUM_THREADS"),
        ({1: {"exchange": None}}, "all-reduce", "skipped", "not all ranks joined", ""),
        (
            all_ranks(device="H100", device_id="x"),
            "GPUs",
            "warning",
            "rank 0 computes on its CPUs beside H100",
            "gpus_per_rank: 1",
        ),
    ],
)
def test_a_problem_in_a_report_is_found(ranks, check, state, found, advice):
    one = findings(ranks)[check]
    assert one.state == state
    assert found in one.found
    assert advice in one.advice


def on_gpus(**changes):
    ranks = {
        rank: {"device": "H100", "device_id": f"{rank}", "gpus": ("H100",) * 2, "driver": "550"}
        for rank in range(4)
    }
    return {rank: {**own, **changes.get(f"rank{rank}", {})} for rank, own in ranks.items()}


@pytest.mark.parametrize(
    ("ranks", "state", "found", "advice"),
    [
        (on_gpus(), "ok", "one per rank, each rank sees all GPUs of its host's ranks: H100, driver 550", ""),
        (on_gpus(rank2={"gpus": ("H100",)}), "fault", "rank 2 on b sees 1 of the 2 GPUs", "--gpu-bind"),
        (on_gpus(rank3={"device_id": "2"}), "fault", "ranks 2, 3 on b share a GPU", "slurm.ranks_per_node"),
        (
            on_gpus(rank1={"device_id": "", "device": "cpu"}),
            "fault",
            "rank 1 on a sees no GPU; its driver is 550",
            "torch build",
        ),
        (on_gpus(rank1={"device_id": "", "driver": None}), "fault", "no driver answers there", "nvidia-smi"),
        (
            on_gpus(rank3={"device": "A100"}),
            "warning",
            "A100, driver 550; H100, driver 550",
            "slurm.constraint",
        ),
    ],
)
def test_missing_hidden_shared_and_mixed_gpus_are_found(ranks, state, found, advice):
    one = findings(ranks, make_site(gpus_per_rank=1))["GPUs"]
    assert (one.state, found in one.found, advice in one.advice) == (state, True, True), one


def test_nccl_must_be_the_same_and_mpi_one_world_if_the_site_configures_it():
    over_nccl = {rank: {"nccl": "2.21", "exchange": {"backend": "nccl"}} for rank in range(4)}
    assert findings(over_nccl)["NCCL"].found == "2.21"
    found = findings({**over_nccl, 1: {"nccl": "2.20", "exchange": {"backend": "nccl"}}})["NCCL"]
    assert (found.state, found.found) == ("fault", "2.21 on rank 0, 2, 3; 2.20 on rank 1")
    pmi2 = make_site(slurm={"mpi": "pmi2"})
    assert findings({}, pmi2)["MPI"].state == "warning"
    assert (
        findings(all_ranks(exchange={"no_mpi": "", "mpi": "MPICH 5"}), pmi2)["MPI"].found
        == "one world, MPICH 5"
    )


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
    one = check_job(status, [RANK, replace(RANK, rank=1, exchange=None)], 5, make_site())
    assert (one.state, found in one.found, advice in one.advice) == ("fault", True, True), one
