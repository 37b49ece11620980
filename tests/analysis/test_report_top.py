"""Promise: the top of the report says in plain words what was fastest, how sure that is, and what to use.

The studies have known answers: sgd needs 10 epochs of 1 s on one rank, comm_opt 5 that each take `factor` s.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from analysis.figures import FIGURES
from analysis.figures.drawing import Drawing
from analysis.records.study import Study
from analysis.report.alt_texts import alt_text
from analysis.report.answers import answers, duration, headline, recommendation, unmeasured
from analysis.report.bars import chart
from analysis.report.glossary import WORDS, Explained, anchor
from analysis.report.page import Panel, write_report
from analysis.report.study_facts import about, arms
from analysis.report.tables import shortlist
from analysis.results import results
from tests.analysis.hand_made import Run, hand_made

ROOT = Path(__file__).parents[2]


def known(
    folder: Path, factor: float = 2.6, seeds: int = 2, sizes: tuple[int, ...] = (2, 4), **options: object
) -> Study:
    """Both methods on every world size, in blocks of one seed whose order alternates."""
    missing = str(options.pop("misses", "")).split()
    others = options.pop("others", [])
    runs = [
        Run(
            method, size, seed, 10 if method == "sgd" else 5, cost / size, allocation=f"b{seed}",
            misses=method in missing, started=1000.0 * (seed + 1) + place * (-1) ** seed,
            oversubscribed=size in options.get("oversubscribed", ()),  # type: ignore[operator]
        )
        for place, (method, cost) in enumerate([("sgd", 1.0), ("comm_opt", factor)])
        for size in sizes
        for seed in range(seeds)
    ]  # fmt: skip
    return hand_made(folder, [*runs, *others])  # type: ignore[misc]


def test_few_runs_are_no_claim(tmp_path):
    shown = results(known(tmp_path))
    places = shown.places
    assert headline(places) == "sgd was fastest on 2 and 4 ranks. Two runs of each arm: no claim."
    assert answers(places)[1] == (
        "4 ranks: sgd took 2.5 s to the target, comm_opt 1.3 times as long; comm_opt needs 2 times fewer "
        "epochs than sgd, but each takes 2.6 times as long. No claim: two runs of each arm; a verdict "
        "needs at least 5."
    )
    (use,) = recommendation(shown)
    assert use.startswith("Use sgd on 4 ranks, 2.5 s to the target; it needs no K-FAC")
    assert unmeasured(places).startswith(
        "Nothing beyond 4 ranks was measured. For other world sizes, `kronscale predict --from"
    )


def test_a_significant_difference_is_a_recommendation(tmp_path):
    shown = results(known(tmp_path, factor=1.2, seeds=8))
    places = shown.places
    sure = "All these differences from sgd are significant."
    assert headline(places) == f"comm_opt was fastest on 2 and 4 ranks. {sure}"
    assert re.search(
        r"sgd 1\.67 times as long;.*Significant \(p = 0\.0\d+ after Holm\)\.$", answers(places)[0]
    )
    said = "Use comm_opt on 4 ranks, 1.5 s to the target; it was significantly faster than sgd there."
    assert recommendation(shown) == [said]
    third = [
        Run("mem_opt", 2, seed, 6, 0.6, allocation=f"b{seed}", started=1000.0 * (seed + 1) + 2)
        for seed in range(8)
    ]
    three = results(known(tmp_path / "three", factor=1.2, seeds=8, sizes=(2,), others=third))
    assert answers(three.places)[0].endswith(
        " Next is mem_opt, 3.6 s; whether these two differ is not tested."
    )


def test_seconds_are_not_judged_without_a_cpu_for_each_rank(tmp_path):
    shown = results(known(tmp_path, oversubscribed=(4,)))
    places = shown.places
    assert headline(places).startswith("sgd was fastest on 2 ranks.")
    assert answers(places)[1] == (
        "4 ranks: more ranks than CPUs, so seconds are not judged; fewest epochs: comm_opt with 5 (sgd: 10)."
    )
    assert unmeasured(places).startswith("Nothing beyond 2 ranks is judged: on up to 4 there were more")
    assert {point.world_size for point in shortlist(places)} == {2}


def test_an_arm_that_missed_is_not_fastest_and_no_time_is_made_up(tmp_path):
    places = results(known(tmp_path, misses="comm_opt", sizes=(2,))).places
    assert "the median run of comm_opt did not reach it" in answers(places)[0]
    assert [point.arm for point in shortlist(places)] == ["sgd"]
    assert chart(places).based
    both = chart(places)
    assert [duration(seconds) for seconds in (1.5, 119.0, 120.0, 9000.0, float("inf"))] == [
        "1.5 s", "119 s", "2 min", "2.5 h", "not reached",
    ]  # fmt: skip
    assert "comm_opt not reached, 2 of 2 missed" in both.text
    assert [bar.percent == "0" for _, bars in both.groups for bar in bars] == [False, True]
    nobody = results(known(tmp_path / "none", misses="sgd", sizes=(2,))).places
    assert headline(nobody).startswith("comm_opt was fastest")
    assert [point.arm for point in shortlist(nobody)] == ["comm_opt", "sgd"]  # with the arm that it beat
    assert not chart(nobody).based
    ((_, (fast, stopped)),) = chart(nobody).groups
    assert (fast.open, stopped.open) == ("", min(place for place, _ in stopped.dots))


@pytest.mark.slow
def test_where_nobody_reached_the_target_the_page_says_what_to_change(tmp_path):
    study = known(tmp_path / "all", misses="sgd comm_opt", sizes=(2,))
    shown = results(study)
    places = shown.places
    assert headline(places) == ("No arm is called the fastest: no arm's median run reached the target.")
    assert recommendation(shown) == [
        "These runs recommend no arm, for no world size: train for more epochs, or choose a target that the "
        "learning curves come to."
    ]
    page = write_report(study, tmp_path / "report", []).read_text()
    assert "<h3>Fastest</h3>" not in page  # a table without a row
    crowded = results(known(tmp_path / "crowded", sizes=(4,), oversubscribed=(4,)))
    assert recommendation(crowded)[0].endswith("run them where each rank has a CPU.")


def test_the_table_has_five_rows_by_time_with_the_first_order_arm(tmp_path):
    fast = shortlist(results(known(tmp_path, factor=0.4, sizes=(1, 2, 4, 8))).places)
    names = [(row.arm, row.world_size) for row in fast]
    assert names == [("comm_opt", 8), ("comm_opt", 4), ("comm_opt", 2), ("sgd", 8), ("comm_opt", 1)]
    far = shortlist(results(known(tmp_path / "far", factor=0.01, sizes=(1, 2, 4, 8, 16))).places)
    assert [row.arm for row in far] == ["comm_opt"] * 4 + ["sgd"]
    assert [row.world_size for row in far] == [16, 8, 4, 2, 16]
    ((_, bars),) = chart(results(known(tmp_path / "two", sizes=(2,))).places).groups
    lengths = {bar.arm: float(bar.percent) for bar in bars}  # as long as the times
    assert lengths["comm_opt"] / lengths["sgd"] == pytest.approx(1.3, rel=1e-3)
    assert max(lengths.values()) <= 100


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None], bool]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), "details" in self.open))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass


@pytest.fixture(scope="module")
def page(ordinary_report) -> _Page:
    parser = _Page()
    parser.feed(ordinary_report.read_text(encoding="utf-8"))
    return parser


def test_dense_tables_are_folded_and_every_value_has_its_heading_and_unit(page, ordinary_report):
    tables = [folded for tag, _, folded in page.tags if tag == "table"]
    assert tables[0] is False  # the five rows
    assert len(tables) > 5
    assert all(tables[1:])
    cells = [given for tag, given, _ in page.tags if tag == "td"]
    assert all(given.get("data-label") for given in cells)  # a phone shows them beside the values
    text = ordinary_report.read_text(encoding="utf-8")
    costs = text[text.index('id="costs"') : text.index('id="instrument"')]
    headings = re.findall(r'<button type="button">([^<]+)</button>', costs)
    assert len(headings) > 10
    assert all(re.search(r"\((ms|kB|MB)\)$", name) for name in headings[2:])


def test_pictures_say_what_they_show(page):
    alts = [given["alt"] or "" for tag, given, _ in page.tags if tag == "img"]
    assert len(alts) > 10
    titles = {kind.title for kind in FIGURES.values()}
    assert not titles & set(alts)
    assert all(len(alt) > 40 for alt in alts)
    (label,) = (given["aria-label"] for tag, given, _ in page.tags if given.get("role") == "img")
    assert re.search(r"2 ranks: sgd [\d.]+ s, dp_kfac [\d.]+ s", label or "")


def test_an_alternative_text_gives_the_medians_of_runs_only(study):
    drawing = FIGURES["time_to_accuracy"].draw(study)
    said = alt_text("Time", drawing)
    median = drawing.numbers.query("arm == 'sgd' and world_size == 2")["seconds"].median()
    assert f"sgd on 2 ranks: {median:.4g}" in said
    assert "time to target (s) over ranks" in said
    doubled = Drawing(drawing.figure, drawing.numbers.loc[[0, *drawing.numbers.index]], "")
    assert "Medians" not in alt_text("Time", doubled)


def test_words_are_explained_once_and_lead_to_an_entry(page):
    ids = {given["id"] for _, given, _ in page.tags if "id" in given}
    assert {anchor(name) for name in WORDS} <= ids
    explained = Explained()
    first = explained("Holm & closure; see `kronscale predict`")
    assert first.count("<abbr title=") == 2
    assert 'href="#word-holm"' in first
    assert "&amp;" in first
    assert "<code>kronscale predict</code>" in first
    assert "<abbr" not in explained("Holm again")
    assert explained("<b>") == "&lt;b&gt;"


def test_the_pages_that_say_more_exist_and_terms_has_the_words():
    terms = (ROOT / "docs" / "terms.md").read_text(encoding="utf-8")
    for name, word in WORDS.items():
        file, _, heading = word.page.partition(", ")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^#+ {heading}", text, re.MULTILINE), word.page
        assert name.lower() in terms.lower(), name


@pytest.mark.slow  # two reports
def test_a_report_is_the_same_bytes_again_and_says_what_it_was_told(tmp_path, no_images):
    study = known(tmp_path)
    first, again = (
        write_report(study, tmp_path / name, [Panel("time_to_accuracy")], notes=["Selected cells only: 1."])
        for name in ("a", "b")
    )
    assert first.read_bytes() == again.read_bytes()
    warnings = first.read_text(encoding="utf-8").partition('id="warnings"')[2].partition("</section>")[0]
    assert "Selected cells only: 1." in warnings


def test_the_top_says_what_the_cells_train_with(tmp_path):
    study = known(tmp_path)
    assert about(study).startswith("8 of 8 runs completed; ")
    assert re.search(r"; batch \d+, at most \d+ epochs, float32$", about(study))
    larger = study.fields["training.global_batch_size"].iloc[0] * 4
    study.fields.loc[study.fields.index[0], "training.global_batch_size"] = larger
    assert re.search(rf"; batch \d+ to {larger:g}, at most", about(study))
    assert dict(arms(study))["sgd"] == "optimizer sgd at learning rate 0.1, without K-FAC"
    cell = study.cells["cell"].iloc[0]
    assert study.of_cells([cell, "not-stored"]).cells["cell"].tolist() == [cell]
    with pytest.raises(ValueError, match=r"none of the 1 ids is of a cell, such as c.*: got .*/attempt-1"):
        study.of_cells([study.cells["run"].iloc[0]])
    assert study.of_cells([]).cells.empty


@pytest.mark.slow
def test_a_drawing_saves_itself_with_its_numbers(tmp_path):
    drawing = FIGURES["time_to_accuracy"].draw(known(tmp_path))
    drawing.save(tmp_path / "own.pdf")
    assert b"/FontFile2" in (tmp_path / "own.pdf").read_bytes()  # TrueType
    assert len(pd.read_csv(tmp_path / "own.csv")) == len(drawing.numbers)
    before = drawing.figure.axes[0].get_position().height
    drawing.figure.set_size_inches(7.16, 6)
    drawing.save(tmp_path / "own.png")
    assert drawing.figure.axes[0].get_position().height > before  # laid out for the new size
    with pytest.raises(ValueError, match=r"own\.svg must end in \.pdf or \.png"):
        drawing.save(tmp_path / "own.svg")
