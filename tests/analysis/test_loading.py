"""Promise: `analysis.load` takes folders, names and archives in any number, and says what it leaves out."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from analysis import load
from analysis.records.left_out_notes import EmptyStudyWarning, LeftOutWarning
from harness.cell import Cell
from harness.cli import main
from harness.errors import StoreError
from harness.runs.archive import write_archive
from harness.runs.store import SweepFolder
from harness.study.sweep import read_sweep
from tests.analysis.conftest import Plan, make_cell
from tests.analysis.hand_made import Run, write


def sweep(runs: Path, name: str, seeds: range, methods: tuple[str, ...] = ("sgd",)) -> Path:
    folder = SweepFolder(runs / name)
    for method in methods:
        for seed in seeds:
            made = make_cell(method, 1, seed, Plan(), {})
            cell = Cell.model_validate({**made.model_dump(), "sweep": name})
            write(folder.stage(cell).new_attempt(), cell, Run(method, 1, seed, 2, 1.0))
    return folder.path


def cells_of(*given: object, **options: object) -> list[tuple[str, int]]:
    cells = load(*given, **options).cells  # type: ignore[arg-type]
    return sorted(zip(cells["sweep"], cells["seed"], strict=True))


def test_folders_runs_folders_names_and_archives_are_one_study(tmp_path):
    runs, other = tmp_path / "results" / "runs", tmp_path / "other" / "runs"
    one, two = sweep(runs, "one", range(2)), sweep(runs, "two", range(1))
    more = sweep(other, "one", range(5, 6))
    (runs / "notes").mkdir()
    everything = [("one", 0), ("one", 1), ("two", 0)]
    assert cells_of(runs) == cells_of(tmp_path / "results") == cells_of([one, two]) == everything
    assert cells_of(one, two, str(one), runs) == everything  # each once
    assert cells_of("one", "two", root=runs) == everything
    assert cells_of(runs, more) == [("one", 0), ("one", 1), ("one", 5), ("two", 0)]
    archive = tmp_path / "one.tar.xz"
    write_archive(SweepFolder(more), list(SweepFolder(more).cell_folders()), archive)
    assert cells_of(one, [two, archive]) == [("one", 0), ("one", 1), ("one", 5), ("two", 0)]


def test_nothing_is_written_into_the_current_directory(tmp_path, monkeypatch):
    sweep(tmp_path / "runs", "one", range(1))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for given in ("runs", "runs/one"):
        load(given)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.chdir(tmp_path / "runs")
    load("one")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["one"]
    assert list((tmp_path / "derived" / "one").rglob("*.parquet"))  # beside the runs, as ever


def test_an_empty_study_comes_with_a_warning(tmp_path):
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    with pytest.warns(EmptyStudyWarning, match=r"no cell in .*empty: the study is empty"):
        assert load(tmp_path / "runs" / "empty").cells.empty
    folder = sweep(tmp_path / "runs", "one", range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(folder).cells) == 1


def test_cells_of_another_version_come_with_a_warning(tmp_path):
    folder = sweep(tmp_path / "runs", "one", range(2))
    first = min(folder.iterdir())
    first.rename(folder / "sgd-p1-s0-0123456789")
    with pytest.warns(LeftOutWarning, match=r"1 of 2 runs are left out, .*in this version its cell has"):
        assert len(load(folder).cells) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "nothing to load; give folders"),
        (("",), "an empty path to load; give folders"),
        (("missing",), "no run folder at missing nor at "),
        (("missing.tar.xz",), r"missing\.tar\.xz: no such archive"),
    ],
)
def test_what_cannot_be_loaded_is_refused(given, message, tmp_path):
    with pytest.raises(StoreError, match=message):
        load(*given, root=tmp_path)


def test_a_cells_folder_and_a_cell_in_two_folders_are_refused(tmp_path):
    folder = sweep(tmp_path / "runs", "one", range(1))
    cell = min(folder.iterdir())
    for path in (cell, cell / "attempt-1"):
        with pytest.raises(StoreError, match=rf"belongs to one cell; give the folder of its sweep, {folder}"):
            load(path)
    copy = sweep(tmp_path / "b" / "runs", "one", range(1))
    with pytest.raises(StoreError, match=r"cell one/\S+ is in .*/runs/.* and in .*/b/runs/.*leave one"):
        load(folder, copy)


FILE = """sweep: one
workload: digits
target: {metric: accuracy, at_least: 0.95}
training: {global_batch_size: 64, epochs: 12, window_steps: 10}
optimizer: {lr: 0.1}
methods: [{name: sgd}]
grid: {world_size: [1]}
repeats: 3
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(FILE)
    return path


@pytest.mark.slow
def test_report_and_status_mean_the_same_cells(tmp_path, file, capsys, no_images):
    """The file's cells are seeds 0, 1, 2; stored are seeds 0 and 1, and seed 0 of a comm_opt."""
    runs = tmp_path / "runs"
    folder = sweep(runs, "one", range(1), methods=("comm_opt",))
    for cell in read_sweep(file).cells[:2]:
        write(SweepFolder(folder).stage(cell).new_attempt(), cell, Run("sgd", 1, cell.seed, 2, 1.0))
    few = ("--figure", "memory")
    words = {
        "the name": ["one"],
        "the file": ["-f", str(file)],
        "a beginning": ["one/sgd"],
    }
    selected = {}
    for name, given in words.items():
        assert main(["status", *given, "--json", "--runs", str(runs)]) == 0
        listed = {row["id"] for row in json.loads(capsys.readouterr().out)}
        assert main(["report", *given, "--runs", str(runs), "--out", str(tmp_path / "out"), *few]) == 0
        page = (tmp_path / "out" / "report.html").read_text()
        shown = {path.name for path in folder.iterdir() if f"id={path.name}" in page}
        stored = {path.name for path in folder.iterdir()}
        assert shown == listed & stored
        selected[name] = "".join(part for part in page.splitlines() if "Selected cells only" in part)
        capsys.readouterr()
    assert [len(one) > 0 for one in selected.values()] == [False, True, True]
    assert "1 stored cell was not selected, 1 of 3 selected cells is not stored." in selected["the file"]


def test_a_report_of_cells_that_are_not_stored_is_refused(tmp_path, file, capsys):
    runs = tmp_path / "runs"
    sweep(runs, "one", range(1), methods=("comm_opt",))
    assert main(["report", "-f", str(file), "--runs", str(runs)]) == 2
    assert "none of the 3 selected cells is stored in" in capsys.readouterr().err
