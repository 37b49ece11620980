"""Promise: doctor finds faults in what ranks report, and advises what to do about each.

It starts ranks, names what keeps them from joining, and removes its files.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from harness.cli import main
from harness.doctor.examine import examine, probe_cell
from harness.doctor.findings import Finding
from harness.doctor.ranks import Report, check_job, check_ranks
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.launchers.slurm_profile import SlurmProfile
from harness.study.status import CellStatus
from tests.harness.test_cli_starts import start

RANK = Report(
    0, "a", "/bin/python", {"python": "3.11.7", "torch": "2.6", "commit": "abc"}, "", (), (0,),
    backend="gloo", all_reduce_seconds=4e-3,
)  # fmt: skip


def make_site(launcher: str = "slurm", **fields: Any) -> Site:
    profile = SlurmProfile(ranks_per_node=2) if launcher == "slurm" else None
    return Site(name="test", launcher=launcher, slurm=profile, **fields)


def findings(ranks: dict[int, dict[str, Any]], site: Site | None = None, **launch: Any) -> dict[str, Finding]:
    """Findings by check for four ranks on two hosts, with the changes that `ranks` has for each of them."""
    site = site or make_site()
    fields = {"launcher": site.launcher, "site": site, "cpus_per_rank": site.cpus_per_rank} | launch
    own = [{"rank": rank, "node": "ab"[rank // 2], "cpus": (rank % 2,)} for rank in range(4)]
    reports = [replace(RANK, **{**own[rank], **ranks.get(rank, {})}) for rank in range(4)]
    found = check_ranks(reports, Launch(host="", user="", submitted_at=0.0, **fields), 4)
    assert all(one.advice for one in found if one.state in ("warning", "fault"))
    return {one.check.removeprefix("ranks: "): one for one in found}


def test_correct_ranks_give_no_warning_unless_they_have_too_few_cpus():
    found = findings({})
    assert {one.state for one in found.values()} <= {"ok", "skipped"}
    assert found["all-reduce"].found == "right over gloo; 4 MiB take 4 ms"
    assert found["data"].found == "KRONSCALE_DATA is not set: the embedded data are there"
    assert findings({}, make_site(cpus_per_rank=2))["CPUs"].state == "fault"
    assert findings({}, make_site("local"), oversubscribed=True, cpus=(0, 1))["CPUs"].state == "warning"


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


@pytest.mark.parametrize(
    ("state", "cause", "found", "advice"),
    [
        ("PENDING", "job 7_0 waits: Priority", "PENDING after 5 s, cancelled: job 7_0 waits", "--wait"),
        ("RUNNING", "", "RUNNING after 5 s, cancelled: 1 of 4 ranks were done", "logs/"),
        ("FAILED", "srun started no rank and ended with 1: no", "FAILED: srun started no rank", "srun.log"),
        ("FAILED", "job 7_0 ended FAILED before the attempt started", "before", "nodes see the runs folder"),
        ("FAILED", "rank 1 failed before its first step: SiteError: no", "rank 1 failed", "logs/"),
    ],
)
def test_a_job_that_did_not_complete_is_a_fault_with_its_cause(state, cause, found, advice):
    status = CellStatus(probe_cell(4), state, cause=cause)
    one = check_job(status, [RANK, replace(RANK, rank=1, backend=None)], 5, make_site())
    assert (one.state, found in one.found, advice in one.advice) == ("fault", True, True), one


@pytest.mark.ranks
def test_two_ranks_on_this_host_pass_and_leave_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "locks"))
    (tmp_path / "here.yaml").write_text("oversubscribe: true\n")
    runs = tmp_path / "runs"
    code = main(
        ["doctor", "--site", str(tmp_path / "here.yaml"), "--runs", str(runs), "--ranks", "2", "--json"]
    )
    output = json.loads(capsys.readouterr().out)
    assert code == 0, output
    assert not [one for one in output["findings"] if one["state"] == "fault"]
    assert [one["rank"] for one in output["reports"]] == [0, 1]
    assert all(one["backend"] == "gloo" for one in output["reports"])
    assert list(runs.iterdir()) == []


@pytest.mark.ranks
def test_ranks_that_cannot_join_are_a_fault_with_the_launchers_cause_and_their_files_are_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "locks"))
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


def test_the_data_of_a_sweep_is_checked_in_the_folder_that_the_site_names(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "here.yaml").write_text(f"environment: {{KRONSCALE_DATA: {tmp_path / 'nowhere'}}}\n")
    words = ["doctor", "--site", str(tmp_path / "here.yaml"), "--runs", str(tmp_path / "file/runs"), "--json"]
    assert main([*words, "-f", "jobs/papers/sc20/full/models.yaml"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    [data] = [one for one in findings if one["check"] == "imagenet: files"]
    assert data["state"] == "fault"
    assert f"{tmp_path / 'nowhere' / 'train'} does not exist" in data["found"]
    (tmp_path / "here.yaml").write_text("cpus: 1\n")
    for usage in (["--site", words[2], "--ranks", "3"], ["--site", "nowhere"]):
        assert main(["doctor", *usage, "--runs", str(tmp_path)]) == 2
        assert "error: " in capsys.readouterr().err
    assert not (tmp_path / ".doctor").exists()
