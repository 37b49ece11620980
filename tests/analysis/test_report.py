"""Promise: one page says what came out, needs nothing but itself, and leads from each number to its runs."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from analysis.figures import FIGURES
from analysis.report import summary_table, write_report
from analysis.tables import load


@pytest.fixture(scope="module")
def out(ordinary_folder, tmp_path_factory):
    return write_report(ordinary_folder, tmp_path_factory.mktemp("report")).parent


@pytest.fixture(scope="module")
def page(out) -> str:
    return (out / "report.html").read_text(encoding="utf-8")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links, self.ids, self.sources = [], [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if "href" in given else []
        self.sources += [given["src"]] if "src" in given else []


def test_the_summary_names_every_point_with_its_speed_up(study):
    table = summary_table(study).set_index(["arm", "world_size"])
    assert len(table) == 9
    assert table.loc[("sgd", "1"), "speedup"] == "base"
    assert (table.loc[("sgd", "4*"), "reached"], table.loc[("sgd", "4*"), "runs"]) == (2, 3)
    assert re.fullmatch(r"[\d.]+× \[[\d.]+, [\d.]+\]", table.loc[("dp_kfac", "2"), "speedup"])
    assert re.fullmatch(r"[\d.]+×", table.loc[("dp_kfac", "4*"), "speedup"])


def test_a_study_where_most_runs_miss_says_so(odd_studies):
    table = summary_table(odd_studies["nobody reaches the target"])
    assert set(table["median_seconds"]) == {"not reached"}
    assert summary_table(odd_studies["no cells"]).empty


def test_the_page_holds_its_figures_and_asks_for_nothing_else(out, page):
    links = _Links()
    links.feed(page)
    assert len(links.sources) == len(FIGURES)
    assert all(source.startswith("data:image/png;base64,") for source in links.sources)
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"{name}.{kind}" for name in FIGURES for kind in ("pdf", "png", "csv")
    }


def test_every_link_of_the_page_leads_somewhere(page):
    links = _Links()
    links.feed(page)
    assert len(links.ids) == len(set(links.ids))
    assert {link.removeprefix("#") for link in links.links} <= set(links.ids)
    assert sum(link.startswith("#runs-") for link in links.links) == 9


def test_every_run_is_listed_with_its_folder_and_its_command(study, page):
    for cell, path in zip(study.cells["cell"], study.cells["path"], strict=True):
        assert path in page
        assert f"--where &#34;id={cell}&#34;" in page


def test_text_from_users_is_escaped(ordinary_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.report.FIGURES", {})  # text is what this is about, and drawing is slow
    folder = tmp_path / "runs" / "one"
    cell = min(ordinary_folder.iterdir())
    shutil.copytree(cell, folder / cell.name)
    path = folder / cell.name / "attempt-1" / "outcome.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cause": "<script>alert(1)</script>"}))
    page = write_report(folder, tmp_path / "out").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_a_report_of_nothing_is_still_a_page(tmp_path):
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    page = write_report(tmp_path / "runs" / "empty", tmp_path / "out").read_text()
    assert page.count("Nothing to draw: no ") == len(FIGURES)
    assert load(tmp_path / "runs" / "empty").cells.empty
