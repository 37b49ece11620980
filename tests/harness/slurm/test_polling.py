"""Promise: whoever watches runs on Slurm asks it seldom, once for all sweeps, and sees starts and ends.

`squeue` is a program that logs its calls and answers as Slurm does; no cluster is started.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli import main
from harness.launchers.launch import RanksStarted
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.launchers.slurm.launcher import SlurmLauncher
from harness.runs.store import Attempt, sweep_folder
from harness.study.status import LauncherReports, read_statuses

JOBS = 4


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often squeue was called so far; it reports the jobs 77_0 to 77_3 as pending."""
    programs, log = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    rows = "".join(f"77|{number}|78|PENDING||batch|Priority|0\n" for number in range(JOBS))
    (tmp_path / "rows").write_text(rows)
    (programs / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {log}\ncat {tmp_path / "rows"}\n')
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def pending(tmp_path: Path, make_cell, make_site) -> Callable[[str], list[Attempt]]:
    """Attempts of a sweep, pending in Slurm's queue."""

    def make(sweep: str) -> list[Attempt]:
        folder = sweep_folder(sweep, tmp_path / "runs")
        attempts = []
        for number in range(JOBS):
            cell = make_cell(seed=number).model_copy(update={"sweep": sweep})
            attempts.append(folder.stage(cell).new_attempt())
            launch = SlurmLauncher().plan(cell, make_site())
            update = {"manifest": "c", "manifest_job": number}
            launch.model_copy(update=update).write(attempts[-1])
        manifest = Attempt(folder.path / "jobs" / "c")
        manifest.path.mkdir(parents=True)
        manifest.write("submitted.json", {"job_id": "77"})
        return attempts

    return make


def test_a_watcher_asks_seven_times_in_the_first_minute_and_then_twice_a_minute(tmp_path, pending, calls):
    pending("study")
    now = [0.0]
    reports = LauncherReports(clock=lambda: now[0])
    after: dict[int, int] = {}
    for second in range(0, 600, 2):  # as often as a short `status` allows
        now[0] = float(second)
        statuses = read_statuses(sweep_folder("study", tmp_path / "runs"), None, reports)
        assert {one.cause.partition(": ")[2] for one in statuses} == {"other jobs come first (Priority)"}
        after[second] = calls()
    assert after[58] <= 7
    assert after[598] - after[58] <= 18
    assert after[598] - after[298] >= 9  # it goes on asking


def test_starts_and_ends_show_at_once_and_without_a_call(tmp_path, pending, calls):
    first = pending("study")[0]
    reports = LauncherReports(clock=lambda: 0.0)
    folder = sweep_folder("study", tmp_path / "runs")

    def states() -> list[str]:
        found = read_statuses(folder, None, reports)
        return [one.state for one in sorted(found, key=lambda one: one.cell.seed)]

    assert states() == ["PENDING"] * JOBS
    RanksStarted(1.0, (), ()).write(first)
    assert states() == ["RUNNING", *["PENDING"] * (JOBS - 1)]
    first.write_outcome(outcome_without_ranks("FAILED", "as the test says"))
    assert states() == ["FAILED", *["PENDING"] * (JOBS - 1)]
    assert calls() == 1


def test_the_status_of_all_sweeps_asks_once(tmp_path, pending, calls, capsys):
    for sweep in ("one", "two", "three"):
        pending(sweep)
    capsys.readouterr()
    assert main(["status", "--json", "--runs", str(tmp_path / "runs")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 3 * JOBS
    assert all("waits: other jobs come first" in row["cause"] for row in rows)
    assert calls() == 1


def test_jobs_of_different_sweeps_are_told_apart(tmp_path, pending, calls, capsys):
    """Manifests of two sweeps may have the same name, but not the same jobs."""
    pending("one")
    pending("two")
    Attempt(tmp_path / "runs" / "two" / "jobs" / "c").write("submitted.json", {"job_id": "99"})
    (tmp_path / "rows").write_text(
        (tmp_path / "rows").read_text()
        + "".join(f"99|{number}|78|PENDING||batch|Resources|0\n" for number in range(JOBS))
    )
    capsys.readouterr()
    assert main(["status", "--json", "--runs", str(tmp_path / "runs")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["sweep"], row["cause"].rpartition(" ")[2]) for row in rows} == {
        ("one", "(Priority)"), ("two", "(Resources)"),
    }  # fmt: skip
    assert calls() == 1
