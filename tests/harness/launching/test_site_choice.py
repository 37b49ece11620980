"""Promise: a sweep goes where it was last submitted, never silently elsewhere; nobody pays much unasked."""

import json
from pathlib import Path

import pytest

from analysis.records.loading import load
from analysis.report.findings import moved_note
from harness.cli import main
from harness.errors import SiteError
from harness.launchers import LAUNCHERS
from harness.launchers.local import launcher as local
from harness.launchers.resuming import continued_attempts, refuse_change
from harness.launchers.site_profile import Site, read_site
from harness.launchers.slurm import launcher as slurm
from harness.launchers.slurm.scheduler import Cluster
from harness.runs.attempt_outcome import Outcome
from harness.runs.checkpoint_store import CheckpointStore
from harness.runs.store import sweep_folder
from harness.study.expected_cost import expected_cost
from harness.study.site_choice import chosen_site

GONE = "launcher: slurm\ntimeout_minutes: 60\nslurm: {ranks_per_node: 2, partition: gone}\n"


@pytest.fixture
def failed(make_cell, tmp_path):
    """A cell that failed on site slurm-test."""
    cell = make_cell(2)
    attempt = sweep_folder("study", tmp_path / "runs").stage(cell).new_attempt()
    LAUNCHERS["slurm"].plan(cell, read_site("slurm-test")).write(attempt)
    attempt.write_outcome(Outcome("FAILED", "it broke", None, "error", 1.0, 2.0))
    return cell


@pytest.fixture
def submitted(monkeypatch):
    """What would be given to sbatch; nothing is started on this host."""
    found = []
    monkeypatch.setattr(slurm, "submit_manifest", lambda manifest: found.append(manifest) or "77")
    monkeypatch.setattr(slurm, "this_cluster", lambda: Cluster("here", False))
    monkeypatch.setattr(local.LocalLauncher, "launch", lambda *_: pytest.fail("started on this host"))
    monkeypatch.delenv("KRONSCALE_SITE", raising=False)
    return found


def test_a_retry_without_a_site_goes_to_the_cluster_again(failed, submitted, tmp_path, capsys):
    runs = str(tmp_path / "runs")
    assert main(["retry", "study", "--runs", runs, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "#SBATCH --partition=main" in shown.out
    assert "from the beginning" in shown.err
    assert "1 cell would be submitted again to site slurm-test: 1 job of 2 ranks on 1 node" in shown.err
    assert submitted == []
    assert main(["retry", "study", "--runs", runs]) == 0
    assert [manifest.site.name for manifest in submitted] == ["slurm-test"]
    assert "site slurm-test: 1 job of 2 ranks on 1 node; at most 0.7333 core-hours" in capsys.readouterr().out


def test_the_site_is_the_named_one_then_that_of_the_environment_then_the_last(
    failed, submitted, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("jobs/sites").mkdir(parents=True)
    for name in ("one", "two"):
        Path(f"jobs/sites/{name}.yaml").write_text(GONE.replace("gone", name))
    monkeypatch.setenv("KRONSCALE_SITE", "one")
    retry = ["retry", "study", "--runs", "runs"]
    assert main([*retry, "--site", "two"]) == 0
    folder = sweep_folder("study", tmp_path / "runs")
    folder.cell_folder(failed).latest().write_outcome(Outcome("FAILED", "again", None, "error", 1.0, 2.0))
    assert main(retry) == 0
    folder.cell_folder(failed).latest().write_outcome(Outcome("FAILED", "again", None, "error", 1.0, 2.0))
    monkeypatch.delenv("KRONSCALE_SITE")
    assert main(retry) == 0
    assert [manifest.site.slurm.partition for manifest in submitted] == ["two", "one", "one"]


def test_the_last_site_is_used_as_it_was_where_its_profile_is_not_found(failed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = sweep_folder("study", tmp_path / "runs")
    attempt = folder.cell_folder(failed).latest()
    launch = attempt.read("launch.json")
    attempt.write("launch.json", launch | {"site": launch["site"] | {"name": "far", "timeout_minutes": 7.0}})
    assert chosen_site(None, folder).timeout_minutes == 7.0
    Path("jobs/sites").mkdir(parents=True)
    Path("jobs/sites/far.yaml").write_text("launcher: local\n")
    with pytest.raises(SiteError, match="far with launcher slurm, and the profile far found from here has"):
        chosen_site(None, folder)


def _saved(cell, folder, site, environment):
    """An attempt with a checkpoint, on `site`."""
    attempt = folder.cell_folder(cell).latest()
    LAUNCHERS[site.launcher].plan(cell, site).write(attempt)
    attempt.write("environment.json", environment)
    return attempt


def test_a_run_does_not_continue_elsewhere_unless_asked(failed, submitted, tmp_path, monkeypatch, capsys):
    folder = sweep_folder("study", tmp_path / "runs")
    attempt = _saved(failed, folder, read_site("slurm-test"), {"cpu": "Old CPU", "device": "cpu"})
    monkeypatch.setattr(CheckpointStore, "newest_first", lambda self: ["a checkpoint"])
    monkeypatch.setattr("harness.runs.run_place.cpu_model", lambda: "New CPU")
    continued = continued_attempts([failed], folder)
    assert continued == {failed.id: attempt}
    refuse_change(continued, read_site("slurm-test"))
    retry = ["retry", "study", "--runs", str(tmp_path / "runs"), "--site", "local"]
    assert main([*retry, "--dry-run"]) == 2
    assert (
        "would continue attempt 1 elsewhere: site from slurm-test to local; launcher from slurm to local; "
        "cpu from Old CPU to New CPU" in capsys.readouterr().err
    )
    assert main(retry) == 2
    assert folder.cell_folder(failed).latest() == attempt
    assert main([*retry, "--dry-run", "--fresh"]) == 0
    assert main([*retry, "--dry-run", "--change-site"]) == 0
    assert f"{failed.id}: continues attempt 1" in capsys.readouterr().err


def test_the_report_marks_a_run_that_continued_elsewhere(failed, tmp_path):
    folder = sweep_folder("study", tmp_path / "runs")
    first = _saved(failed, folder, read_site("slurm-test"), {"cpu": "Old CPU"})
    second = folder.cell_folder(failed).new_attempt()
    LAUNCHERS["local"].plan(failed, read_site("local")).model_copy(
        update={"continues": first.number}
    ).identified(second).write(second)
    second.write("environment.json", {"cpu": "New CPU"})
    second.write_outcome(Outcome("FAILED", "it broke", None, "error", 1.0, 2.0))
    cells = load(folder.path).cells
    expected = "site from slurm-test to local; launcher from slurm to local; cpu from Old CPU to New CPU"
    assert list(cells["moved"]) == [expected]
    assert moved_note(cells).startswith(f"1 of 1 runs continued elsewhere ({expected}): their clocks add up")


def test_a_small_host_refuses_hundreds_of_ranks_unless_asked(make_cell, cpus, tmp_path, capsys):
    site, launcher = read_site("local"), LAUNCHERS["local"]
    at = {
        ranks: make_cell().model_copy(update={"world_size": ranks})
        for ranks in (4 * cpus, 4 * cpus + 1, 256 * cpus)
    }
    launcher.check(at.pop(4 * cpus), site)
    for ranks, cell in at.items():
        with pytest.raises(
            SiteError, match=rf"needs {ranks} CPUs, which is .* times the {cpus} of site local"
        ):
            launcher.check(cell, site)
    launcher.check(cell, site.model_copy(update={"oversubscribe_limit": 256.0}))
    wide = ["submit", "-f", "jobs/papers/sc20/full/time.yaml"]
    assert main([*wide, "--runs", str(tmp_path / "runs"), "--where", "world_size=256"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "256 CPUs" in error
    allowed = [*wide, "--runs", str(tmp_path / "runs"), "--where", "world_size=256 and seed=0", "--dry-run"]
    assert main([*allowed, "--oversubscribe", "256"]) == 0
    assert main([*allowed, "--oversubscribe", "256", "--site", "slurm-test"]) == 2


def test_much_is_not_submitted_unasked(submitted, tmp_path, capsys):
    (tmp_path / "big.yaml").write_text(GONE.replace("60", "6000") + "  # hours\n")
    submit = ["submit", "-f", "jobs/papers/sc20/full/time.yaml", "--site", str(tmp_path / "big.yaml")]
    submit += ["--runs", str(tmp_path / "runs")]
    assert main(submit) == 4
    error = capsys.readouterr().err
    assert "in 60 jobs, the largest of 256 ranks on 128 nodes" in error
    assert "above 1000 core-hours somebody has to agree" in error
    assert submitted == []
    assert main([*submit, "--budget", "10"]) == 4
    assert submitted == []
    assert main([*submit, "--where", "world_size=16 and seed=0", "--yes"]) == 0
    assert len(submitted) == 1


def test_a_user_at_a_terminal_is_asked_once(submitted, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("harness.cli.cost_consent.sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("harness.cli.cost_consent.sys.stdout.isatty", lambda: True, raising=False)
    asked, answers = [], [False, True]

    def confirm(text, *, abort, err):
        asked.append(text)
        if not answers.pop(0):
            raise KeyboardInterrupt

    monkeypatch.setattr("harness.cli.cost_consent.typer.confirm", confirm)
    (tmp_path / "big.yaml").write_text(GONE.replace("60", "60000"))
    submit = ["submit", "-f", "tests/strategies.yaml", "--site", str(tmp_path / "big.yaml")]
    submit += ["--runs", str(tmp_path / "runs")]
    assert main(submit) == 130
    assert submitted == []
    assert main(submit) == 0
    assert len(asked) == 2
    assert len(submitted) == 3


def test_expected_hours_are_those_of_completed_cells(make_cell):
    site = Site(name="here", cpus_per_rank=2, timeout_minutes=60)
    taken = [(make_cell(2, seed=0), 600.0), (make_cell(2, seed=1), 1200.0), (make_cell(1), 60.0)]
    cost = expected_cost([make_cell(2, seed=2), make_cell(1, seed=2)], taken, site)
    assert cost.core_hours == pytest.approx(2 * 2 * 900 / 3600 + 2 * 60 / 3600)
    alone = expected_cost([make_cell(1, seed=2)], taken, site)
    assert alone.core_hours == pytest.approx(2 * 60 / 3600)  # not as runs of two ranks take
    assert expected_cost([make_cell()], [], site) is None
    cost = expected_cost([make_cell(2, seed=2)], [(make_cell(2, seed=0), 1e6)], site)
    assert cost.core_hours == 2 * 2 * 1.0  # none takes longer than its limit


def test_after_a_refusal_plan_status_and_submit_agree(submitted, tmp_path, monkeypatch, capsys):
    def refuse(manifest):
        raise SiteError("site slurm-test: sbatch refused: invalid account")

    monkeypatch.setattr(slurm, "submit_manifest", refuse)
    words = ["-f", "tests/strategies.yaml", "--runs", str(tmp_path), "--where", "method=sgd"]
    assert main(["submit", *words, "--site", "slurm-test"]) == 2
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["new"] == 6
    assert main(["status", "demo", "--runs", str(tmp_path), "--json"]) == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["STAGED"] * 6
    assert main(["submit", *words, "--site", "slurm-test", "--dry-run"]) == 0
    assert "6 cells would be submitted to site slurm-test" in capsys.readouterr().err
