"""Promise: the metrics of a study follow from its records by rules that can be checked by hand.

References: hand-made curves, and the synthetic cost model with which the study was written.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.metrics import (
    aggregated,
    arm_order,
    finals,
    scaling,
    scaling_levels,
    time_to_accuracy,
)
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


def test_time_to_accuracy_is_the_first_evaluation_at_the_target(study):
    scored = time_to_accuracy(study).set_index("run")
    for run, history in study.evaluations.groupby("run", observed=True):
        crossed = history[history["value"] >= 0.95]
        if len(crossed):
            assert scored.loc[run, "seconds"] == crossed["train_seconds"].iloc[0]
            assert scored.loc[run, "epochs"] == crossed["epoch"].iloc[0]
    product = scored["epochs"] * scored["seconds_per_epoch"]
    assert np.allclose(product, scored["seconds"])


def test_a_table_that_was_changed_changes_no_later_one(study):
    first = time_to_accuracy(study)
    first["seconds"] = -1.0
    assert (time_to_accuracy(study)["seconds"] > 0).all()
    walls = time_to_accuracy(replace(study, scoring=SCORINGS["wall"]))
    assert (walls["seconds"] > time_to_accuracy(study)["seconds"]).all()
    half = study.only(study.cells["seed"] == 0)
    assert set(time_to_accuracy(half)["seed"]) == {0}


def test_a_miss_is_kept_with_the_time_at_which_it_stopped(study):
    scored = time_to_accuracy(study)
    miss = scored[~scored["reached"]]
    assert list(zip(miss["arm"], miss["world_size"], miss["seed"], strict=True)) == [("sgd", 4, 2)]
    history = study.evaluations[study.evaluations["run"] == miss["run"].item()]
    assert miss["seconds"].item() == history["train_seconds"].max()
    assert math.isinf(miss["scored_seconds"].item())
    assert len(scored) == 27


def test_the_wall_clock_counts_evaluation(study):
    train, wall = time_to_accuracy(study), time_to_accuracy(replace(study, scoring=SCORINGS["wall"]))
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


def test_step_time_is_that_of_the_slowest_rank(study):
    ranks, runs = rank_speeds(study), run_speeds(study).set_index("run")
    for run, group in ranks.groupby("run"):
        assert runs.loc[run, "seconds_per_step"] == group["seconds_per_step"].max()
        slowest = group.loc[group["seconds_per_step"].idxmax(), "rank"]
        assert runs.loc[run, "slowest_rank"] == slowest


def test_the_first_window_and_a_broken_last_one_do_not_count(study):
    windows = counting_windows(study)
    assert windows["first_step"].min() == 10
    cut = study.windows.assign(steps=study.windows["steps"].where(study.windows["first_step"] != 230, 3))
    assert counting_windows(replace(study, windows=cut))["first_step"].max() == 220
    only = study.windows[study.windows["first_step"] == 0]
    assert len(counting_windows(replace(study, windows=only))) == len(only)


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
        assert row.speedup.estimate == pytest.approx(expected, rel=0.01)  # the scatter is 2 %
        assert row.efficiency.estimate == pytest.approx(row.speedup.estimate / world_size)
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


def test_nothing_measured_gives_empty_tables_not_errors(odd_studies):
    for name in ("no cells", "only failed cells"):
        empty = odd_studies[name]
        for table in (time_to_accuracy, scaling, scaling_levels, closure, phase_costs):
            assert table(empty).empty
        assert memory_peaks(empty).empty


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


def test_costs_of_the_slowest_rank_are_among_those_of_all_ranks(study):
    own, ranks = phase_costs(study), rank_phase_costs(study)
    slowest = run_speeds(study)[["run", "slowest_rank"]]
    picked = ranks.merge(slowest, left_on=["run", "rank"], right_on=["run", "slowest_rank"])
    assert len(picked) == len(own)
    assert picked["seconds_per_step"].sum() == pytest.approx(own["seconds_per_step"].sum())


def test_last_and_best_values_are_those_of_the_records(study):
    table = finals(study).set_index("run")
    for run, history in study.evaluations.groupby("run", observed=True):
        assert table.loc[run, "value"] == history.sort_values("step")["value"].iloc[-1]
        assert table.loc[run, "best_value"] == history["value"].max()
    losses = finals(replace(study, cells=study.cells.assign(target_direction="lower"))).set_index("run")
    for run, history in study.evaluations.groupby("run", observed=True):
        assert losses.loc[run, "best_value"] == history["value"].min()
    assert not table["fixed_length"].any()


def test_bytes_are_those_of_the_rank_that_needs_most(study):
    of_arm = study.cells.set_index("run")[["arm", "world_size"]]
    state = kfac_bytes(study).set_index("run")["kfac_bytes"]
    assert set(state[of_arm.loc[state.index, "arm"] == "comm_opt"]) == {7_500_000}
    peaks = peak_bytes(study).set_index("run")
    fours = peaks.loc[of_arm.loc[peaks.index, "world_size"] == 4]
    assert set(fours["peak_bytes"]) == {306_000_000}
    assert set(peaks["kind"]) == {"rss_peak"}


def test_a_rule_with_several_evaluations_in_a_row_skips_runs_that_stopped_at_the_first(study):
    asked = replace(study, scoring=SCORINGS["sustained"])
    alive = time_to_accuracy(replace(asked, cells=study.cells.assign(stop_reason="epochs")))
    assert len(alive) == 27
    evaluations = study.evaluations
    reached = evaluations["value"] >= 0.95
    stopped = evaluations[~reached | ~reached.groupby(evaluations["run"]).cumsum().gt(1)]
    left = time_to_accuracy(replace(asked, evaluations=stopped))
    assert left.empty  # also of the point where one run missed: it alone would say "1 of 1 missed"


def test_scores_of_all_rules_come_from_the_same_runs(study):
    for scoring in SCORINGS.values():
        table = aggregated(replace(study, scoring=scoring, cells=study.cells.assign(stop_reason="epochs")))
        assert len(table) == 9
        assert (table["runs"] == 3).all()
        assert table.iloc[0, 0] == "sgd"  # in the order of every table, not by name
