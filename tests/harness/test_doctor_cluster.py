"""Promise: doctor finds where a site does not match its cluster, its host or its file system."""

import errno
import os
from dataclasses import replace

import pytest

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
from harness.doctor.local_host import check_cpus, check_gpus, check_mpi_library
from harness.doctor.storage import check_space, check_storage
from harness.launchers.cgroups import memory_limit_bytes
from harness.launchers.slurm.cluster_survey import (
    Partition,
    Survey,
    read_minutes,
    read_mpi_types,
    read_partition,
)
from tests.harness.doctor_reports import make_site

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
