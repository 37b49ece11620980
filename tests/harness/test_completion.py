"""Promise: the shell completes commands, sweeps, cells and sites, and loads nothing slow to do so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import main
from harness.runs.store import sweep_folder
from harness.study.sweep import read_sweep

DEMO = "jobs/sweeps/demo.yaml"
PROGRAM = str(Path(sys.executable).with_name("kronscale"))


@pytest.fixture
def cells(tmp_path):
    """Two cells of the demo, and one of a sweep `other`; beside them folders that are no sweeps."""
    cells = read_sweep(Path(DEMO)).cells[:2]
    cells.append(cells[0].model_copy(update={"sweep": "other"}))
    for cell in cells:
        sweep_folder(cell.sweep, tmp_path).stage(cell)
    (tmp_path / "demo" / "report").mkdir()
    (tmp_path / "derived" / "demo").mkdir(parents=True)
    return cells


@pytest.fixture
def complete(monkeypatch, capsys):
    def complete(*words: str) -> list[str]:
        monkeypatch.setenv("_KRONSCALE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(["kronscale", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == 0
        return capsys.readouterr().out.split()

    return complete


def test_commands_and_options_are_completed(complete):
    assert complete("st") == ["status"]
    assert complete("plan", "--wh") == ["--where"]


def test_sweeps_are_completed_from_files_and_from_runs(complete, cells, tmp_path):
    assert complete("plan", "-f", "jobs/sweeps/d") == [DEMO]
    assert complete("run", "--file", "jobs/papers/nlcg/small/")
    assert complete("status", "--runs", str(tmp_path), "") == ["demo", "other"]
    assert complete("cancel", "--runs", str(tmp_path), "o") == ["other"]
    assert complete("report", "--runs", str(tmp_path / "nowhere"), "") == []


def test_cells_are_completed_by_id_and_by_sweep_and_id(complete, cells, tmp_path):
    runs = ("--runs", str(tmp_path))
    own = [f"demo/{cells[0].id}", f"demo/{cells[1].id}"]
    assert complete("logs", *runs, "") == [*own, f"other/{cells[2].id}"]
    assert complete("logs", *runs, "demo/sgd-p1-s1") == [f"demo/{cells[1].id}"]
    assert complete("logs", *runs, "sgd-p1-s1") == [cells[1].id]
    assert complete("status", *runs, "demo/") == own


def test_sites_papers_and_sizes_are_completed(complete):
    assert complete("run", "-f", DEMO, "--site", "slurm-t") == ["slurm-test", "slurm-test-mpi"]
    assert complete("plan", "-f", DEMO, "--site", "local_") == ["local_mpi"]
    assert complete("reproduce", "sc") == ["sc20"]
    assert complete("reproduce", "sc20", "--size", "f") == ["full"]


def test_completion_loads_nothing_slow(cells, tmp_path):
    runner = (
        "import atexit, sys\n"
        "heavy = ('torch', 'pandas', 'matplotlib', 'scipy', 'submitit')\n"
        "atexit.register(lambda: sys.stderr.write(str([name for name in heavy if name in sys.modules])))\n"
        "from harness.cli import main; main([])"
    )
    words = f"kronscale logs --runs {tmp_path} demo/sgd-p1-s1"
    environment = {"_KRONSCALE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    done = subprocess.run(
        [sys.executable, "-c", runner],
        env={**os.environ, **environment}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"demo/{cells[1].id}\n", "[]")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_installed_completion_works_in_bash(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path)}
    script = (
        f"{PROGRAM} --install-completion >/dev/null; source ~/.bash_completions/kronscale.sh\n"
        f"COMP_WORDS=(kronscale plan --site local_) COMP_CWORD=3; _kronscale_completion {PROGRAM}\n"
        'echo "${COMPREPLY[@]}"; cat ~/.bashrc'
    )
    done = subprocess.run(
        ["bash", "-c", script], env=environment, text=True, capture_output=True, check=False, timeout=60
    )
    assert done.stdout.split() == ["local_mpi", "source", f"'{tmp_path}/.bash_completions/kronscale.sh'"]
