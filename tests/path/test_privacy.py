"""Promise: only its user can read a study, it stores no secrets, and no name is run as code."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from analysis.report.page import Panel, write_report
from harness.cell import Cell
from harness.cli import main
from harness.runs.store import sweep_folder
from harness.study.submit import cancel

pytestmark = pytest.mark.ranks

NASTY = 'it\'s "a" $(touch pwned) `touch pwned` ; touch pwned\n<script>alert(1)<script> %j & *'
SECRET = "hunter2-" + "x" * 20
SWEEP = """\
sweep: nasty
about: "<script>alert(2)</script> $(touch pwned)"
workload: digits
target: {metric: accuracy, at_least: 0.5}
training: {global_batch_size: 256, epochs: 1}
optimizer: {lr: 0.1}
methods: [{name: breaks, workload: {name: cifar10, options: {data: /nowhere}}}, {name: learns}]
grid: {world_size: [1]}
repeats: 1
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_no_name_is_run_no_secret_is_stored_and_no_other_user_may_read(tmp_path, monkeypatch):
    folder = tmp_path / NASTY
    folder.mkdir()
    (folder / f"{NASTY}.yaml").write_text(SWEEP)
    site = folder / "site.yaml"
    site.write_text("launcher: local\nenvironment: {NOTE: \"a 'b' $(touch pwned)\\n<b>\"}\n")
    runs = folder / "runs"
    places = ["-f", f"{NASTY}.yaml", "--runs", str(runs)]
    for name, value in {
        "PYTHONPATH": str(Path.cwd()),
        "API_TOKEN": SECRET,
        "KRONSCALE_LOCKS": str(folder / "locks"),
    }.items():  # of the launcher and the ranks, which are processes of their own
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    assert main(["run", *places, "--site", str(site)]) == 1
    page = write_report(runs / "nasty", folder / "report", panels=[Panel("learning_curves")])

    states = {
        cell.cell().method: cell.latest().outcome() for cell in sweep_folder("nasty", runs).cell_folders()
    }
    assert (states["breaks"].state, states["learns"].state) == ("FAILED", "COMPLETED")
    assert not [*tmp_path.rglob("pwned*")]
    assert mode(runs / "nasty") == 0o700
    written = [path for path in runs.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    html = page.read_text()
    assert "<script>alert" not in html
    assert str(runs).split("\n")[0].split("<")[0] not in html  # quotes are escaped, not as they were


@pytest.fixture
def cell() -> Cell:
    return Cell.model_validate({
        "sweep": "study", "method": "sgd", "world_size": 1, "workload": "digits", "optimizer": {"lr": 0.1},
        "target": {"metric": "accuracy", "at_least": 0.5}, "training": {"global_batch_size": 8, "epochs": 1},
    })  # fmt: skip


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_sweep_is_private_or_readable_by_its_group_with_any_umask(tmp_path, cell, umask):
    before = os.umask(umask)
    try:
        for shared, folders, files in ((False, 0o700, 0o600), (True, 0o2750, 0o640)):
            sweep = sweep_folder("study", tmp_path / str(shared))
            sweep.make(group_readable=shared)
            folder = sweep.stage(cell)
            attempt = folder.new_attempt()
            attempt.write("launch.json", {})
            made = (sweep.path, folder.path, attempt.path, attempt.path / "logs")
            assert [mode(path) for path in made] == [folders] * 4
            for path in (folder.path / "cell.json", attempt.path / "launch.json"):
                assert mode(path) == files
    finally:
        os.umask(before)


def test_an_existing_folder_keeps_its_mode(tmp_path, cell):
    sweep = sweep_folder("study", tmp_path)
    sweep.path.mkdir(mode=0o755)
    sweep.path.chmod(0o755)
    sweep.make()
    assert mode(sweep.path) == 0o755
    assert cancel([cell], tmp_path) == []
