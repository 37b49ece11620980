"""Promise: a legend fits into its figure, has what is drawn and no more, and its looks can be told apart."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D

from analysis.figures import FIGURES
from analysis.figures.drawing import ONE_COLUMN, TWO_COLUMNS, legend_below, panels, styles
from tests.analysis.hand_made import Run, hand_made


@pytest.mark.parametrize("width", [ONE_COLUMN, TWO_COLUMNS])
@pytest.mark.parametrize(
    "word",
    ["sgd", "comm_opt-inverse", "nlcg-kfac global_batch_size=400", "MEM-OPT WORLD 2 kfac.damping=0.003"],
)
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


def test_a_legend_of_claims_has_no_arm_that_is_only_text(tmp_path):
    assert words(FIGURES["claims"].draw(hand_made(tmp_path / "a", runs_of("nobody"))).figure) == [
        "comm_opt", "the papers' ranges",
    ]  # fmt: skip
    assert words(FIGURES["claims"].draw(hand_made(tmp_path / "b", runs_of("sgd"))).figure) == [
        "the papers' ranges"
    ]


def test_the_ideal_is_in_the_legend_only_where_there_is_a_line(study):
    figures = {
        most: FIGURES["eigen_imbalance"].draw(study.only(study.cells["world_size"] <= most)).figure
        for most in (2, 4)
    }
    assert "ideal" not in words(figures[2])
    assert "ideal" in words(figures[4])


def test_undecided_arms_are_hollow_in_the_legend_as_in_the_panel(tmp_path):
    figure = FIGURES["break_even"].draw(hand_made(tmp_path, runs_of("nobody"))).figure
    (entry,) = figure.legends[0].legend_handles
    assert entry.get_markerfacecolor() == "none"


def test_a_legend_stars_world_sizes_with_more_ranks_than_cpus(fitting):
    assert words(FIGURES["fraction"].draw(fitting("fraction")).figure) == ["4* ranks"]
