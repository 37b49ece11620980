"""Promise: what lies outside of a panel, or has no end, is drawn as such, said in the caption and the CSV."""

from __future__ import annotations

import math

import pytest

from analysis.figures import FIGURES
from tests.analysis.hand_made import Run, hand_made


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
