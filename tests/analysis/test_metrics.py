"""Promise: the metrics of a study follow from its records by rules that can be checked by hand.

Energy to the target is that of the windows before it; without a counter, the reason is given.

References: hand-made curves, and the synthetic cost model with which the study was written.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.energy import energy_to_target
from analysis.figures import FIGURES, NothingToDraw
from analysis.metrics import aggregated, arm_order, finals, scaling, scaling_levels, time_to_accuracy
from analysis.records.loading import load
from analysis.rules import SCORINGS
from analysis.steps import (
    closure,
    counting_windows,
    kfac_bytes,
    memory_peaks,
    peak_bytes,
    phase_costs,
    rank_phase_costs,
    rank_speeds,
    run_speeds,
    waits,
)  # fmt: skip
from harness.runs.record_lines import RecordWriter
from harness.runs.records import DeviceRecord
from tests.analysis.conftest import STEPS_PER_EPOCH, Plan


def test_time_to_accuracy_is_the_first_evaluation_at_the_target_and_of_a_miss_the_last(study):
    scored = time_to_accuracy(study).set_index("run")
    assert len(scored) == 27
    for run, history in study.evaluations.groupby("run", observed=True):
        crossed = history[history["value"] >= 0.95]
        at = crossed.iloc[0] if len(crossed) else history.iloc[-1]
        assert tuple(scored.loc[run, ["seconds", "epochs"]]) == (at["train_seconds"], at["epoch"])
    assert np.allclose(scored["epochs"] * scored["seconds_per_epoch"], scored["seconds"])
    miss = scored[~scored["reached"]]
    assert list(zip(miss["arm"], miss["world_size"], miss["seed"], strict=True)) == [("sgd", 4, 2)]
    assert math.isinf(miss["scored_seconds"].item())
    wall = time_to_accuracy(replace(study, scoring=SCORINGS["wall"])).set_index("run")
    assert np.allclose(wall["seconds"] - scored["seconds"], 0.05 * scored["epochs"])


def test_a_table_that_was_changed_changes_no_later_one(study):
    first = time_to_accuracy(study)
    first["seconds"] = -1.0
    assert (time_to_accuracy(study)["seconds"] > 0).all()
    half = study.only(study.cells["seed"] == 0)
    assert set(time_to_accuracy(half)["seed"]) == {0}


def test_step_time_is_that_of_the_slowest_rank(study):
    ranks, runs = rank_speeds(study), run_speeds(study).set_index("run")
    for run, group in ranks.groupby("run"):
        assert runs.loc[run, "seconds_per_step"] == group["seconds_per_step"].max()
        slowest = group.loc[group["seconds_per_step"].idxmax(), "rank"]
        assert runs.loc[run, "slowest_rank"] == slowest
    costs = phase_costs(study)
    total = costs.groupby("run")["seconds_per_step"].sum()
    assert np.allclose(total.loc[runs.index], runs["seconds_per_step"])
    assert set(costs.loc[costs["bytes_per_step"] > 0, "bytes_per_step"]) == {40_000}
    assert set(costs.loc[costs["phase"] != "other", "calls_per_step"]) == {1}


def test_the_first_window_and_a_broken_last_one_do_not_count(study):
    windows = counting_windows(study)
    assert windows["first_step"].min() == 10
    cut = study.windows.assign(steps=study.windows["steps"].where(study.windows["first_step"] != 230, 3))
    assert counting_windows(replace(study, windows=cut))["first_step"].max() == 220
    only = study.windows[study.windows["first_step"] == 0]
    assert len(counting_windows(replace(study, windows=only))) == len(only)


def test_strong_scaling_speed_up_is_the_ratio_of_step_times(study, odd_studies):
    levels = scaling_levels(study).set_index(["arm", "world_size"])
    runs = scaling(study).groupby(["arm", "world_size"])["seconds_per_step"].apply(lambda s: np.log(s).mean())
    for arm in arm_order(study):
        row = levels.loc[(arm, 4)]
        expected = math.exp(runs[arm, 1] - runs[arm, 4])
        assert row.speedup.estimate == pytest.approx(expected, rel=0.01)  # the scatter is 2 %
        assert row.efficiency.estimate == pytest.approx(row.speedup.estimate / 4)
        assert row.base_world_size == 1
    alone = scaling_levels(odd_studies["one world size"])
    assert set(alone["base_world_size"]) == {2}
    assert all(speedup.estimate == 1 for speedup in alone["speedup"])


def test_weak_scaling_speed_up_counts_the_larger_batch(odd_studies):
    weak = odd_studies["weak scaling"]
    levels = scaling_levels(weak).set_index(["arm", "world_size"])
    seconds = scaling(weak).set_index(["arm", "world_size"])["seconds_per_step"]
    row = levels.loc[("sgd", 4)]
    assert row.efficiency.estimate == pytest.approx(seconds["sgd", 1] / seconds["sgd", 4])
    assert row.speedup.estimate == pytest.approx(4 * row.efficiency.estimate)


def test_windows_whose_phases_exceed_the_wall_do_not_close(study):
    assert closure(study)["closes"].all()
    assert closure(study)["other_share"].mean() == pytest.approx(0.03 / 1.03)
    windows = study.windows.copy()
    for phase, change in (("forward", 0.06), ("other", -0.06)):
        windows[f"seconds.{phase}"] += change * windows["wall_seconds"]
    report = closure(replace(study, windows=windows))
    assert not report["closes"].any()
    longer = study.windows.assign(**{"seconds.forward": 1.5 * study.windows["seconds.forward"]})
    assert not closure(replace(study, windows=longer))["closes"].all()


def test_memory_is_the_peak_by_rank_and_kind(study):
    peaks = memory_peaks(study).merge(study.cells[["run", "arm", "world_size"]], on="run")
    rank3 = peaks[(peaks["rank"] == 3) & (peaks["kind"] == "rss_peak")]
    assert set(rank3["bytes"]) == {306_000_000}
    owned = (
        peaks[(peaks["kind"] == "kfac_factors") & (peaks["world_size"] == 4)].groupby("arm")["bytes"].max()
    )
    assert owned.to_dict() == {"comm_opt": 3_000_000, "dp_kfac": 750_000}
    of_run = study.cells.set_index("run")
    state = kfac_bytes(study).set_index("run")["kfac_bytes"]
    assert set(state[of_run.loc[state.index, "arm"] == "comm_opt"]) == {7_500_000}
    worst = peak_bytes(study).set_index("run")
    assert set(worst["peak_bytes"][of_run.loc[worst.index, "world_size"] == 4]) == {306_000_000}
    assert set(worst["kind"]) == {"rss_peak"}


def test_nothing_measured_gives_empty_tables_not_errors(odd_studies):
    for name in ("no cells", "only failed cells"):
        empty = odd_studies[name]
        for table in (time_to_accuracy, scaling, scaling_levels, closure, phase_costs, memory_peaks):
            assert table(empty).empty


def test_waiting_is_what_ranks_spend_beyond_the_fastest_one(study):
    """Rank 0's windows alone are slowed by 2 ms a step; a quarter of that is the mean rank's of four."""
    windows = study.windows.copy()
    windows["seconds.gradient_comm"] += 2e-3 * windows["steps"].where(windows["rank"] == 0, 0)
    before, after = (
        waits(replace(study, windows=frame)).set_index(["run", "phase"]).drop(columns="measured")
        for frame in (study.windows, windows)
    )
    fours = study.cells.loc[study.cells["world_size"] == 4, "run"]
    for run in fours:
        key = (run, "gradient_comm")
        added = after.loc[key] - before.loc[key]
        total = added["wait_seconds_per_step"] + added["transfer_seconds_per_step"]
        assert total == pytest.approx(2e-3 / 4)
        assert (
            after.loc[key, "transfer_seconds_per_step"] < before.loc[key, "transfer_seconds_per_step"] + 2e-4
        )
    ones = study.cells.loc[study.cells["world_size"] == 1, "run"]
    assert (after.loc[after.index.get_level_values("run").isin(ones), "wait_seconds_per_step"] == 0).all()


def test_a_phase_of_every_second_window_is_amortised_over_all(study):
    windows = study.windows.copy()
    windows.loc[windows["first_step"] % 20 == 0, "seconds.inverse_comm"] = np.nan
    rare = replace(study, windows=windows)
    found = waits(rare).set_index(["run", "phase"])
    total = found["transfer_seconds_per_step"] + found["wait_seconds_per_step"]
    costs = rank_phase_costs(rare)
    costs = costs[costs["phase"].astype("str").str.endswith("_comm")].astype({"phase": "str"})
    means = costs.groupby(["run", "phase"])["seconds_per_step"].mean()
    assert total.to_dict() == pytest.approx(means.to_dict())


def test_scores_of_all_rules_come_from_the_same_runs(study):
    for scoring in SCORINGS.values():
        table = aggregated(replace(study, scoring=scoring, cells=study.cells.assign(stop_reason="epochs")))
        assert len(table) == 9
        assert (table["runs"] == 3).all()
        assert table.iloc[0, 0] == "sgd"  # in the order of every table, not by name


def test_last_and_best_values_are_those_of_the_records(study):
    table = finals(study).set_index("run")
    for run, history in study.evaluations.groupby("run", observed=True):
        assert table.loc[run, "value"] == history.sort_values("step")["value"].iloc[-1]
        assert table.loc[run, "best_value"] == history["value"].max()
    losses = finals(replace(study, cells=study.cells.assign(target_direction="lower"))).set_index("run")
    for run, history in study.evaluations.groupby("run", observed=True):
        assert losses.loc[run, "best_value"] == history["value"].min()
    assert not table["fixed_length"].any()


WATTS = 300.0  # of every rank of the synthetic study


def test_joules_are_those_of_all_ranks_until_the_target_and_none_of_a_run_that_missed(write_study):
    study = load(write_study(Plan(gpus=True)))
    runs = energy_to_target(study)
    assert len(runs) == len(study.cells)
    assert math.isinf(runs.loc[~runs["reached"], "joules"].item())
    windows = study.windows
    for run in runs[runs["reached"]].itertuples():
        own = windows[windows["run"] == run.run]
        before = own[own["first_step"] < run.epochs * STEPS_PER_EPOCH]
        assert 0 < len(before) < len(own)
        assert run.joules == pytest.approx(WATTS * before["wall_seconds"].sum())
        assert run.all_joules == pytest.approx(WATTS * own["wall_seconds"].sum())
        assert run.watts == pytest.approx(WATTS * run.world_size, rel=0.05)  # over the slowest rank's time
    numbers = FIGURES["energy_to_accuracy"].draw(study).numbers  # joules, though the axis has kilojoules
    for _, group in numbers[numbers["world_size"] < 4].groupby(["arm", "world_size"]):
        assert group["joules_median"].unique() == pytest.approx([group["joules"].median()])


def test_without_a_driver_the_figure_gives_the_reason_in_the_records(write_study):
    folder = write_study(Plan(methods=("sgd",), world_sizes=(1,), seeds=(0,)))
    with pytest.raises(NothingToDraw, match="older than device records"):
        FIGURES["energy_to_accuracy"].draw(load(folder))
    (file,) = folder.glob("*/attempt-1/rank-00000.jsonl")
    with RecordWriter(file) as writer:
        writer.write(DeviceRecord(0, 0, 0, 10, "the rank computes on cpu"))
        writer.write_checksum(0)
    study = load(folder)
    assert study.devices["energy_joules"].isna().all()
    with pytest.raises(NothingToDraw, match="the rank computes on cpu"):
        FIGURES["energy_to_accuracy"].draw(study)
