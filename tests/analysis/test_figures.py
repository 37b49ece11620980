"""Promise: every registered figure draws any study or says why not, shows its runs, and is reproducible."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from analysis.figures import FIGURES, Drawing, NothingToDraw
from analysis.figures.drawing import ONE_COLUMN, TWO_COLUMNS
from analysis.figures.files import image, save

pytestmark = pytest.mark.parametrize("name", FIGURES)

ODD = [
    "only failed cells",
    "no SGD arm",
    "one world size",
    "nobody reaches the target",
    "weak scaling",
    "no cells",
]


@pytest.fixture(scope="module")
def drawn(study) -> Callable[[str], Drawing]:
    """Each figure of the ordinary study, drawn once: drawing is what these tests spend their time on."""
    return functools.cache(lambda name: FIGURES[name].draw(study))


def test_a_figure_shows_runs_that_can_be_followed_back(study, drawn, name):
    drawing = drawn(name)
    assert set(drawing.numbers["run"]) <= set(study.cells["run"])
    assert len(drawing.numbers)
    assert "n = " in drawing.caption
    assert "More ranks than CPUs" in drawing.caption


def test_a_figure_has_a_journals_width_and_units_on_its_axes(drawn, name):
    figure = drawn(name).figure
    assert figure.get_size_inches()[0] in {ONE_COLUMN, TWO_COLUMNS}
    drawn = [axis for axis in figure.axes if axis.axison]
    assert all(axis.get_xlabel() for axis in drawn)
    assert any(axis.get_ylabel() for axis in drawn)


def test_a_legend_lies_below_every_panel(drawn, name):
    figure = drawn(name).figure
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    top = legend.get_window_extent().y1
    assert all(top <= axis.get_tightbbox().y0 for axis in figure.axes)
    assert all(axis.get_legend() is None for axis in figure.axes)


@pytest.mark.parametrize("lack", ODD)
def test_a_figure_of_a_study_that_lacks_something_is_drawn_or_refused_with_a_reason(odd_studies, name, lack):
    try:
        drawing = FIGURES[name].draw(odd_studies[lack])
    except NothingToDraw as reason:
        assert lack in {"only failed cells", "no cells"}
        assert str(reason).startswith("no ")
    else:
        assert lack not in {"only failed cells", "no cells"}
        FigureCanvasAgg(drawing.figure).draw()
        if lack == "no SGD arm":
            assert "no first-order arm" in drawing.caption


def test_a_figure_is_byte_identical_when_drawn_again(odd_studies, tmp_path, name):
    for folder in ("once", "again"):
        save(FIGURES[name].draw(odd_studies["one world size"]), tmp_path / folder, name)
    files = sorted(path.name for path in (tmp_path / "once").iterdir())
    assert files == [f"{name}.csv", f"{name}.pdf", f"{name}.png"]
    for file in files:
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    assert b"CreationDate" not in (tmp_path / "once" / f"{name}.pdf").read_bytes()


def test_the_numbers_beside_a_figure_are_a_readable_table(drawn, tmp_path, name):
    save(drawn(name), tmp_path, name)
    numbers = pd.read_csv(tmp_path / f"{name}.csv")
    assert {"run", "arm", "world_size", "seed"} <= set(numbers.columns)


def test_a_figure_is_not_blank(drawn, name):
    pixels = matplotlib.image.imread(io.BytesIO(image(drawn(name), "png")))
    assert np.ptp(pixels[..., :3]) == pytest.approx(1.0, abs=0.01)
    assert (pixels[..., :3].min(axis=2) < 0.5).mean() > 0.005
