"""Promise: every paper's figures can be run and drawn; a mistake in a list is one line before any run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from analysis.figures import FIGURES
from harness.cli import main
from harness.study.papers import FOLDER, PaperError, read_paper
from harness.study.sweep import read_sweep

PAPERS = sorted((path.parent.name, path.stem) for path in FOLDER.glob("*/*.yaml"))


def test_the_four_papers_exist():
    assert {name for name, _ in PAPERS} == {"sc20", "tpds22", "dp_kfac", "nlcg"}


@pytest.mark.parametrize(("name", "size"), PAPERS)
def test_every_figure_exists_and_every_sweep_can_be_planned(name, size):
    paper, files = read_paper(name, size)
    assert paper.paper == name
    assert {figure.figure for figure in paper.figures} <= set(FIGURES)
    assert {path.stem for path in (FOLDER / name / size).glob("*.yaml")} == set(files)
    sweeps = [read_sweep(path) for path in files.values()]
    assert len({sweep.name for sweep in sweeps}) == len(sweeps)
    assert all(sweep.name.startswith(f"{name}-{size}-") for sweep in sweeps)
    assert sum(len(sweep.cells) for sweep in sweeps) < 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"figures": [{"shows": "x", "figure": "scaling", "sweep": "nowhere"}]},
            "nowhere.yaml does not exist",
        ),
        ({"pictures": []}, "pictures is not a known key; allowed: paper, title"),
        ({"figures": [{"shows": "x", "figure": "scaling"}]}, "sweep"),
    ],
)
def test_a_mistake_names_file_and_field(tmp_path, change, message):
    folder = tmp_path / "some"
    (folder / "small").mkdir(parents=True)
    (folder / "small" / "time.yaml").write_text("sweep: x\n")
    content = {"paper": "some", "title": "t", "about": "a", "summary": "time", "figures": []}
    (folder / "small.yaml").write_text(yaml.safe_dump(content | change))
    with pytest.raises(PaperError, match=r"small\.yaml") as error:
        read_paper("some", "small", tmp_path)
    assert message in str(error.value)


def test_an_unknown_paper_or_size_names_the_known_ones(capsys):
    assert main(["reproduce", "sc21"]) == 2
    error = capsys.readouterr().err
    assert "sc20 --size small" in error
    assert "did you mean sc20" in error
    assert main(["reproduce", "sc20", "--size", "huge"]) == 2
    error = capsys.readouterr().err
    assert "sc20 has no size 'huge'; allowed: " in error
    assert "did you mean sc20" not in error


def test_without_runs_there_is_nothing_to_draw(tmp_path, capsys):
    assert main(["reproduce", "sc20", "--report-only", "--runs", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"no runs yet at {tmp_path}/" in error
    assert "leave --report-only out" in error
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize(("name", "size"), [("../papers/sc20", "small"), ("sc20", "../sc20/small")])
def test_names_of_papers_and_sizes_are_no_paths(name, size):
    with pytest.raises(PaperError, match=r"no such paper; available|has no size"):
        read_paper(name, size)
