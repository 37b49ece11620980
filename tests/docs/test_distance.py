"""Promise: the table of distances has every figure, takes its numbers from files, and judges by intervals."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
import yaml

from analysis.statistics.intervals import Interval
from docs.generator import distance_pages
from docs.generator.distance_pages import DistanceError, distance_reference, measured, rows, sections, verdict
from harness.study.papers import FOLDER, read_paper

SMALLER = {"small", "embedded", "scenes", "medium"}
"""Sizes that are not the papers' own; all others must be in the table."""


def test_every_figure_of_every_paper_has_one_row_in_the_papers_order():
    own = {(path.parent.name, path.stem) for path in FOLDER.glob("*/*.yaml")} - {
        (path.parent.name, size) for path in FOLDER.glob("*/*.yaml") for size in SMALLER
    }
    assert set(sections()) == own
    for paper, size in sections():
        shown = [figure.shows for figure in read_paper(paper, size)[0].figures]
        assert [row.shows for row in rows(paper, size)] == shown


def test_our_ratio_is_the_one_of_the_committed_report_and_the_papers_are_those_of_the_csv_files():
    """The report of the same runs, from another code path: K-FAC-opt of width 48 against SGD."""
    told = next(row for row in rows("sc20", "full") if row.shows == "Time to solution by world size")
    report = Path("results/figures/sc20-small/report.md").read_text(encoding="utf-8")
    for ranks in ("1", "2"):
        row = next(
            line for line in report.splitlines() if line.startswith(f"| kfac-opt width=48 | {ranks} |")
        )
        estimate = row.split("|")[6].split("×")[0].strip()
        assert f"{ranks} rank{'s' * (ranks == '2')}: {estimate} [" in told.ours
    assert told.verdict == "does not hold"
    page = distance_reference()
    assert "eigen 92.92, inverse 91.71 (recalled)" in page  # SC20, 8 GPUs
    assert "18 to 25 percent less time (abstract)" in page


@pytest.mark.parametrize(
    ("low", "high", "said"), [(1.01, 2.0, "holds"), (0.5, 0.99, "does not hold"), (0.9, 1.1, "not decided")]
)
def test_an_interval_decides(low, high, said):
    assert verdict(Interval(1.0 if low is None else math.sqrt(low * high), low, high, 6, "")) == said


@pytest.fixture
def told(tmp_path, monkeypatch):
    """`distance.yaml` of one's own, and a committed CSV beside it."""
    pd.DataFrame(
        {
            "run": list("aabbccddeeffgghh"),
            "arm": ["x"] * 8 + ["y"] * 8,
            "seconds": [1.0, 2] * 4 + [1.0, 5] * 4,
        }
    ).to_csv(tmp_path / "runs.csv")
    ours = {"reads": "r", "file": "runs.csv", "value": "seconds", "of": {"arm": "y"}, "over": {"arm": "x"}}
    monkeypatch.setattr(distance_pages, "FILE", tmp_path / "distance.yaml")

    def write(change: dict[str, object], shows: str = "Memory") -> dict[str, object]:
        monkeypatch.setattr(distance_pages, "ROOT", tmp_path)
        figures = {figure.shows: {} for figure in read_paper("dp_kfac", "full")[0].figures}
        figures |= {shows: {"conclusion": "c", "ours": [ours | change]}}
        (tmp_path / "distance.yaml").write_text(yaml.safe_dump({"dp_kfac": {"full": figures}}))
        (tmp_path / "jobs").unlink(missing_ok=True)
        (tmp_path / "jobs").symlink_to(FOLDER.resolve().parent)
        return ours | change

    return write


def test_a_runs_rows_are_added_up_and_arms_are_compared_by_run(told):
    assert measured(told({}), "here").estimate == pytest.approx(2.0)  # 6 s a run over 3
    (row,) = (row for row in rows("dp_kfac", "full") if row.shows == "Memory")
    assert row.verdict == "holds"
    assert {row.verdict for row in rows("dp_kfac", "full") if row.shows != "Memory"} == {"nothing to hold"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "gone.csv"}, "gone.csv does not exist"),
        ({"value": "hours"}, "no column 'hours', the file has"),
        ({"of": {"arm": "z"}}, "no row with {'arm': 'z'}"),
    ],
)
def test_a_number_that_does_not_exist_stops_the_build(told, change, message):
    told(change)
    with pytest.raises(DistanceError, match=r"distance\.yaml: dp_kfac full, Memory") as error:
        list(rows("dp_kfac", "full"))
    assert message in str(error.value)
    told({}, "Moon phases")
    with pytest.raises(DistanceError, match=r"has \['Moon phases'\], which is no figure of it"):
        list(rows("dp_kfac", "full"))
