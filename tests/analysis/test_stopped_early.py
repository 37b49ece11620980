"""Promise: a run that was stopped before the other arm arrived is not taken for slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.comparisons import comparisons
from analysis.metrics import time_to_accuracy
from analysis.report.answers import answers, recommendation
from analysis.report.findings import cautions
from analysis.results import results
from tests.analysis.hand_made import Run, hand_made

SEEDS = 8
ARRIVES = 20.0  # comm_opt, in seconds


def study(folder, *, stopped, misses, size=1, **changes):
    """sgd reaches the target after 40 s, except for the first `misses` seeds, which were stopped."""
    runs = []
    for seed in range(SEEDS):
        slot = {"allocation": f"b{seed}", "started": 1000.0 * seed}
        missed = seed < misses
        seconds = (stopped if missed else 40.0) / 10 * (1 + 0.01 * seed)
        runs.append(Run("sgd", size, seed, 10, seconds, misses=missed, **slot, **changes))
        runs.append(Run("comm_opt", size, seed, 5, ARRIVES / 5 * (1 + 0.01 * seed), **slot))
    return hand_made(folder, runs)


def compared(one):
    (found,) = comparisons(one, time_to_accuracy(one)).values()
    return found


def test_two_of_eight_that_stopped_too_soon_leave_no_verdict(tmp_path):
    one = study(tmp_path, stopped=5.0, misses=2)
    found = compared(one)
    assert found.speedup.excludes(1)  # with the misses as slowest
    assert (found.verdict, found.holm_p) == ("not judged", None)
    assert found.refused == (
        "2 of 8 runs of sgd stopped after 10 epochs and at most 5.05 s, sooner than the last run of "
        "comm_opt reached the target (21.4 s), so more epochs of sgd could change the order"
    )
    cells = one.cells.assign(
        stop_reason=one.cells["stop_reason"].where(one.cells["arm"] != "sgd", "diverged")
    )
    assert compared(replace(one, cells=cells)).verdict == "faster"  # diverged runs would never have arrived


@pytest.mark.parametrize(("stopped", "misses"), [(30.0, 2), (19.0, 1)])
def test_misses_that_outlasted_the_other_arm_or_change_nothing_are_slower(
    stopped, misses, tmp_path
):
    found = compared(study(tmp_path, stopped=stopped, misses=misses))
    assert (found.verdict, found.refused) == ("faster", "")


def test_an_arm_of_which_every_run_stopped_too_soon_is_told_to_train_longer(tmp_path):
    one = study(tmp_path, stopped=5.0, misses=SEEDS)
    assert compared(one).verdict == "not judged"
    shown = results(one)
    places = shown.places
    assert "more epochs of sgd could change the order" in answers(places)[0]
    assert "is not shown: 8 of 8 runs of sgd stopped after 10 epochs" in recommendation(shown)[0]
    assert "8 of 16 runs missed their target (sgd on 1: 8 of 8 in 10 epochs)" in " ".join(cautions(one))
