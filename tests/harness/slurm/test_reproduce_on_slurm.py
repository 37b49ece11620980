"""Promise: `reproduce` submits all sweeps of a paper, detaches, and finishes when it is called again."""

import json

import pytest

from harness.cli import main
from harness.runs.store import sweep_folder

pytestmark = pytest.mark.slurm

PAPER = {
    "paper": "tiny", "title": "A tiny paper", "about": "digits", "summary": "one",
    "figures": [
        {"shows": "Fig. 1", "figure": "learning_curves", "sweep": "one"},
        {"shows": "Fig. 2", "figure": "learning_curves", "sweep": "two"},
    ],
}  # fmt: skip
SWEEP = """\
sweep: tiny-small-{name}
workload: digits
target: {{metric: accuracy, at_least: 0.999}}
training: {{global_batch_size: 256, epochs: 1}}
optimizer: {{lr: 0.1}}
methods: [{{name: {name}}}]
grid: {{world_size: [1]}}
repeats: {repeats}
"""


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """A paper of two sweeps of a second each, in a study folder of its own."""
    folder = tmp_path / "jobs" / "papers" / "tiny"
    (folder / "small").mkdir(parents=True)
    (folder / "small.yaml").write_text(json.dumps(PAPER))
    for name, repeats in (("one", 1), ("two", 2)):
        (folder / "small" / f"{name}.yaml").write_text(SWEEP.format(name=name, repeats=repeats))
    monkeypatch.chdir(tmp_path)
    return ["reproduce", "tiny", "--site", "slurm-test", "--runs", "runs"]


def states(root):
    folders = (sweep_folder(f"tiny-small-{name}", root) for name in ("one", "two"))
    found = [cell.latest().outcome() for folder in folders for cell in folder.stored()]
    return [outcome and outcome.state for outcome in found]


def test_reproduce_detaches_and_a_second_call_writes_the_report(on_slurm, paper, tmp_path, capsys):
    where = ["--where", "seed=0"]
    assert main([*paper, *where, "--dry-run"]) == 0
    assert "all sweeps: 2 jobs, the largest of 1 rank on 1 node; at most 0.7333" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()

    assert main([*paper, *where, "--budget", "0.74"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("1 cell submitted") == 2
    again = "kronscale reproduce tiny --size small --where seed=0 --site slurm-test --runs runs"
    assert shown.splitlines()[-1] == f"the runs continue by themselves; to see or finish them: {again}"
    assert len(states(tmp_path / "runs")) == 2

    assert main([*paper, *where, "--watch"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("nothing to do: 1 cell ") == 2
    assert "tiny-small-two: 1 COMPLETED" in shown
    assert states(tmp_path / "runs") == ["COMPLETED"] * 2
    assert shown.splitlines()[-1] == "report: papers/tiny-small/report.html"
    page = (tmp_path / "papers" / "tiny-small" / "report.html").read_text()
    assert "A tiny paper, reproduced in digits" in page
    assert "--where" in page  # only a part

    assert main([*paper, "--budget", "0.1"]) == 4  # for the cell that was left out
    assert "this could cost 0.3667 core-hours" in capsys.readouterr().err
