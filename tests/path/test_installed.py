"""Promise: the built wheel is a tool by itself: it works in an empty folder outside any checkout."""

import csv
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from harness.launchers.site_profile import read_site
from harness.study.new_study import start_study
from harness.study.papers import read_paper
from harness.study.sweep import read_sweep

ROOT = Path(__file__).parents[2]
FEW = ("--where", "seed=0 and world_size=1 and method=mem_opt", "--set", "training.epochs=2")
"""One cell; doctor starts two ranks, and other tests run several cells."""

pytestmark = pytest.mark.ranks


def _call(*words, cwd=None, code=0, **environment):
    names = ("PYTHONPATH", "KRONSCALE_SITE", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    _call(*pip, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """`kronscale` in a new environment that has the wheel, and of this one only other packages."""
    fresh = tmp_path_factory.mktemp("fresh")
    _call(sys.executable, "-m", "venv", "--without-pip", fresh)
    python = fresh / "bin" / "python"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        "--quiet",
    )
    _call(*pip, "--no-deps", "--no-index", wheel)
    (packages,) = fresh.glob("lib/python*/site-packages")
    # A path added so comes last, and its own .pth files are not read: the checkout is not among the packages.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = _call(python, "-c", "import harness, analysis; print(harness.__file__)", cwd=fresh)
    assert where.startswith(str(packages))
    return fresh / "bin" / "kronscale"


def test_the_wheel_has_every_file_that_is_looked_up_and_no_results_of_this_checkout(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("harness/shipped_files/")}
    kinds = ("jobs/sites/*.yaml", "jobs/sweeps/*.yaml", "jobs/papers/**/*.yaml", "results/published/*.csv")
    expected = {path.relative_to(ROOT) for kind in kinds for path in ROOT.glob(kind)}
    assert {Path(name).relative_to("harness/shipped_files") for name in names} >= expected
    assert not any("runs" in Path(name).parts for name in names)


def test_the_quickstart_works_in_an_empty_folder(installed, tmp_path):
    study = tmp_path / "my-study"

    def kronscale(*words, code=0):
        return _call(
            installed,
            *words,
            cwd=study if study.exists() else tmp_path,
            code=code,
            KRONSCALE_LOCKS=str(tmp_path / "locks"),
        )

    assert "jobs/sweeps/first.yaml" in kronscale("init", "my-study")
    assert "ranks: all-reduce" in kronscale("doctor")
    assert "8 cells: 0 done" in kronscale("plan", "-f", "jobs/sweeps/first.yaml")
    assert "1 COMPLETED" in kronscale("run", "-f", "jobs/sweeps/first.yaml", *FEW)
    states = json.loads(kronscale("status", "first", "--json"))
    assert [one["state"] for one in states] == ["COMPLETED"]
    kronscale("report", "first", "--figure", "memory")
    folder = study / "results" / "runs" / "first" / "report"
    assert "mem_opt" in (folder / "report.html").read_text()
    drawn = sorted(path.name for path in (folder / "figures").glob("*.pdf"))
    assert drawn == ["memory.pdf"]


def test_shipped_sweeps_papers_sites_and_networks_are_found_from_anywhere(installed, tmp_path):
    demo = _call(installed, "plan", "-f", "jobs/sweeps/demo.yaml", "--site", "slurm-test", cwd=tmp_path)
    assert "42 cells" in demo
    assert "site slurm-test: every cell fits" in demo
    words = ("predict", "--model", "resnet50", "--world-size", "64")
    assert "At 64 ranks" in _call(installed, *words, cwd=tmp_path)
    code = "from analysis.published import published; print(len(published('headline')))"
    with (ROOT / "results" / "published" / "headline.csv").open() as file:
        rows = len(list(csv.DictReader(file)))
    assert _call(installed.with_name("python"), "-c", code, cwd=tmp_path) == f"{rows}\n"
    assert not list(tmp_path.iterdir())


def test_own_files_come_before_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_site("slurm-test").slurm.ranks_per_node == 2
    _, files = read_paper("sc20", "small")
    shipped = files["time"]
    own = tmp_path / "jobs" / "papers" / "sc20" / "small" / "time.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(shipped.read_text())
    (tmp_path / "jobs" / "sites").mkdir()
    (tmp_path / "jobs" / "sites" / "slurm-test.yaml").write_text(
        "launcher: slurm\nslurm: {ranks_per_node: 7}\n"
    )
    assert read_site("slurm-test").slurm.ranks_per_node == 7
    paths = read_paper("sc20", "small")[1]
    assert paths["time"].resolve() == own
    assert {path for key, path in paths.items() if key != "time"} == {
        files[key] for key in files if key != "time"
    }


def test_a_new_study_is_valid_and_overwrites_nothing(tmp_path, monkeypatch):
    start_study(tmp_path / "study")
    monkeypatch.chdir(tmp_path / "study")
    assert read_site("my-cluster").slurm.ranks_per_node == 4
    assert len(read_sweep(Path("jobs/sweeps/first.yaml")).cells) == 8
    (tmp_path / "study" / "README.md").unlink()
    with pytest.raises(ValueError, match=r"\.gitignore exists; give a new folder"):
        start_study(tmp_path / "study")
    assert not (tmp_path / "study" / "README.md").exists()
