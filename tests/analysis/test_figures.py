"""Promise: every registered figure draws any study or says why not, shows its runs, and is reproducible."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from analysis.figures import FIGURES, Drawing, NothingToDraw
from analysis.figures.drawing import ONE_COLUMN, TWO_COLUMNS, save
from tests.analysis.conftest import FITTING

pytestmark = pytest.mark.parametrize("name", FIGURES)

ODD = ["only failed cells", "no SGD arm", "one world size", "nobody reaches the target", "weak scaling",
       "two runs and one that failed"]  # fmt: skip
"""In the study of weak scaling a run diverged, so that its losses are NaN."""


@pytest.fixture(scope="module")
def saved(fitting, ordinary_report, tmp_path_factory) -> Callable[[str], Path]:
    """The folder with a figure's files: the report's, or of a study that the report is not of."""

    def save_once(name: str) -> Path:
        if name not in FITTING:
            return ordinary_report.parent / "figures"
        folder = tmp_path_factory.mktemp(name)
        save(FIGURES[name].draw(fitting(name)), folder, name)
        return folder

    return functools.cache(save_once)


NEEDS_MORE = {*FITTING, "break_even", "claims", "eigen_imbalance", "wait_transfer"}
"""Figures of studies of a certain shape: a second batch size, an arm to compare with, several ranks."""

ROWS_ARE_NAMED = {"claims", "published_breakdown"}
"""Figures whose rows are named in the figure."""

ONE_RUN_PER_MODEL = {"factor_sizes"}

NAMES_NO_WORLD_SIZE = {"factor_sizes", "solver_by_batch", "nlcg_by_batch"}

SEVERAL_RANKS = {"learning_curves", "loss_curves", "other_metrics", "wait_transfer", "placement_grid",
                 "published_breakdown", "eigen_imbalance"}  # fmt: skip
"""Figures that do not show one rank, where the failed run of the odd studies is."""


@pytest.fixture(scope="module")
def drawn(fitting) -> Callable[[str], Drawing]:
    """Each figure of a study that fills it, drawn once: drawing is what these tests spend their time on."""
    return functools.cache(lambda name: FIGURES[name].draw(fitting(name)))


def test_a_figure_shows_runs_that_can_be_followed_back(fitting, drawn, name):
    drawing = drawn(name)
    assert set(drawing.numbers["run"]) <= set(fitting(name).cells["run"])
    assert len(drawing.numbers)
    assert "n = " in drawing.caption
    starred = drawing.numbers["oversubscribed"].any() and name not in NAMES_NO_WORLD_SIZE
    assert ("* More ranks than CPUs" in drawing.caption) == starred


def test_a_figure_has_a_journals_width_units_on_its_axes_and_its_legend_below_every_panel(drawn, name):
    figure = drawn(name).figure
    assert figure.get_size_inches()[0] in {ONE_COLUMN, TWO_COLUMNS}
    shown = [axis for axis in figure.axes if axis.axison]
    assert all(axis.get_xlabel() for axis in shown)
    assert any(axis.get_ylabel() or name in ROWS_ARE_NAMED for axis in shown)
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    top = legend.get_window_extent().y1
    assert all(top <= axis.get_tightbbox().y0 for axis in figure.axes)
    assert all(axis.get_legend() is None for axis in figure.axes)


@pytest.mark.slow
@pytest.mark.parametrize("lack", ODD)
def test_a_figure_of_a_study_that_lacks_something_is_drawn_or_gives_a_reason(odd_studies, name, lack):
    try:
        drawing = FIGURES[name].draw(odd_studies[lack])
    except NothingToDraw as reason:
        assert lack == "only failed cells" or name in NEEDS_MORE
        assert str(reason).startswith("no ")
    else:
        assert lack != "only failed cells"
        drawing.figure.set_layout_engine("none")  # takes half of the time, and is tested above
        FigureCanvasAgg(drawing.figure).draw()
        if lack == "no SGD arm":
            assert "no first-order arm" in drawing.caption
        if lack == "two runs and one that failed" and name not in SEVERAL_RANKS | ONE_RUN_PER_MODEL:
            assert "(1 FAILED)" in drawing.caption
            assert "order-statistic" not in drawing.caption


def test_a_figure_is_byte_identical_when_drawn_again(fitting, saved, name):
    drawing, first = FIGURES[name].draw(fitting(name)), saved(name)
    pdf = drawing.image("pdf")
    assert b"CreationDate" not in pdf
    assert pdf == (first / f"{name}.pdf").read_bytes()
    numbers = drawing.numbers.to_csv(index=False, lineterminator="\n")
    assert numbers.encode() == (first / f"{name}.csv").read_bytes()
    read = pd.read_csv(first / f"{name}.csv")
    assert {"run", "arm", "world_size", "seed"} <= set(read.columns)
    assert len(read)
    if name == next(iter(FIGURES)):  # how a PNG is written does not depend on what it shows
        assert drawing.image("png") == (first / f"{name}.png").read_bytes()


def test_a_figure_is_not_blank_and_not_cut_off(saved, name):
    pixels = matplotlib.image.imread(saved(name) / f"{name}.png")
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert edge[..., :3].min() > 0.5, "a letter or a line reaches the edge"
    assert np.ptp(pixels[..., :3]) == pytest.approx(1.0, abs=0.01)
    assert (pixels[..., :3].min(axis=2) < 0.5).mean() > 0.005
