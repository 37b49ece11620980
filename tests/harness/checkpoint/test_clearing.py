"""Promise: a completed run leaves no checkpoints, and one that is not known to be completed all of them."""

import pytest

from harness.runs.checkpoint_store import CheckpointStore
from harness.runs.store import Attempt
from harness.training import worker
from harness.training.train import Result
from tests.harness.checkpoint.runs import cell, new_attempt


@pytest.fixture
def attempts(tmp_path, monkeypatch):
    """A third attempt that goes on from the second, which was to go on from the first; all have saved."""
    monkeypatch.setattr(worker, "SignalRequests", lambda: None)
    found = [new_attempt(tmp_path, cell("sgd", 1), continues) for continues in (None, 1, 2)]
    for attempt in found:
        saved = CheckpointStore(attempt).folder / "step-00000012"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
    return found


@pytest.fixture
def train_to(monkeypatch):
    def end(reason):
        result = Result(reason == "target", reason, 1.0, 0.9, 20, "")
        monkeypatch.setattr(worker, "_train", lambda *_: result)

    return end


def left(attempts):
    return [len(CheckpointStore(attempt).newest_first()) for attempt in attempts]


def test_a_completed_run_clears_all_attempts_that_it_went_on_through(attempts, train_to):
    train_to("target")
    assert worker.run_rank(attempts[-1], 0, 1, 0, 1) == 0
    assert left(attempts) == [0, 0, 0]


def test_a_run_that_was_stopped_keeps_them(attempts, train_to):
    train_to("preempted")
    assert worker.run_rank(attempts[-1], 0, 1, 0, 1) == 75
    assert left(attempts) == [1, 1, 1]


def test_a_result_that_cannot_be_written_costs_no_checkpoint(attempts, train_to, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    train_to("target")
    monkeypatch.setattr(Attempt, "write", refuse)
    with pytest.raises(OSError, match="No space left"):
        worker.run_rank(attempts[-1], 0, 1, 0, 1)
    assert left(attempts) == [1, 1, 1]
