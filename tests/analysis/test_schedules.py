"""Promise: options that change over time have a place in tables and figures, and methods may train longer."""

from __future__ import annotations

import pytest

from analysis import load
from analysis.figures import FIGURES
from analysis.figures.drawing import NothingToDraw
from analysis.report.tables import costs_table, summary_table
from harness.runs.arms import fields_of, name_arms
from tests.analysis.conftest import Plan, make_cell

HALVED = {"initial": 0.01, "factor": 0.5, "at": [4, 8]}
TEXT = "0.01 x 0.5 at epochs 4, 8"
RARER = {"initial": 10, "factor": 10, "at": [5], "unit": "steps"}


def small(**changes) -> Plan:
    return Plan(
        **{"methods": ("sgd", "comm_opt"), "world_sizes": (1, 2), "seeds": (0, 1), "misses": (), **changes}
    )


def test_a_schedule_has_its_text_and_no_number(write_study):
    study = load(write_study(small(patches=({"kfac.damping": HALVED}, {"kfac.damping": 0.003}))))
    kfac = study.cells[study.cells["method"] == "comm_opt"].set_index("arm")
    assert set(kfac.index) == {f"comm_opt damping={TEXT}", "comm_opt damping=0.003"}
    scheduled = kfac.loc[f"comm_opt damping={TEXT}"]
    assert scheduled["damping"].isna().all()
    assert set(scheduled["schedules"]) == {f"damping {TEXT}"}
    assert set(kfac.loc["comm_opt damping=0.003", "schedules"]) == {""}
    assert set(study.value_of("kfac.damping").dropna()) == {TEXT, 0.003}
    assert len(summary_table(study)) == len(costs_table(study)) == 6


def test_a_scheduled_damping_has_a_row_in_the_heat_map(write_study):
    grid = tuple(
        {"kfac.damping": damping, "kfac.inverse_update_steps": steps}
        for damping in (HALVED, 0.003) for steps in (10, 20)
    )  # fmt: skip
    drawing = FIGURES["damping_interval"].draw(load(write_study(small(patches=grid))))
    (axis,) = drawing.figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["0.003", "0.01 x 0.5\nat epochs 4, 8"]
    assert set(drawing.numbers["damping"]) == {0.003, TEXT}


def test_runs_with_scheduled_intervals_are_left_out_of_an_axis_of_intervals_and_counted(write_study):
    steps = (
        {"kfac.inverse_update_steps": 10},
        {"kfac.inverse_update_steps": 20},
        {"kfac.inverse_update_steps": RARER},
    )
    plan = small(patches=steps, world_sizes=(2,), fixed_length=True)
    drawing = FIGURES["update_intervals"].draw(load(write_study(plan)))
    assert "2 runs whose intervals change over time have no one E" in drawing.caption
    assert set(drawing.numbers["inverse_update_steps"]) == {10, 20}
    assert [text.get_text() for text in drawing.figure.legends[0].get_texts()] == ["comm_opt", "sgd (median)"]
    only = small(methods=("comm_opt",), patches=steps[2:], world_sizes=(2,))
    with pytest.raises(NothingToDraw, match="fixed intervals"):
        FIGURES["stage_profile"].draw(load(write_study(only)))


def test_methods_of_other_lengths_are_compared():
    """SC20 trains SGD for 90 epochs and K-FAC for 55: that is the method, not the setting."""
    rows = []
    for method, epochs in (("sgd", 90), ("comm_opt", 55)):
        cell = make_cell(method, 2, 0, Plan(epochs=epochs), {})
        rows.append({**fields_of(cell), "workload.options.label_smoothing": epochs / 1000})
    assert name_arms(rows) == [("sgd", ""), ("comm_opt", "")]
    both = [
        fields_of(make_cell(method, 2, 0, Plan(epochs=n), {}))
        for method in ("sgd", "comm_opt")
        for n in (10, 20)
    ]
    assert [setting for _, setting in name_arms(both)] == ["epochs=10", "epochs=20"] * 2
    parts = [  # numbers of micro-batches that follow from the world are one arm
        {**fields_of(make_cell("sgd", size, 0, Plan(epochs=10), {})), "training.accumulate": number}
        for size, number in ((2, 4), (4, 2))
    ]
    assert name_arms(parts) == [("sgd", ""), ("sgd", "")]
    parts[1]["world_size"] = 2
    assert [setting for _, setting in name_arms(parts)] == ["accumulate=4", "accumulate=2"]


def test_a_second_workload_is_named_without_the_options_that_only_it_has():
    """The name tells two workloads apart; their options and targets matter where they vary in one."""
    base = fields_of(make_cell("sgd", 2, 0, Plan(epochs=10), {}))
    text = {**base, "workload.name": "gpt", "target.value": 0.1, "workload.options.hidden": 32}
    assert [setting for _, setting in name_arms([base, text])] == [base["workload.name"], "gpt"]
    wide = {**text, "workload.options.hidden": 64}
    assert [setting for _, setting in name_arms([base, text, wide])] == [
        base["workload.name"], "gpt hidden=32", "gpt hidden=64",
    ]  # fmt: skip
