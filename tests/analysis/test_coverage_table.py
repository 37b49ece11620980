"""Promise: the committed table of coverage is what the code does, and no design in blocks falls short in it.

`make coverage` makes the whole table; here some of its rows are made again, and simulated studies are written
as records and judged like any other.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from analysis.comparisons import comparisons
from analysis.metrics import time_to_accuracy
from jobs.experiments.coverage.cases import BLOCKS, LEVEL, RULE, UNPAIRED, rows
from jobs.experiments.coverage.page import page
from jobs.experiments.coverage.simulation import verdicts
from jobs.experiments.coverage.studies import Design, Studies
from jobs.experiments.coverage.table import line
from tests.analysis.hand_made import Run, hand_made

pytestmark = pytest.mark.slow  # simulates studies

RESULTS = Path(__file__).parents[2] / "results"
TABLE = list(csv.DictReader((RESULTS / "coverage.csv").read_text().splitlines()))


def key(one):
    return one["group"], one["case"], one["runs"], one["comparisons"]


def test_the_table_has_every_case_and_its_page_says_what_it_says():
    assert [key(one) for one in TABLE] == [(r.group, r.case, r.runs, str(r.comparisons)) for r in rows()]
    assert (RESULTS / "coverage.md").read_text() == page(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [
        (BLOCKS, "two speeds", "5", "1"),
        (BLOCKS, "one order in every block, 20 % drift", "6", "1"),
        (BLOCKS, "20 % interrupted", "6", "1"),
        (UNPAIRED, "the arm scatters 10 times as much", "6", "1"),
        (LEVEL, "10 % miss the target", "6", "1"),
        (RULE, "MLPerf's reference point", "5 and 10", "1"),
    ],
)
def test_a_row_made_again_is_the_committed_one(wanted):
    (row,) = [one for one in rows() if (one.group, one.case, one.runs, str(one.comparisons)) == wanted]
    (stored,) = [one for one in TABLE if key(one) == wanted]
    assert line(row) == stored


def test_no_speed_up_of_a_block_design_is_claimed_too_often_or_covered_too_rarely():
    short = [key(one) for one in TABLE if one["group"] == BLOCKS
             and one["finding"] not in ("right", "wide", "refused", "no interval")]  # fmt: skip
    assert short == []


def test_arms_one_after_the_other_are_refused_a_verdict_in_every_study():
    apart = [one for one in TABLE if "arm after arm" in one["case"] or "one order" in one["case"]]
    assert len(apart) == 9
    assert {one["finding"] for one in apart} == {"refused"}
    assert {one["false_claims"] for one in apart} == {"0"}


@pytest.mark.parametrize(
    "design",
    [
        Design((6, 6), place=0.2),
        Design((6, 6), interrupted=0.3),
        Design((6, 6), timed_out=0.2),
        Design((6, 6), missed=0.2, comparisons=2),
        Design((4, 5), blocks=False, order="at once"),
    ],
    ids=lambda design: f"{design.missed}-{design.interrupted}-{design.timed_out}-{design.blocks}",
)
def test_simulated_studies_get_the_verdicts_that_their_records_get(design, tmp_path):
    studies, effect = 3, 1.6
    drawn = Studies(design, np.random.default_rng(3), studies)
    seconds, states = drawn.seconds(effect), drawn.completed(effect)
    methods = ["sgd", "comm_opt", "dp_kfac"]
    for study in range(studies):
        runs = []
        for (arm, run), one in np.ndenumerate(drawn.logs[study]):
            if np.isnan(one):
                continue
            done, ended = (of[study, arm, run] for of in states)
            missed = bool(np.isinf(seconds[study, arm, run]))
            runs.append(
                Run(
                    methods[arm], 1, run, 1, 1.0 if missed else seconds[study, arm, run],
                    state="COMPLETED" if done else "TIMEOUT" if ended else "PREEMPTED", misses=missed,
                    allocation=f"job {run}" if design.blocks else "",
                    started=100.0 * drawn.slots[study, arm, run],
                )
            )  # fmt: skip
        stored = hand_made(tmp_path / str(study), runs)
        found = comparisons(stored, time_to_accuracy(stored))
        simulated = verdicts(drawn, study, seconds, states)
        for arm, one in simulated.items():
            same = found[methods[arm], 1]
            assert (one.verdict, bool(one.refused)) == (same.verdict, bool(same.refused))
            assert (one.speedup.low, one.speedup.high) == pytest.approx((same.speedup.low, same.speedup.high))
            assert one.holm_p == pytest.approx(same.holm_p)
