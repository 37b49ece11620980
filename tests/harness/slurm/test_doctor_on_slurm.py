"""Promise: doctor passes a working cluster, names the faults of another, and leaves no job behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import main
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

PROFILE = "launcher: slurm\ntimeout_minutes: 20\nslurm:\n  ranks_per_node: 2\n"


@pytest.fixture
def doctor(on_slurm, tmp_path, capsys):
    """Examine a site; returns the exit code, the findings by check, and the whole report."""

    def call(site, *words, runs=None):
        path = site
        if "\n" in site:
            path = str(tmp_path / "here.yaml")
            (tmp_path / "here.yaml").write_text(site)
        runs = runs or tmp_path / "runs"
        capsys.readouterr()
        code = main(["doctor", "--site", path, "--runs", str(runs), "--json", *words])
        report = json.loads(capsys.readouterr().out)
        for one in report["findings"]:
            assert one["advice"] or one["state"] in ("ok", "skipped")
        return code, {one["check"]: one for one in report["findings"]}, report

    return call


def logs_in(kept):
    """Logs of the examination's job, for the message of a failed assertion."""
    paths = Path(kept).rglob("*.log") if kept else ()
    return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in sorted(paths))


@pytest.mark.parametrize(("site", "backend"), [("slurm-test", "gloo"), ("slurm-test-mpi", "mpi")])
def test_two_ranks_on_each_of_two_nodes_have_no_fault(doctor, on_slurm, tmp_path, site, backend):
    code, found, report = doctor(f"jobs/sites/{site}.yaml")
    states = {check: one["state"] for check, one in found.items()}
    faults = [f"{check}: {one['found']}" for check, one in found.items() if one["state"] == "fault"]
    assert not faults, (faults, logs_in(report["kept"]))
    assert code == 0
    # The test cluster binds no rank to CPUs.
    assert {check for check, state in states.items() if state == "warning"} <= {"ranks: CPUs"}, found
    assert len({one["node"] for one in report["reports"]}) == 2
    assert [one["backend"] for one in report["reports"]] == [backend] * 4
    for check in ("runs: link", "slurm: sbatch", "ranks: all-reduce", "ranks: software"):
        assert states[check] == "ok", found[check]
    assert list((tmp_path / "runs").iterdir()) == []
    assert on_slurm.run("squeue", "--noheader") == ""


def test_what_sbatch_refuses_is_named_by_its_field_and_nothing_is_started(doctor, on_slurm):
    code, found, _ = doctor(f"{PROFILE}  partition: gpu\n")
    assert code == 1
    assert "slurm.partition" in found["slurm: sbatch"]["advice"]
    assert found["ranks: job"]["state"] == "skipped"
    assert on_slurm.run("squeue", "--noheader") == ""


def test_a_job_that_does_not_start_is_cancelled_with_slurms_reason(doctor, on_slurm):
    code, found, report = doctor(f"{PROFILE}  sbatch: {{begin: now+1hour}}\n", "--wait", "1")
    assert code == 1
    assert "BeginTime" in found["ranks: job"]["found"]
    assert report["kept"] is not None
    assert on_slurm.run("squeue", "--noheader") == ""


@pytest.mark.parametrize(
    ("line", "found_there", "advice"),
    [
        ("srun: [--no-such-option]", "srun started no rank", "slurm.srun"),
        ("setup: [exit 3]", "before the attempt started", "slurm.setup"),
    ],
)
def test_a_job_that_starts_no_rank_is_a_fault_with_the_reason(doctor, on_slurm, line, found_there, advice):
    code, found, _ = doctor(f"{PROFILE}  {line}\n")
    assert code == 1
    assert found_there in found["ranks: job"]["found"]
    assert advice in found["ranks: job"]["advice"]
    assert on_slurm.run("squeue", "--noheader") == ""


def test_stopping_the_examination_ends_its_job_and_removes_its_files(on_slurm, tmp_path):
    site = tmp_path / "here.yaml"
    site.write_text(f"{PROFILE}  sbatch: {{begin: now+1hour}}\n")
    words = ["-m", "harness.cli", "doctor", "--site", str(site), "--runs", str(tmp_path / "runs")]
    with subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: on_slurm.run("squeue", "--noheader"))
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    assert "Traceback" not in complaints
    assert on_slurm.run("squeue", "--noheader") == ""
    assert list((tmp_path / "runs").iterdir()) == []
