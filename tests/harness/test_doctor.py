"""Promise: doctor starts ranks, names what keeps them from joining, and removes its files."""

import json

import pytest

from harness.cli import main
from harness.doctor.examine import examine
from tests.harness.doctor_reports import make_site
from tests.harness.test_cli_starts import start


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


def test_more_ranks_than_fit_and_an_unknown_site_are_usage_errors(tmp_path, capsys):
    (tmp_path / "here.yaml").write_text("cpus: 1\n")
    here = str(tmp_path / "here.yaml")
    assert main(["doctor", "--site", here, "--runs", str(tmp_path), "--ranks", "3"]) == 2
    assert main(["doctor", "--site", "nowhere", "--runs", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / ".doctor").exists()
