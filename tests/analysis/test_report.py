"""Promise: one self-contained page has the findings, and links each number to its runs."""

from __future__ import annotations

import base64
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from analysis.comparisons import comparisons
from analysis.figures import FIGURES
from analysis.metrics import time_to_accuracy
from analysis.records.loading import load
from analysis.report.answers import headline, recommendation
from analysis.report.findings import cautions, findings
from analysis.report.larger_worlds import beyond
from analysis.report.markup import to_latex, to_markdown
from analysis.report.page import Panel, write_report
from analysis.report.tables import rules_table, summary_table
from analysis.results import results
from analysis.rules import SCORINGS
from harness.runs.store import Attempt
from tests.analysis.conftest import Plan


@pytest.fixture
def out(ordinary_report) -> Path:
    return ordinary_report.parent


@pytest.fixture
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


def test_the_summary_names_every_point_with_its_speed_up(study, odd_studies):
    table = summary_table(study).set_index(["arm", "world_size"])
    assert len(table) == 9
    assert ("comm_opt", "4*") in table.index
    assert table.loc[("sgd", "1"), "speedup"] == "base"
    assert (table.loc[("sgd", "4*"), "reached"], table.loc[("sgd", "4*"), "runs"]) == (2, 3)
    assert re.fullmatch(r"[\d.]+×", table.loc[("dp_kfac", "2"), "speedup"])  # three runs: no interval
    assert table.loc[("dp_kfac", "4*"), "speedup"] == "–"  # a miss is in half of the averages of three pairs
    rules = rules_table(study).set_index(["arm", "world_size"])
    assert set(rules.index) == set(table.index)
    one = rules.loc[("comm_opt", "1")]
    assert one["first"] == one["algoperf-style"]
    assert float(one["wall"]) > float(one["first"])
    missed = summary_table(odd_studies["nobody reaches the target"])
    assert set(missed["median_seconds"]) == {"not reached"}
    assert summary_table(odd_studies["no cells"]).empty


def test_findings_come_first_and_are_significant(study, page, write_study):
    warned = " ".join(cautions(study))
    study = load(write_study(Plan(seeds=tuple(range(6)), misses=())))
    said = findings(study)
    expected = [one for one in comparisons(study, time_to_accuracy(study)).values() if not one.oversubscribed]
    decided = [one for one in expected if one.verdict != "undecided"]
    assert decided
    assert len(said) == len(decided) + (len(decided) < len(expected))
    for one in decided:
        sentence = (
            rf"{one.arm} is {one.verdict} than sgd on {one.world_size} ranks?: [\d.]+× \[.*after Holm\)"
        )
        assert any(re.match(sentence, line) for line in said)
    assert not any(
        re.search(r"is (faster|slower) than sgd on 4", line) for line in said
    )  # more ranks than CPUs
    places = [page.index(f'id="{name}"') for name in ("findings", "fastest", "time_to_accuracy", "summary")]
    assert places == sorted(places)
    assert "1 of 27 runs missed" in warned
    assert "*" in warned


@pytest.mark.slow
def test_what_a_study_lacks_comes_first(odd_studies):
    assert "no first-order arm" in findings(odd_studies["no SGD arm"])[0]
    assert findings(odd_studies["no cells"]) == ["No run has trained yet."]
    few = odd_studies["no SGD arm"]
    few = replace(
        few,
        cells=few.cells.assign(stop_reason="target"),
        evaluations=few.evaluations.groupby("run", observed=True).head(1),
        scoring=SCORINGS["sustained"],
    )
    (said,) = findings(few)
    assert re.match(r"The rule \(first of 3 in a row.*\) cannot score any of \d+ runs: they ended", said)
    assert "2 FAILED" not in " ".join(cautions(odd_studies["two runs and one that failed"]))
    assert "1 FAILED" in " ".join(cautions(odd_studies["two runs and one that failed"]))
    assert "some seeds are missing" in " ".join(cautions(odd_studies["two runs and one that failed"]))


def test_the_page_comes_as_markdown_and_latex_too_with_special_characters_escaped(out, page):
    text, tex = (out / "report.md").read_text(), (out / "tables.tex").read_text()
    assert all(f"](figures/{name.name})" in text for name in (out / "figures").glob("*.png"))
    assert "## Every metric" in text  # also of those that the target does not name
    assert '<section id="metrics">' in page
    assert tex.count("\\begin{tabular}") == 4
    assert "comm\\_opt" in tex
    assert not re.search(r"(?<!\\)[%_#](?!\})", tex.replace("tab:", ""))
    table = pd.DataFrame({"a|b": ["50 % & x_1 {y} \\ 2×"]})
    assert "a\\|b" in to_markdown(table)
    assert r"50 \% \& x\_1 \{y\} \textbackslash{} 2$\times$" in to_latex(table, "c", "l")


def test_the_page_holds_its_figures_and_loads_nothing_else(out, page):
    links = _Links()
    links.feed(page)
    names = [path.stem for path in (out / "figures").glob("*.png")]
    assert len(links.sources) == len(names) > 10
    assert all(source.startswith("data:image/png;base64,") for source in links.sources)
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("pdf", "png", "csv")
    }
    for name in set(FIGURES) - set(names):
        assert f"<li>{FIGURES[name].title}: no " in page
    kept = [link for link in links.links if link.startswith("data:text/csv;base64,")]
    files = {path.read_bytes() for path in (out / "figures").glob("*.csv")}
    assert {base64.b64decode(link.partition(",")[2]) for link in kept} == files


def test_every_link_of_the_page_leads_somewhere_and_every_run_is_listed_with_its_command(study, page):
    links = _Links()
    links.feed(page)
    assert len(links.ids) == len(set(links.ids))
    inside = [link for link in links.links if not link.startswith("data:")]
    assert {link.removeprefix("#") for link in inside} <= set(links.ids)
    assert sum(link.startswith("#runs-") for link in links.links) == 9
    for cell, path in zip(study.cells["cell"], study.cells["path"], strict=True):
        assert path in page
        assert f"--where &#34;id={cell}&#34;" in page


@pytest.mark.slow
def test_a_study_of_many_settings_is_summed_up_and_other_studies_are_listed(write_study, tmp_path, no_images):
    widths = tuple({"workload.options": {"width": width}} for width in range(4, 18, 2))
    plan = Plan(methods=("sgd", "comm_opt"), world_sizes=(2,), seeds=(0,), misses=(), patches=widths)
    study = load(write_study(plan), cache=False)
    shown = results(study)
    assert headline(shown.places).startswith("Of 7 settings and world sizes, fastest were ")
    assert "1 more settings: see the table of times." in recommendation(shown)
    assert beyond(study, shown.places) == []
    panels = [Panel("factor_sizes"), Panel("break_even")]
    few = study.only(study.cells["arm"].isin(["sgd width=4", "comm_opt width=4"]))
    page = write_report(few, tmp_path, panels, also=[study]).read_text()
    assert "comm_opt width=4" in page
    drawn = FIGURES["factor_sizes"].draw(study).numbers
    assert len(drawn)


def test_text_from_users_is_escaped(ordinary_folder, tmp_path):
    folder = tmp_path / "runs" / "one"
    cell = min(ordinary_folder.iterdir())
    shutil.copytree(cell, folder / cell.name)
    path = folder / cell.name / "attempt-1" / "outcome.json"
    outcome = Attempt(path.parent).outcome()
    path.write_text(replace(outcome, cause="<script>alert(1)</script>").to_json())
    page = write_report(folder, tmp_path / "out", panels=()).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_a_report_of_nothing_is_still_a_page(tmp_path):
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    page = write_report(tmp_path / "runs" / "empty", tmp_path / "out").read_text()
    assert page.count(": no ") == len(FIGURES)
    assert "No run has trained yet." in page
    assert load(tmp_path / "runs" / "empty").cells.empty
