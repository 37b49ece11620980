"""Promise: what a figure draws, not only its CSV, has the known values, units and directions."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from analysis.figures import FIGURES
from analysis.figures.break_even import draw_studies
from analysis.figures.drawing import counts
from analysis.figures.pareto import _front
from analysis.placements import inverse_loads
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
    marks = [float(line.get_ydata()[0]) for line in efficiency.lines if line.get_marker() not in ("None", "")]
    assert marks == pytest.approx([100.0, 80.0])


def test_only_runs_that_missed_are_hollow(tmp_path):
    runs = [Run("sgd", 1, seed, 2, 1.0 + seed, misses=seed == 2) for seed in range(3)]
    axis = FIGURES["time_to_accuracy"].draw(hand_made(tmp_path, runs)).figure.axes[0]
    dots = [line for line in axis.lines if line.get_marker() not in ("None", "")]
    hollow = [list(line.get_ydata()) for line in dots if line.get_markerfacecolor() == "white"]
    assert hollow == [[6.0]]
    assert sorted(float(y) for line in dots for y in line.get_ydata()) == [2.0, 4.0, 6.0]


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


def test_a_front_is_what_nothing_beats_in_both():
    assert _front([(3.0, 4.0), (1.0, 5.0), (4.0, 1.0), (2.0, 3.0)]) == [(1.0, 5.0), (2.0, 3.0), (4.0, 1.0)]


def test_counts_of_runs_are_from_the_fewest_to_the_most():
    frame = pd.DataFrame({"arm": list("aaabb"), "world_size": 1, "run": list("12345")})
    assert counts(frame) == "n = 2 to 3 runs per point"


def test_the_state_is_that_of_the_window_and_rank_with_most(study):
    memory = study.memory.copy()
    once = (memory["rank"] == 1) & (memory["kind"] == "kfac_factors") & (memory["first_step"] == 50)
    memory.loc[once, "bytes"] += 1_000_000
    sizes = kfac_bytes(replace(study, memory=memory)).merge(
        study.cells[["run", "arm", "world_size"]], on="run"
    )
    assert set(sizes.query("arm == 'comm_opt' and world_size > 1")["kfac_bytes"]) == {8_500_000}
    assert set(sizes.query("arm == 'comm_opt' and world_size == 1")["kfac_bytes"]) == {7_500_000}


def test_inverses_cost_the_cube_of_their_sizes(study):
    assert set(inverse_loads(study)["total_load"]) == {145.0**3 + 32**3 + 129**3 + 10**3}


def marks(axis) -> set[tuple[float, float]]:
    """Where an axis has markers."""
    lines = [line for line in axis.lines if line.get_marker() not in ("None", "")]
    return {(round(float(x), 6), round(float(y), 6)) for line in lines for x, y in line.get_xydata()}


def test_an_arm_lies_above_the_break_even_line_if_it_saves_more_epochs_than_its_epochs_cost(tmp_path):
    """Both need half of four epochs of 1 s; their epochs cost 1.5 and 2.5 times as much."""
    runs = [
        Run(method, 1, seed, epochs, seconds)
        for method, epochs, seconds in (("sgd", 4, 1.0), ("comm_opt", 2, 1.5), ("mem_opt", 2, 2.5))
        for seed in range(4)
    ]
    runs += [Run("dp_kfac", 1, seed, 2, 1.0, misses=True) for seed in range(4)]  # it has no point
    study = hand_made(tmp_path, runs)
    drawing = FIGURES["break_even"].draw(study)
    assert marks(drawing.figure.axes[0]) == {(1.5, 2.0), (2.5, 2.0)}
    ratios = drawing.numbers.groupby("method")["speedup"].first()
    assert dict(ratios) == {"comm_opt": pytest.approx(2 / 1.5), "mem_opt": pytest.approx(2 / 2.5)}
    both = draw_studies({"one": study, "other": study})
    assert marks(both.figure.axes[0]) == {(1.5, 2.0), (2.5, 2.0)}
    assert set(both.numbers.groupby("study")["run"].nunique()) == {8}
    assert set(both.numbers["inverse_update_steps"].dropna()) == {10}
