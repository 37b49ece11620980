"""Promise: what a figure draws, not only its CSV, has the known values, units and directions.

A legend fits into its figure, has what is drawn and no more, and its looks can be told apart.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D

from analysis.figures import FIGURES
from analysis.figures.captions import whiskers
from analysis.figures.drawing import ONE_COLUMN, TWO_COLUMNS, counts, legend_below, panels, styles
from analysis.figures.pareto import _front
from analysis.placements import inverse_loads
from analysis.statistics.intervals import level, ratio
from analysis.steps import kfac_bytes
from tests.analysis.hand_made import Run, hand_made

WEAK = {"training.global_batch_size": None, "training.local_batch_size": 64}


@pytest.mark.parametrize(
    ("patch", "seconds", "ideal_ms"), [({}, 2.5, [200.0, 100.0]), (WEAK, 5.0, [200.0, 200.0])]
)
def test_scaling_is_drawn_in_percent_beside_the_ideal(patch, seconds, ideal_ms, tmp_path):
    """An epoch of 20 steps takes 4 s on one rank; on two it is 1.6 times as fast: 80 % of the ideal."""
    runs = [
        Run("sgd", size, seed, 2, one, patch=patch)
        for size, one in ((1, 4.0), (2, seconds))
        for seed in range(2)
    ]
    drawing = FIGURES["scaling"].draw(hand_made(tmp_path, runs))
    time, speedup, efficiency = drawing.figure.axes
    ideals = [list(line.get_ydata()) for line in (*time.lines, *speedup.lines) if line.get_linestyle() == ":"]
    assert ideals == [pytest.approx(ideal_ms), [1.0, 2.0]]
    assert [y for _, y in sorted(marks(efficiency))] == pytest.approx([100.0, 80.0])


def test_strategies_lie_at_their_fractions_and_medians_in_the_axis_unit(fitting):
    drawing = FIGURES["fraction"].draw(fitting("fraction"))
    fractions = drawing.numbers.groupby("arm")["fraction"].unique()
    assert {arm.split()[0]: list(found) for arm, found in fractions.items()} == {
        "comm_opt": [1.0], "half": [0.5], "mem_opt": [0.25],
    }  # fmt: skip
    for axis, column, factor in zip(
        drawing.figure.axes, ("seconds_per_step", "kfac_bytes"), (1e3, 1e-6), strict=True
    ):
        bars = [line for line in axis.lines if len(line.get_xdata()) == 2 and len(set(line.get_ydata())) == 1]
        medians = factor * drawing.numbers.groupby("fraction")[column].median()
        assert sorted({float(line.get_ydata()[0]) for line in bars}) == pytest.approx(sorted(set(medians)))


def test_counts_fronts_and_loads_are_worked_by_hand(study):
    frame = pd.DataFrame({"arm": list("aaabb"), "world_size": 1, "run": list("12345")})
    assert counts(frame) == "n = 2 to 3 runs per point"
    assert _front([(3.0, 4.0), (1.0, 5.0), (4.0, 1.0), (2.0, 3.0)]) == [(1.0, 5.0), (2.0, 3.0), (4.0, 1.0)]
    assert set(inverse_loads(study)["total_load"]) == {145.0**3 + 32**3 + 129**3 + 10**3}


def test_the_state_is_that_of_the_window_and_rank_with_most(study):
    windows = study.windows.copy()
    once = (windows["rank"] == 1) & (windows["first_step"] == 50)
    windows.loc[once, "memory_bytes.kfac_factors"] += 1_000_000
    sizes = kfac_bytes(replace(study, windows=windows)).merge(
        study.cells[["run", "arm", "world_size"]], on="run"
    )
    assert set(sizes.query("arm == 'comm_opt' and world_size > 1")["kfac_bytes"]) == {8_500_000}
    assert set(sizes.query("arm == 'comm_opt' and world_size == 1")["kfac_bytes"]) == {7_500_000}


def marks(axis) -> set[tuple[float, float]]:
    """Where an axis has markers."""
    lines = [line for line in axis.lines if line.get_marker() not in ("None", "")]
    return {(round(float(x), 6), round(float(y), 6)) for line in lines for x, y in line.get_xydata()}


def test_an_arm_lies_above_the_break_even_line_if_it_saves_more_epochs_than_its_epochs_cost(tmp_path):
    """Both need half of four epochs of 1 s; their epochs cost 1.5 and 2.5 times as much. A panel a size."""
    runs = [
        Run(method, size, seed, epochs, seconds, oversubscribed=size == 2)
        for method, epochs, seconds in (("sgd", 4, 1.0), ("comm_opt", 2, 1.5), ("mem_opt", 2, 2.5))
        for size in (1, 2)
        for seed in range(4)
    ]
    runs += [Run("dp_kfac", 1, seed, 2, 1.0, misses=True) for seed in range(4)]  # it has no point
    study = hand_made(tmp_path, runs)
    drawing = FIGURES["break_even"].draw(study)
    assert [axis.get_title() for axis in drawing.figure.axes] == ["1 rank", "2* ranks"]
    assert [marks(axis) for axis in drawing.figure.axes] == [{(1.5, 2.0), (2.5, 2.0)}] * 2
    assert len({(axis.get_xlim(), axis.get_ylim()) for axis in drawing.figure.axes}) == 1
    ratios = drawing.numbers.groupby("method")["speedup"].first()
    assert dict(ratios) == {"comm_opt": pytest.approx(2 / 1.5), "mem_opt": pytest.approx(2 / 2.5)}


def hollow(axis) -> list[tuple[float, float]]:
    """Where an axis has hollow markers."""
    lines = [line for line in axis.lines if line.get_marker() not in ("None", "")]
    white = [line for line in lines if line.get_markerfacecolor() == "white"]
    return sorted((float(x), float(y)) for line in white for x, y in line.get_xydata())


def half_missed() -> list[Run]:
    """All four runs of sgd missed after 6 epochs of 1 s; one of comm_opt's, which take 2 s an epoch."""
    sgd = [Run("sgd", 1, seed, 6, 1.0, misses=True) for seed in range(4)]
    return [*sgd, *(Run("comm_opt", 1, seed, 5, 2.0, misses=seed == 3) for seed in range(4))]


def test_misses_have_a_whole_arrow_with_their_number_and_a_measured_time_per_epoch(tmp_path):
    drawing = FIGURES["time_to_accuracy"].draw(hand_made(tmp_path, half_missed()))
    FigureCanvasAgg(drawing.figure).draw()
    seconds, epochs, per_epoch = drawing.figure.axes
    for axis in (seconds, epochs):
        assert sorted(text.get_text() for text in axis.texts if text.get_text()) == ["1", "4"]
        assert all(text.get_window_extent().y1 <= axis.bbox.y1 for text in axis.texts)
    assert [y for _, y in hollow(epochs)] == [6.0] * 4 + [5.0]
    assert hollow(per_epoch) == []
    assert not per_epoch.texts
    assert {y for _, y in marks(per_epoch)} == {1.0, 2.0}
    assert "Hollow: 5 of 8 runs missed" in drawing.caption


def test_a_miss_is_on_the_upper_edge_of_time_against_memory(tmp_path):
    drawing = FIGURES["pareto"].draw(hand_made(tmp_path, half_missed()))
    assert hollow(drawing.figure.axes[0]) == [(100.0, 1.0)] * 5  # in fractions of the axis' height
    assert list(drawing.numbers["time"]) == [math.inf] * 4 + [10.0] * 3 + [math.inf]
    assert "5 of 8 runs missed the target: hollow, at the upper edge." in drawing.caption
    assert "half of the runs or more missed: sgd on 1 rank." in drawing.caption


@pytest.mark.parametrize("name", ["learning_curves", "loss_curves"])
def test_a_curve_ends_in_a_hollow_marker_if_its_run_missed(name, tmp_path):
    drawing = FIGURES[name].draw(hand_made(tmp_path, half_missed()))
    _, time = drawing.figure.axes
    assert [x for x, _ in hollow(time)] == [6.0] * 4 + [10.0]
    assert "Hollow: 5 of 8 runs, which missed the target." in drawing.caption
    assert drawing.numbers.groupby("run")["reached"].first().sum() == 3


@pytest.mark.parametrize("name", ["learning_curves", "other_metrics", "published_breakdown"])
def test_a_world_size_with_fewer_cpus_than_ranks_is_not_the_example(study, name):
    """The ordinary study has 1, 2 and 4 ranks on two CPUs."""
    drawing = FIGURES[name].draw(study)
    assert set(drawing.numbers["world_size"]) == {2}
    assert "4*" in drawing.caption or "2 ranks, the largest world size" in drawing.caption
    alone = study.only(study.cells["world_size"] == 4)
    assert "4* ranks, the largest world size" in FIGURES[name].draw(alone).caption


def test_a_row_without_a_ratio_is_text_that_names_who_missed(tmp_path):
    runs = half_missed()
    runs += [Run("sgd", 2, seed, 4, 1.0) for seed in range(4)]
    runs += [Run("comm_opt", 2, seed, 4, 0.5) for seed in range(4)]
    drawing = FIGURES["claims"].draw(hand_made(tmp_path, runs))
    panel, below = drawing.figure.axes
    assert [text.get_text() for text in below.texts] == [
        "comm_opt, 1 rank: no ratio, sgd missed in 4 of 4 runs"
    ]
    assert not below.axison
    rows = [label.get_text() for label in panel.get_yticklabels()]
    assert rows[0] == "comm_opt, 2 ranks"
    assert not any("1 rank" in row for row in rows)
    assert panel.get_xlabel() == "time saved against the first-order arm (%)"
    saved = drawing.numbers.groupby("world_size")["percent_saved"].first()
    assert dict(saved) == {1: pytest.approx(math.nan, nan_ok=True), 2: pytest.approx(50.0)}


def test_captions_say_of_what_has_no_whisker_that_it_has_none():
    few, enough = level([1.0, 2.0]), level([1.0, 2.0, 3.0, 4.0, 5.0])
    assert whiskers([few]) == "No intervals: too few runs (n = 2); every run is drawn."
    assert whiskers([enough, few]).startswith("Whiskers: 95 % the wider of the range of five runs")
    assert whiskers([enough, few]).endswith(" No whiskers where n = 2: too few runs; every run is drawn.")
    assert whiskers([few], "the time per step").startswith("No intervals of the time per step: ")
    assert whiskers([ratio([1.0, 2.0], [3.0, 4.0])]) == "No intervals: too few runs (n = 2)."
    assert whiskers([ratio([math.inf] * 4, [1.0, 2.0, 3.0, 4.0])]).startswith("No ratio: the ")


def test_a_whisker_without_an_upper_end_is_an_arrow_and_the_caption_says_so(tmp_path):
    """One of six runs missed: the order statistics have no upper limit."""
    runs = [Run("sgd", 1, seed, 8, 3.0 + 0.1 * seed, misses=seed == 5) for seed in range(6)]
    drawing = FIGURES["time_to_accuracy"].draw(hand_made(tmp_path, runs))
    seconds, epochs, per_epoch = drawing.figure.axes
    arrows = [[text for text in axis.texts if text.get_text() == ""] for axis in (seconds, epochs, per_epoch)]
    assert [len(found) for found in arrows] == [2, 2, 0]  # the miss itself, and the whisker
    assert arrows[0][1].xycoords == ("data", "axes fraction")
    assert "An arrow: misses leave the upper limit unknown." in drawing.caption
    row = drawing.numbers.iloc[0]
    assert math.isinf(row["high_seconds"])
    assert math.isinf(row["high_epochs"])
    assert row["low_seconds_per_epoch"] <= row["median_seconds_per_epoch"] <= row["high_seconds_per_epoch"]


def test_claims_beyond_the_edge_are_arrows_and_the_caption_says_so(tmp_path):
    slow = [Run("comm_opt", 1, seed, 8, 30.0 + 0.1 * seed) for seed in range(6)]
    fast = [Run("sgd", 1, seed, 8, 3.0 + 0.01 * seed) for seed in range(6)]
    drawing = FIGURES["claims"].draw(hand_made(tmp_path, [*slow, *fast]))
    assert drawing.numbers["percent_saved"].min() == pytest.approx(-900, rel=0.02)
    assert "An arrow at the left: less than -400 %." in drawing.caption
    marks = [line for line in drawing.figure.axes[0].lines if line.get_marker() == "<"]
    assert {float(line.get_xdata()[0]) for line in marks} == {-400.0}


@pytest.mark.parametrize("width", [ONE_COLUMN, TWO_COLUMNS])
@pytest.mark.parametrize("word", ["sgd", "MEM-OPT WORLD 2 kfac.damping=0.003"])
def test_a_legend_stays_inside_its_figure(width, word):
    figure, _ = panels(width, 2.6, columns=2)
    legend_below(figure, [Line2D([], [], marker="o", label=f"{word} {n}") for n in range(9)], columns=4)
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    extent = legend.get_window_extent()
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.x1


def test_twenty_arms_look_different():
    looks = styles(f"arm {n}" for n in range(20))
    assert len({(look.colour, look.marker) for look in looks.values()}) == 20


def words(figure) -> list[str]:
    """The entries of a figure's legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def runs_of(misses: str) -> list[Run]:
    """Two runs of two arms, of which one arm missed."""
    return [
        Run(method, 1, seed, 4, 1.0, misses=method == misses)
        for method in ("sgd", "comm_opt")
        for seed in range(2)
    ]


@pytest.mark.parametrize(
    ("name", "all_reached", "sgd_missed"),
    [
        ("time_to_accuracy", [], ["missed: at least, and how many runs"]),
        ("learning_curves", ["target"], ["missed the target", "target"]),
        ("loss_curves", [], ["missed the target"]),
        ("pareto", [], ["missed, at the upper edge"]),
    ],
)
def test_a_legend_names_misses_and_fronts_only_where_there_are_any(name, all_reached, sgd_missed, tmp_path):
    for missing, extra in (("nobody", all_reached), ("sgd", sgd_missed)):
        figure = FIGURES[name].draw(hand_made(tmp_path / missing, runs_of(missing))).figure
        assert words(figure) == ["sgd", "comm_opt", *extra]


def test_a_legend_of_claims_has_no_arm_that_is_only_text_and_undecided_ones_are_hollow(tmp_path, fitting):
    nobody, sgd = (hand_made(tmp_path / misses, runs_of(misses)) for misses in ("nobody", "sgd"))
    assert words(FIGURES["claims"].draw(nobody).figure) == ["comm_opt", "the papers' ranges"]
    assert words(FIGURES["claims"].draw(sgd).figure) == ["the papers' ranges"]
    (entry,) = FIGURES["break_even"].draw(nobody).figure.legends[0].legend_handles
    assert entry.get_markerfacecolor() == "none"
    assert words(FIGURES["fraction"].draw(fitting("fraction")).figure) == ["4* ranks"]


def test_savings_without_an_upper_limit_have_an_arrow_to_the_edge(tmp_path):
    """One of six runs of sgd missed, so that what comm_opt saves over it may be any number of epochs."""
    runs = [Run("sgd", 1, seed, 8 + seed, 1.0, misses=seed == 5) for seed in range(6)]
    runs += [Run("comm_opt", 1, seed, 4 + seed, 1.5 + 0.01 * seed) for seed in range(6)]
    drawing = FIGURES["break_even"].draw(hand_made(tmp_path, runs))
    (axis,) = drawing.figure.axes
    (arrow,) = [text for text in axis.texts if not text.get_text()]
    assert arrow.xycoords == ("data", "axes fraction")
    assert arrow.xyann[1] == pytest.approx(drawing.numbers["fewer_epochs_low"].iloc[0])
    assert set(drawing.numbers["fewer_epochs_high"]) == {math.inf}
    assert "An arrow: misses leave the upper limit unknown." in drawing.caption


def test_ideals_begin_at_the_base_of_their_arm_and_are_named_only_where_there_is_a_line(tmp_path, study):
    runs = [Run("sgd", size, 0, 2, 4.0 / size) for size in (1, 2, 4)]
    runs += [Run("comm_opt", size, 0, 2, 8.0 / size) for size in (2, 4)]
    time, _, _ = FIGURES["scaling"].draw(hand_made(tmp_path, runs)).figure.axes
    ideals = [line for line in time.lines if line.get_linestyle() == ":"]
    assert [list(line.get_xdata()) for line in ideals] == [[0.0, 1.0, 2.0], [1.0, 2.0]]
    for most, ideal in ((2, False), (4, True)):
        figure = FIGURES["eigen_imbalance"].draw(study.only(study.cells["world_size"] <= most)).figure
        assert ("ideal" in words(figure)) == ideal


def test_an_arm_that_is_decided_is_filled_and_a_panel_too_many_is_off(tmp_path):
    runs = [
        Run(method, size, seed, 4, seconds + 0.01 * seed, oversubscribed=size > 1)
        for size in (1, 2, 4, 8, 16)
        for method, seconds in (("sgd", 3.0), ("comm_opt", 1.0))
        for seed in range(4)
    ]
    figure = FIGURES["break_even"].draw(hand_made(tmp_path, runs)).figure
    assert [axis.axison for axis in figure.axes] == [True] * 5 + [False]
    (entry,) = figure.legends[0].legend_handles
    assert entry.get_markerfacecolor() != "none"
