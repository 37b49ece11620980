"""Promise: arms are compared with the right baseline, in pairs if blocks allow it, and Holm's p is used.

Runs that did not complete are counted, and what their absence may have changed is marked; a run that was
stopped before the other arm arrived is not taken for slower.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from analysis.comparisons import baselines, compared, comparisons
from analysis.completeness import LeftOut
from analysis.metrics import arm_order, time_to_accuracy
from analysis.records.loading import load
from analysis.report.answers import answers, recommendation
from analysis.report.findings import cautions, findings
from analysis.report.tables import summary_table
from analysis.results import results
from analysis.statistics.intervals import MANN_WHITNEY, PAIRED_T, SIGNED_RANK
from tests.analysis.conftest import Plan
from tests.analysis.hand_made import Run, hand_made


def test_arms_are_measured_against_first_order_arms_of_their_setting_plain_sgd_first(study, fitting):
    assert arm_order(study) == ["sgd", "comm_opt", "dp_kfac"]
    assert baselines(study) == {"sgd": "sgd", "comm_opt": "sgd", "dp_kfac": "sgd"}
    cells = study.cells.assign(setting=study.cells["arm"])
    assert baselines(replace(study, cells=cells)) == {"sgd": "sgd"}
    with_nlcg = baselines(fitting("nlcg_by_batch"))
    assert with_nlcg
    assert {base.split()[0] for base in with_nlcg.values()} == {"sgd"}


def frame(values, blocks):
    return pd.DataFrame({"seconds": values, "block": blocks})


def test_pairs_are_used_where_their_exact_test_can_still_decide():
    rng = np.random.default_rng(0)
    blocks = [f"b{i}" for i in range(6)]
    top, bottom = (frame(np.exp(rng.normal(0, 0.1, 6)), blocks) for _ in range(2))
    assert compared(top, bottom, "seconds").method == SIGNED_RANK
    assert compared(top, bottom, "seconds", family=2).method == PAIRED_T  # 2 x 2 / 64 > 5 %
    assert compared(top, bottom.assign(block=""), "seconds").method == MANN_WHITNEY
    assert compared(top, bottom.assign(block="one"), "seconds").method == MANN_WHITNEY
    assert compared(top, bottom.assign(block=[f"x{i}" for i in range(6)]), "seconds").method == MANN_WHITNEY
    some = [*blocks[:5], ""]  # a run that is in no block has no partner
    assert compared(top.assign(block=some), bottom.assign(block=some), "seconds").method == MANN_WHITNEY
    assert compared(top.head(5), bottom.head(5), "seconds").method == PAIRED_T
    assert compared(top.head(3), bottom, "seconds").low is None  # unpaired ranks would mix up the blocks


def test_pairs_are_matched_by_block_and_are_those_that_both_arms_have():
    blocks = [f"b{i}" for i in range(6)]
    luck = np.array([1.0, 9.0, 3.0, 7.0, 2.0, 5.0])
    top, bottom = frame(2 * luck, blocks), frame(luck[::-1], blocks[::-1])
    interval = compared(top, bottom, "seconds")
    assert (interval.low, interval.estimate, interval.high) == pytest.approx((2, 2, 2))

    def of(names):
        return frame([1.0 + ord(name) for name in names], list(names))

    assert compared(of("abcdefgh"), of("abcdef"), "seconds").method == SIGNED_RANK
    assert compared(of("abcdefg"), of("bcdefgh"), "seconds").n == 6
    assert compared(of("abcdef"), of("efghij"), "seconds").low is None
    assert compared(of("abcdef"), of("ghijkl"), "seconds").method == MANN_WHITNEY


def test_a_verdict_needs_both_the_interval_and_the_adjusted_p(write_study):
    study = load(write_study(Plan(seeds=tuple(range(6)), world_sizes=(1,))))
    found = comparisons(study, time_to_accuracy(study))
    one = found["comm_opt", 1]
    assert one.speedup.p_value is not None
    assert one.holm_p is not None
    assert one.holm_p >= one.speedup.p_value
    clear = replace(one, speedup=replace(one.speedup, estimate=2.0, low=1.5, high=2.5), holm_p=0.01)
    assert clear.verdict == "faster"
    assert replace(clear, holm_p=0.06).verdict == "undecided"
    assert replace(clear, holm_p=0.05).verdict == "undecided"
    assert replace(clear, speedup=replace(clear.speedup, low=0.9)).verdict == "undecided"
    assert replace(clear, speedup=replace(clear.speedup, low=None)).verdict == "undecided"
    slow = replace(clear.speedup, estimate=0.5, low=0.4, high=0.6)
    assert replace(clear, speedup=slow).verdict == "slower"
    assert math.isclose(slow.scaled(100).high or 0, 60)


def left_out(**states: str) -> LeftOut:
    """Points of 20 started runs on two ranks; of each arm so many, such as `3 LOST`, are not scored."""
    rows = []
    for arm, text in states.items():
        number, state = text.split()
        rows += [(arm, state)] * int(number) + [(arm, "COMPLETED")] * (20 - int(number))
    cells = pd.DataFrame(rows, columns=["arm", "state"]).assign(world_size=2, valid=True)
    waiting = pd.DataFrame(
        {"arm": ["sgd"] * 2, "state": ["STAGED", "PENDING"], "world_size": 2, "valid": True}
    )
    return LeftOut(SimpleNamespace(cells=pd.concat([cells, waiting], ignore_index=True)))


@pytest.mark.parametrize(
    ("sgd", "comm_opt", "cautious"),
    [
        ("0 LOST", "0 LOST", False),
        ("1 LOST", "1 CANCELLED", False),
        ("2 LOST", "2 LOST", False),  # a tenth, of both
        ("1 LOST", "0 LOST", True),  # unequal
        ("5 LOST", "5 LOST", True),  # many
    ],
)
def test_many_or_unequally_many_lost_runs_are_a_caution(sgd, comm_opt, cautious):
    found = left_out(sgd=sgd, comm_opt=comm_opt)
    assert bool(found.caution("comm_opt", "sgd", 2)) == cautious
    assert found.at("sgd", 2) == ("" if sgd[0] == "0" else f"{sgd[0]} of 20")  # none of those that wait


@pytest.mark.parametrize(
    ("lost", "selected"),
    [("3 TIMEOUT", True), ("3 OOM", True), ("3 FAILED", True), ("2 TIMEOUT", False), ("9 PREEMPTED", False)],
)
def test_more_than_a_tenth_that_ended_by_their_own_doing_leave_a_selection(lost, selected):
    found = left_out(sgd="0 LOST", comm_opt=lost)
    assert bool(found.own_doing("comm_opt", "sgd", 2)) == selected
    assert bool(found.own_doing("sgd", "comm_opt", 2)) == selected


SEEDS = 8
ARRIVES = 20.0  # comm_opt, in seconds


def with_stopped(folder, *, at, misses, size=1, **changes):
    """sgd reaches the target after 40 s, except for the first `misses` seeds, which were stopped."""
    runs = []
    for seed in range(SEEDS):
        slot = {"allocation": f"b{seed}", "started": 1000.0 * seed}
        missed = seed < misses
        seconds = (at if missed else 40.0) / 10 * (1 + 0.01 * seed)
        runs.append(Run("sgd", size, seed, 10, seconds, misses=missed, **slot, **changes))
        runs.append(Run("comm_opt", size, seed, 5, ARRIVES / 5 * (1 + 0.01 * seed), **slot))
    return hand_made(folder, runs)


def only_comparison(one):
    (found,) = comparisons(one, time_to_accuracy(one)).values()
    return found


def test_two_of_eight_that_stopped_too_soon_leave_no_verdict(tmp_path):
    one = with_stopped(tmp_path, at=5.0, misses=2)
    found = only_comparison(one)
    assert found.speedup.excludes(1)  # with the misses as slowest
    assert (found.verdict, found.holm_p) == ("not judged", None)
    assert found.refused == (
        "2 of 8 runs of sgd stopped after 10 epochs and at most 5.05 s, sooner than the last run of "
        "comm_opt reached the target (21.4 s), so more epochs of sgd could change the order"
    )
    cells = one.cells.assign(
        stop_reason=one.cells["stop_reason"].where(one.cells["arm"] != "sgd", "diverged")
    )
    assert only_comparison(replace(one, cells=cells)).verdict == "faster"  # they never arrive


@pytest.mark.parametrize(("at", "misses"), [(30.0, 2), (19.0, 1), (30.0, SEEDS)])
def test_misses_that_outlasted_the_other_arm_or_change_nothing_are_slower(at, misses, tmp_path):
    found = only_comparison(with_stopped(tmp_path, at=at, misses=misses))
    assert (found.verdict, found.refused) == ("faster", "")


def test_an_arm_whose_runs_all_missed_is_slower_and_no_ratio_is_made_up(tmp_path):
    one = with_stopped(tmp_path, at=30.0, misses=SEEDS)
    assert findings(one) == [
        "comm_opt is faster than sgd on 1 rank: the median run of sgd did not reach the target "
        "(p = 0.00016 after Holm); an epoch is 1.33 times dearer."
    ]
    (row,) = summary_table(one).query("arm == 'comm_opt'").to_dict("records")
    assert (row["speedup"], row["verdict"]) == ("–", "faster")


def test_an_arm_of_which_every_run_stopped_too_soon_is_told_to_train_longer(tmp_path):
    one = with_stopped(tmp_path, at=5.0, misses=SEEDS)
    assert only_comparison(one).verdict == "not judged"
    shown = results(one)
    places = shown.places
    assert "more epochs of sgd could change the order" in answers(places)[0]
    assert "is not shown: 8 of 8 runs of sgd stopped after 10 epochs" in recommendation(shown)[0]
    assert "8 of 16 runs missed their target (sgd on 1 rank: 8 of 8 in 10 epochs)" in " ".join(cautions(one))
