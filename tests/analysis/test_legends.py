"""Promise: a legend fits into its figure, however long its words are, and its looks can be told apart."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D

from analysis.figures.drawing import ONE_COLUMN, TWO_COLUMNS, legend_below, panels, styles


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
