"""Promise: arms are compared with the right baseline, in pairs if blocks allow it, and Holm's p is used."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.comparisons import baselines, compared, comparisons
from analysis.metrics import arm_order, time_to_accuracy
from analysis.records.loading import load
from analysis.statistics.intervals import MANN_WHITNEY, PAIRED_T, SIGNED_RANK
from tests.analysis.conftest import Plan


def test_arms_are_measured_against_first_order_arms_of_their_setting_plain_sgd_first(study, fitting):
    assert arm_order(study) == ["sgd", "comm_opt", "dp_kfac"]
    assert baselines(study) == {"sgd": "sgd", "comm_opt": "sgd", "dp_kfac": "sgd"}
    cells = study.cells.assign(setting=study.cells["arm"])
    assert baselines(replace(study, cells=cells)) == {"sgd": "sgd"}
    with_nlcg = baselines(fitting("nlcg_by_batch"))
    assert with_nlcg
    assert {base.split()[0] for base in with_nlcg.values()} == {"sgd"}


def test_speed_up_over_sgd_has_an_interval_only_where_it_may(study):
    found = comparisons(study, time_to_accuracy(study))
    assert set(found) == {(arm, p) for arm in ("comm_opt", "dp_kfac") for p in (1, 2, 4)}
    for one in found.values():
        assert (one.speedup.low, one.speedup.high, one.holm_p) == (None, None, None)
    assert found["comm_opt", 1].speedup.method == "Hodges-Lehmann on logs, n=3: no interval"
    assert "missed" in found["comm_opt", 4].speedup.method  # half of the averages of pairs hold SGD's miss


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
