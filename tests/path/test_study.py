"""Promise: a sweep file becomes figures, and a failure on the way is reported and can be retried."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.cli import main
from harness.runs.attempt_outcome import Outcome
from harness.runs.store import CellFolder, sweep_folder
from tests.waiting import wait_for

pytestmark = pytest.mark.ranks

STUDY = """\
sweep: study
workload: digits
target: {metric: accuracy, at_least: 0.5}
training: {global_batch_size: 256, epochs: 30}
optimizer: {lr: 0.4, warmup_epochs: 2}
methods:
  - {name: sgd, optimizer: {lr: 0.1}, world_size: 1}
  - {name: comm_opt, kfac: {damping: 0.003, factor_update_steps: 1, inverse_update_steps: 5}}
world_size: 2
repeats: 1
"""
FIGURES = ("--figure", "time_to_accuracy", "--figure", "phase_breakdown")
"""Of a run's evaluations and of its phases; the report of all figures is the same page with more of them."""

ENDLESS = """\
sweep: endless
workload: digits
target: {metric: accuracy, at_least: 0.9999}
training: {global_batch_size: 256, epochs: 100000}
optimizer: {lr: 0.01}
methods:
  - {name: doomed}
  - {name: short, training: {global_batch_size: 256, epochs: 1}, world_size: 1}
world_size: 2
repeats: 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with its own locks; processes that still run in it at the end are killed."""
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "locks"))
    yield tmp_path
    for process in psutil.process_iter(["cmdline"]):
        if any(str(tmp_path) in word for word in process.info["cmdline"] or ()):
            process.kill()


def kronscale(folder: Path, *arguments: str, expect: int | None = 0) -> str:
    """Run a command in this process, which has loaded what a new one would have to load."""
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = main([*arguments, "--runs", str(folder / "runs")])
    assert expect is None or code == expect, printed.getvalue()
    return printed.getvalue()


def statuses(folder: Path, sweep: str) -> dict[str, dict[str, Any]]:
    cells = json.loads(kronscale(folder, "status", sweep, "--json"))
    return {cell["method"]: cell for cell in cells}


def test_a_sweep_becomes_records_and_a_report_and_runs_nothing_twice(folder, no_images):
    file = folder / "study.yaml"
    file.write_text(STUDY)
    kronscale(folder, "run", "-f", str(file), "--site", site(folder))
    cells = list(sweep_folder("study", folder / "runs").cell_folders())
    assert len(cells) == 2
    for cell in cells:
        attempt = cell.latest()
        assert attempt is not None
        assert attempt.number == 1
        outcome = attempt.outcome()
        assert outcome is not None
        assert (outcome.state, outcome.reached_target, outcome.cause) == ("COMPLETED", True, "")
        for rank in range(cell.cell().world_size):
            kinds = {json.loads(line)["kind"] for line in attempt.records(rank).read_text().splitlines()}
            assert "phases" in kinds
            assert ("evaluation" in kinds) == (rank == 0)
    assert "nothing to do" in kronscale(folder, "submit", "-f", str(file), "--site", site(folder))

    lost = next(cell for cell in cells if cell.cell().world_size == 1)  # the cheaper one to run again
    subprocess.run(["rm", "-r", str(lost.path)], check=True)
    kronscale(folder, "run", "-f", str(file), "--site", site(folder))
    assert [len(cell.attempts()) for cell in cells] == [1, 1]
    ended = {cell.id: cell.latest().outcome().ended_at for cell in cells}  # type: ignore[union-attr]
    assert max(ended, key=lambda id: ended[id]) == lost.id

    output = kronscale(folder, "report", "study", "--out", str(folder / "report"), *FIGURES)
    page = (folder / "report" / "report.html").read_text()
    assert "report.html" in output.replace("\n", "")
    assert all(cell.id in page for cell in cells)
    assert {path.suffix for path in (folder / "report" / "figures").iterdir()} == {".png", ".pdf", ".csv"}


def test_a_killed_rank_ends_its_attempt_is_the_root_cause_and_only_its_cell_is_retried(folder):
    file = folder / "endless.yaml"
    file.write_text(ENDLESS)
    kronscale(folder, "submit", "-f", str(file), "--site", site(folder))
    doomed = next(c for c in sweep_folder("endless", folder / "runs").cell_folders() if "doomed" in c.id)
    ranks = wait_for(lambda: training_ranks(doomed))
    os.kill(ranks[1].pid, signal.SIGKILL)
    wait_for(lambda: not any(rank.is_running() for rank in ranks))
    wait_for(lambda: outcome_of(doomed))  # files: the command would compute as much as the ranks meanwhile
    cell = statuses(folder, "endless")["doomed"]
    assert cell["state"] == "FAILED"
    assert cell["rank"] == 1
    assert cell["step"] > 0
    assert cell["phase"] in cell["cause"]
    assert f"rank 1 was killed by SIGKILL at step {cell['step']} in" in cell["cause"]
    short = next(c for c in sweep_folder("endless", folder / "runs").cell_folders() if "short" in c.id)
    wait_for(lambda: outcome_of(short))
    assert statuses(folder, "endless")["short"]["state"] == "COMPLETED"

    assert "nothing to do" in kronscale(folder, "submit", "-f", str(file), "--site", site(folder))
    kronscale(folder, "retry", "endless", "--site", site(folder))
    wait_for(lambda: training_ranks(doomed))
    again = statuses(folder, "endless")
    assert (again["doomed"]["attempt"], again["doomed"]["state"]) == (2, "RUNNING")
    assert again["short"]["attempt"] == 1
    kronscale(folder, "cancel", "endless", expect=None)
    assert statuses(folder, "endless")["doomed"]["state"] == "CANCELLED"
    first = doomed.attempts()[0].outcome()
    assert first is not None
    assert first.state == "FAILED"  # an attempt's outcome never changes


def test_an_exception_in_a_rank_is_the_cause_with_its_message(folder):
    file = folder / "study.yaml"
    without_data = f"workload: {{name: cifar10, options: {{data: {folder}/nowhere}}}}"
    file.write_text(STUDY.replace("workload: digits", without_data))
    kronscale(folder, "run", "-f", str(file), "--site", site(folder), "--where", "method=sgd", expect=1)
    states = json.loads(kronscale(folder, "status", "study", "--json"))
    assert [cell["state"] for cell in states] == ["FAILED"]
    for cell in states:
        assert f"DataError: {folder}/nowhere has no batch files of cifar10" in cell["cause"]


def site(folder: Path) -> str:
    path = folder / "site.yaml"
    path.write_text("launcher: local\noversubscribe: true\n")
    return str(path)


def outcome_of(cell: CellFolder) -> Outcome | None:
    """The newest attempt's outcome, once it has ended."""
    attempt = cell.latest()
    return None if attempt is None else attempt.outcome()


def training_ranks(cell: CellFolder) -> list[psutil.Process]:
    """The newest attempt's rank processes in rank order, once all of them are past step 5."""
    attempt = cell.latest()
    if attempt is None:
        return []
    heartbeats = [attempt.last_heartbeat(rank) for rank in range(2)]
    if not all(heartbeat is not None and heartbeat.step > 5 for heartbeat in heartbeats):
        return []
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if "harness.training.worker" in arguments and str(attempt.path) in arguments:
            found[int(arguments[arguments.index("--rank") + 1])] = process
    return [found[rank] for rank in sorted(found)]


def test_files_named_like_modules_in_the_working_folder_are_not_imported(folder):
    for name in ("random.py", "platform.py", "types.py", "harness/__init__.py", "torch/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit('a file of the working folder was imported')\n")
    (folder / "one.yaml").write_text(
        "sweep: one\nworkload: digits\ntarget: {metric: accuracy, at_least: 0.5}\n"
        "training: {global_batch_size: 256, epochs: 1}\n"
        "optimizer: {lr: 0.1}\nmethods: [{name: sgd}]\ngrid: {world_size: [1, 2]}\nrepeats: 1\n"
    )
    command = "import sys; from harness.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["run", "-f", "one.yaml", "--site", site(folder), "--runs", str(folder / "runs")]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", command, *arguments],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cells = sweep_folder("one", folder / "runs").cell_folders()
    assert [cell.latest().outcome().state for cell in cells] == ["COMPLETED"] * 2
