"""Promise: runs that did not complete are counted, and what their absence may have changed is marked."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from analysis.completeness import LeftOut


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
