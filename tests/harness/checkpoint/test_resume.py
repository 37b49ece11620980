"""Promise: a stopped and resumed run equals the uninterrupted run bit for bit."""

from __future__ import annotations

from functools import partial

import pytest

from harness.runs.records import SegmentRecord
from tests.harness.checkpoint.runs import METHODS, cell, new_attempt, train


@pytest.mark.parametrize(
    ("method", "world_size"), [("comm_opt", 1), *((method, 2) for method in METHODS), ("comm_opt", 4)]
)
def test_parameters_state_and_records_are_those_of_an_uninterrupted_run(world, tmp_path, method, world_size):
    ranks, spec = world(world_size), cell(method, world_size)
    whole = ranks.run(train, spec, new_attempt(tmp_path / "whole", spec))
    attempt = new_attempt(tmp_path / "cut", spec)
    # 13: in the middle of an epoch of 5 steps, of a window, of F = 2 and E = 5; 15: on an epoch's first step
    stopped = [ranks.run(partial(train, stop_before=step), spec, attempt) for step in (13, 15)]
    resumed = ranks.run(train, spec, attempt)
    assert [runs[0].result.stop_reason for runs in stopped] == ["preempted"] * 2
    for rank in range(world_size):
        assert resumed[rank].bits == whole[rank].bits
        assert resumed[rank].result.value == whole[rank].result.value
        parts = [*(runs[rank] for runs in stopped), resumed[rank]]
        assert [number for part in parts for number in part.numbers()] == whole[rank].numbers()
        segments = [part.records[0] for part in parts]
        assert [(s.segment, s.first_step, s.bitwise) for s in segments if isinstance(s, SegmentRecord)] == [
            (0, 0, True), (1, 13, True), (2, 15, True)
        ]  # fmt: skip
