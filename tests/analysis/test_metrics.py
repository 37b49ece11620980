"""Promise: what is said of a study follows from its records by rules that can be checked by hand.

References: hand-made curves, and the made-up cost model that the synthetic study was written with.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.metrics import (
    arm_order,
    baselines,
    first_crossing,
    scaling,
    scaling_levels,
    speedups_over_baseline,
    sustained,
    time_to_accuracy,
)
from analysis.steps import closure, counting_windows, memory_peaks, phase_costs, rank_speeds, run_speeds


@pytest.mark.parametrize(
    ("curve", "first", "twice"),
    [
        ([0.1, 0.96, 0.94, 0.97, 0.98], 1, 3),
        ([0.96, 0.97], 0, 0),
        ([0.1, math.nan, 0.96], 2, None),
        ([0.1, 0.2], None, None),
        ([], None, None),
    ],
)
def test_rules_pick_the_evaluation_that_counts(curve, first, twice):
    reached = np.array(curve) >= 0.95
    assert first_crossing(reached) == first
    assert sustained(2)(reached) == twice


def test_time_to_accuracy_is_the_first_evaluation_at_the_target(study):
    scored = time_to_accuracy(study).set_index("run")
    for run, history in study.evaluations.groupby("run", observed=True):
        crossed = history[history["value"] >= 0.95]
        if len(crossed):
            assert scored.loc[run, "seconds"] == crossed["train_seconds"].iloc[0]
            assert scored.loc[run, "epochs"] == crossed["epoch"].iloc[0]
    product = scored["epochs"] * scored["seconds_per_epoch"]
    assert np.allclose(product, scored["seconds"])


def test_a_miss_is_kept_with_the_time_at_which_it_stopped(study):
    scored = time_to_accuracy(study)
    miss = scored[~scored["reached"]]
    assert list(zip(miss["arm"], miss["world_size"], miss["seed"], strict=True)) == [("sgd", 4, 2)]
    history = study.evaluations[study.evaluations["run"] == miss["run"].item()]
    assert miss["seconds"].item() == history["train_seconds"].max()
    assert math.isinf(miss["scored_seconds"].item())
    assert len(scored) == 27


def test_the_wall_clock_counts_evaluation(study):
    train, wall = time_to_accuracy(study), time_to_accuracy(study, clock="wall")
    assert np.allclose(wall["seconds"] - train["seconds"], 0.05 * train["epochs"])


def test_lower_is_better_where_the_target_says_so(study):
    cells = study.cells.assign(target_direction="lower", target_value=0.6)
    scored = time_to_accuracy(replace(study, cells=cells))
    assert (scored["epochs"] == 1).all()


def test_a_run_that_died_before_its_first_evaluation_is_a_miss(study):
    scored = time_to_accuracy(replace(study, evaluations=study.evaluations.iloc[:0]))
    assert len(scored) == 27
    assert not scored["reached"].any()
    assert scored["seconds"].notna().all()


def test_arms_are_measured_against_first_order_arms_of_their_setting(study):
    assert arm_order(study) == ["sgd", "comm_opt", "dp_kfac"]
    assert baselines(study) == {"sgd": "sgd", "comm_opt": "sgd", "dp_kfac": "sgd"}
    cells = study.cells.assign(setting=study.cells["arm"])
    assert baselines(replace(study, cells=cells)) == {"sgd": "sgd"}


def test_speed_up_over_sgd_has_an_interval_only_where_it_may(study):
    speedups = speedups_over_baseline(study, time_to_accuracy(study))
    assert set(speedups) == {(arm, p) for arm in ("comm_opt", "dp_kfac") for p in (1, 2, 4)}
    assert speedups["comm_opt", 1].low is not None
    assert speedups["comm_opt", 4].low is None  # one SGD run missed
    assert "missed" in speedups["comm_opt", 4].method


def test_step_time_is_that_of_the_slowest_rank(study):
    ranks, runs = rank_speeds(study), run_speeds(study).set_index("run")
    for run, group in ranks.groupby("run"):
        assert runs.loc[run, "seconds_per_step"] == group["seconds_per_step"].max()
        slowest = group.loc[group["seconds_per_step"].idxmax(), "rank"]
        assert runs.loc[run, "slowest_rank"] == slowest


def test_the_first_window_and_a_broken_last_one_do_not_count(study):
    windows = counting_windows(study)
    assert windows["first_step"].min() == 10
    phases = study.phases.copy()
    last = phases["first_step"] == 230
    phases.loc[last, "steps"] = 3
    assert counting_windows(replace(study, phases=phases))["first_step"].max() == 220
    only = study.phases[study.phases["first_step"] == 0]
    assert len(counting_windows(replace(study, phases=only))) == len(only)


def test_phase_costs_of_a_step_add_up_to_its_time(study):
    total = phase_costs(study).groupby("run")["seconds_per_step"].sum()
    expected = run_speeds(study).set_index("run")["seconds_per_step"]
    assert np.allclose(total.loc[expected.index], expected)


def test_traffic_is_counted_per_step(study):
    costs = phase_costs(study)
    assert set(costs.loc[costs["bytes_per_step"] > 0, "bytes_per_step"]) == {40_000}
    assert set(costs.loc[costs["phase"] != "other", "calls_per_step"]) == {1}


@pytest.mark.parametrize("world_size", [2, 4])
def test_strong_scaling_speed_up_is_the_ratio_of_step_times(study, world_size):
    levels = scaling_levels(study).set_index(["arm", "world_size"])
    runs = scaling(study).groupby(["arm", "world_size"])["seconds_per_step"].apply(lambda s: np.log(s).mean())
    for arm in arm_order(study):
        row = levels.loc[(arm, world_size)]
        expected = math.exp(runs[arm, 1] - runs[arm, world_size])
        assert row.speedup.estimate == pytest.approx(expected)
        assert row.efficiency.estimate == pytest.approx(expected / world_size)
        assert row.base_world_size == 1


def test_weak_scaling_speed_up_counts_the_larger_batch(odd_studies):
    weak = odd_studies["weak scaling"]
    levels = scaling_levels(weak).set_index(["arm", "world_size"])
    seconds = scaling(weak).set_index(["arm", "world_size"])["seconds_per_step"]
    row = levels.loc[("sgd", 4)]
    assert row.efficiency.estimate == pytest.approx(seconds["sgd", 1] / seconds["sgd", 4])
    assert row.speedup.estimate == pytest.approx(4 * row.efficiency.estimate)


def test_without_one_rank_the_smallest_world_is_the_base(odd_studies):
    levels = scaling_levels(odd_studies["one world size"])
    assert set(levels["base_world_size"]) == {2}
    assert all(speedup.estimate == 1 for speedup in levels["speedup"])


def test_windows_whose_phases_exceed_the_wall_do_not_close(study):
    assert closure(study)["closes"].all()
    assert closure(study)["other_share"].mean() == pytest.approx(0.03 / 1.03)
    phases = study.phases.copy()
    for phase, change in (("forward", 0.06), ("other", -0.06)):
        phases.loc[phases["phase"] == phase, "seconds"] += change * phases["wall_seconds"]
    report = closure(replace(study, phases=phases))
    assert not report["closes"].any()
    phases = study.phases.copy()
    phases.loc[phases["phase"] == "forward", "seconds"] *= 1.5
    assert not closure(replace(study, phases=phases))["closes"].all()


def test_memory_is_the_peak_by_rank_and_kind(study):
    peaks = memory_peaks(study).merge(study.cells[["run", "arm", "world_size"]], on="run")
    rank3 = peaks[(peaks["rank"] == 3) & (peaks["kind"] == "rss_peak")]
    assert set(rank3["bytes"]) == {306_000_000}
    owned = (
        peaks[(peaks["kind"] == "kfac_factors") & (peaks["world_size"] == 4)].groupby("arm")["bytes"].max()
    )
    assert owned.to_dict() == {"comm_opt": 3_000_000, "dp_kfac": 750_000}


def test_nothing_measured_gives_empty_tables_not_errors(odd_studies):
    for name in ("no cells", "only failed cells"):
        empty = odd_studies[name]
        for table in (time_to_accuracy, scaling, scaling_levels, closure, memory_peaks, phase_costs):
            assert table(empty).empty
