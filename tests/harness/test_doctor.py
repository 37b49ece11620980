"""Promise: doctor finds faults of a site, advises what to do about each, and removes its files."""

import errno
import json
import os
from dataclasses import replace

import pytest

from harness.cli import main
from harness.doctor.cluster import (
    advice_on_rejection,
    check_accounting,
    check_arrays,
    check_commands,
    check_controller,
    check_mpi,
    check_partition,
    nodes_to_try,
)
from harness.doctor.examine import examine, probe_cell
from harness.doctor.local_host import check_cpus, check_gpus, check_mpi_library
from harness.doctor.ranks import check_job, check_ranks
from harness.doctor.reports import Report, WorldReport
from harness.doctor.storage import check_space, check_storage
from harness.launchers.cgroups import memory_limit_bytes
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.launchers.slurm.cluster_survey import (
    Partition,
    Survey,
    read_minutes,
    read_mpi_types,
    read_partition,
)
from harness.launchers.slurm_profile import SlurmProfile
from harness.study.status import CellStatus
from tests.harness.test_cli_starts import start

pytestmark = pytest.mark.ranks

GIB = 1 << 30
TOGETHER = WorldReport("gloo", 0.5, "no process manager", "", "", 1e-4, 4e-3, (1e9, 1e9 + 9, 1e9 + 10), 0.01)
RANK = Report(
    rank=0, local_rank=0, host="a", node="a", versions={"python": "3.11.7", "torch": "2.6", "commit": "abc"},
    device="cpu", device_id="", gpus=(), driver=None, nccl="", no_nccl="no GPU", cpus=(0,), threads=1,
    memory_limit_bytes=None, address_space_bytes=None, locked_memory_bytes=None, shared_memory_bytes=8 * GIB,
    exchange=TOGETHER,
)  # fmt: skip


def make_site(launcher="slurm", slurm=None, **fields):
    profile = SlurmProfile(**{"ranks_per_node": 2, **(slurm or {})}) if launcher == "slurm" else None
    return Site(name="test", launcher=launcher, slurm=profile, **fields)


def findings(ranks, site=None, **launch):
    """Findings by check for four ranks on two hosts, with the changes that `ranks` has for each of them."""
    site = site or make_site()
    fields = {
        "launcher": site.launcher,
        "site": site,
        "cpus_per_rank": site.cpus_per_rank,
        "host": "",
        "user": "",
    }
    reports = []
    for rank in range(4):
        host, changes = "ab"[rank // 2], dict(ranks.get(rank, {}))
        together = changes.pop("exchange", {})
        changes["exchange"] = replace(TOGETHER, **together) if together is not None else None
        own = {"rank": rank, "local_rank": rank % 2, "host": host, "node": host, "cpus": (rank % 2,)}
        reports.append(replace(RANK, **{**own, **changes}))
    found = check_ranks(reports, Launch(**{**fields, "submitted_at": 0.0, **launch}), 4)
    assert all(one.advice for one in found if one.state in ("warning", "fault"))
    return {one.check.removeprefix("ranks: "): one for one in found}


def all_ranks(**changes):
    return dict.fromkeys(range(4), changes)


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


PARTITIONS = (
    "main*|up|1:00:00|2/1/1/4|1-infinite",
    "old|down|1:00:00|0/4/0/4|1-2",
    "dead|up|infinite|0/0/4/4|1-1",
)
SURVEY = Survey((), {"MaxArraySize": "1001"}, tuple(map(read_partition, PARTITIONS)), ("none", "pmi2"), {})


def test_output_of_slurm_is_parsed():
    assert SURVEY.partitions[0] == Partition("main", True, True, 60.0, 4, 3, None)
    assert SURVEY.partitions[1] == Partition("old", False, False, 60.0, 4, 4, 2)
    assert read_partition("big|up|2-12:00:00|1.5K/100/0/1.6K|1-infinite").usable_nodes == 1600
    assert [read_minutes(text) for text in ("30:00", "1-00:00:00", "infinite")] == [30.0, 1440.0, None]
    new = "MPI plugin types are...\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
    assert read_mpi_types(new) == ("none", "pmi2", "pmix_v4")


@pytest.mark.parametrize(
    ("check", "slurm", "site", "state", "found", "advice"),
    [
        (
            check_partition,
            {},
            {},
            "fault",
            "main allows up to 60 minutes, a cell of this site needs 62",
            "timeout_minutes: 58",
        ),
        (check_partition, {}, {"timeout_minutes": 58}, "ok", "main: 3 of 4 nodes usable", ""),
        (
            check_partition,
            {"partition": "gpu"},
            {},
            "fault",
            "no partition gpu; there are main, old, dead",
            "slurm.partition",
        ),
        (check_partition, {"partition": "old"}, {}, "fault", "old is not up", "another slurm.partition"),
        (check_partition, {"partition": "dead"}, {}, "fault", "none of the 4 nodes", "sinfo --list-reasons"),
        (check_partition, {"partition": "old,main"}, {"timeout_minutes": 9}, "ok", "main: 3 of 4", ""),
        (check_mpi, {"mpi": "pmix"}, {}, "fault", "not support pmix; it supports none, pmi2", "slurm.mpi"),
        (check_mpi, {}, {"backend": "mpi"}, "fault", "are not one MPI world", "slurm.mpi: pmi2"),
        (check_mpi, {"mpi": "pmi2"}, {"backend": "mpi"}, "ok", "pmi2", ""),
        (check_arrays, {"array_size": 1001}, {}, "fault", "MaxArraySize is 1001", "slurm.array_size: 1000"),
        (check_arrays, {"array_size": 1000}, {}, "ok", "1001", ""),
    ],
)
def test_a_profile_that_does_not_match_the_cluster_is_found(check, slurm, site, state, found, advice):
    one = check(make_site(slurm=slurm, **site), SURVEY)
    assert (one.state, found in one.found, advice in one.advice) == (state, True, True), one


def test_a_cluster_that_does_not_answer_is_a_fault_and_missing_accounting_a_warning():
    silent = replace(SURVEY, missing=("srun",), errors={"controller": "timed out", "accounting": "refused"})
    assert check_commands(silent).state == "fault"
    assert (check_controller(silent).state, check_controller(silent).found) == ("fault", "timed out")
    assert check_accounting(silent).state == "warning"
    assert check_arrays(make_site(), replace(SURVEY, settings={})).state == "skipped"


def test_at_most_as_many_nodes_are_tried_as_a_job_may_have():
    assert nodes_to_try(make_site(), SURVEY) == 2
    assert nodes_to_try(make_site(slurm={"partition": "dead"}), SURVEY) == 1
    refused = "sbatch refused: Requested time limit is invalid"
    assert "timeout_minutes" in advice_on_rejection(refused, make_site())


def test_a_host_with_too_little_for_one_rank_is_found():
    site = make_site("local", cpus_per_rank=4, gpus_per_rank=1, backend="mpi")
    assert check_cpus(site, 2).advice == "set cpus_per_rank to 2 or fewer"
    assert check_cpus(site.model_copy(update={"oversubscribe": True}), 2).state == "warning"
    assert check_gpus(site, 0).state == "fault"
    assert check_mpi_library(site, "", "cannot load MPI library").state == "fault"
    assert "MPICH" in check_mpi_library(site, "Open MPI v5.0", "").advice
    assert check_mpi_library(site, "MPICH Version: 5.0.2", "").state == "ok"


def test_a_file_system_without_hard_links_or_space_is_found(tmp_path, monkeypatch):
    assert [check_space(size).state for size in (1 << 40, 100 << 20, 1 << 20)] == ["ok", "warning", "fault"]

    def reject(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", reject)
    states = {one.check: one.state for one in check_storage(tmp_path / "runs/.doctor/now")}
    assert states["runs: link"] == "fault"
    assert (states["runs: write"], states["runs: rename"], states["runs: lock"]) == ("ok", "ok", "ok")


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_of_a_ranks_control_groups_counts(tmp_path, version):
    (tmp_path / "self").write_text("4:cpu,memory:/job/step\n" if version == 1 else "0::/job/step\n")
    top = tmp_path / "memory" if version == 1 else tmp_path
    (top / "job/step").mkdir(parents=True)
    name, no_limit = ("memory.limit_in_bytes", str(2**63 - 4096)) if version == 1 else ("memory.max", "max")
    (top / "job/step" / name).write_text(no_limit)
    assert memory_limit_bytes(tmp_path / "self", tmp_path) is None
    (top / "job" / name).write_text("4096\n")
    assert memory_limit_bytes(tmp_path / "self", tmp_path) == 4096


def test_two_ranks_on_this_host_pass_and_leave_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "here.yaml").write_text("oversubscribe: true\n")
    runs = tmp_path / "runs"
    code = main(
        ["doctor", "--site", str(tmp_path / "here.yaml"), "--runs", str(runs), "--ranks", "2", "--json"]
    )
    output = json.loads(capsys.readouterr().out)
    assert code == 0, output
    assert not [one for one in output["findings"] if one["state"] == "fault"]
    assert [one["rank"] for one in output["reports"]] == [0, 1]
    assert all(one["exchange"]["backend"] == "gloo" for one in output["reports"])
    assert list(runs.iterdir()) == []


def test_ranks_that_cannot_join_are_a_fault_with_the_launchers_cause_and_their_files_are_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    site = make_site(
        "local", oversubscribe=True, environment={"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}
    )
    result = examine(site, tmp_path / "runs", 2, 60, lambda _: None)
    [job] = [one for one in result.findings if one.state == "fault"]
    assert job.check == "ranks: job"
    assert "FAILED: rank" in job.found
    assert "logs/" in job.advice
    assert result.kept is not None
    assert list(result.kept.glob("doctor/*/attempt-1/logs/rank-00000.log"))


def test_a_runs_folder_that_cannot_be_written_is_a_fault_found_without_torch(tmp_path):
    (tmp_path / "file").write_text("")
    done = start("doctor", "--site", "local", "--runs", str(tmp_path / "file/runs"), COLUMNS="400")
    assert (done.returncode, done.stderr) == (1, "")
    output = " ".join(done.stdout.split())
    assert "cannot be written: Not a directory" in output
    assert "1 fault" in output


def test_more_ranks_than_fit_and_an_unknown_site_are_usage_errors(tmp_path, capsys):
    (tmp_path / "here.yaml").write_text("cpus: 1\n")
    here = str(tmp_path / "here.yaml")
    assert main(["doctor", "--site", here, "--runs", str(tmp_path), "--ranks", "3"]) == 2
    assert main(["doctor", "--site", "nowhere", "--runs", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / ".doctor").exists()
