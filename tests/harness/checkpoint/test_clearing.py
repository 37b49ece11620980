"""Promise: a completed run removes its checkpoints, any other run keeps all of them."""

import shutil

import pytest

from harness.runs.attempt_outcome import Result
from harness.runs.checkpoint_store import CheckpointStore
from harness.runs.store import Attempt
from harness.training import worker
from tests.harness.checkpoint.runs import cell, new_attempt


@pytest.fixture
def attempts(tmp_path, monkeypatch):
    """A third attempt that resumes the second, which resumes the first; all have saved."""
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


def remaining(attempts):
    return [len(CheckpointStore(attempt).newest_first()) for attempt in attempts]


def test_a_completed_run_clears_the_checkpoints_of_all_its_attempts(attempts, train_to):
    train_to("target")
    assert worker.run_rank(attempts[-1], 0, 1, 0, 1) == 0
    assert remaining(attempts) == [0, 0, 0]


def test_a_run_completes_though_an_earlier_attempt_was_deleted(attempts, train_to):
    shutil.rmtree(attempts[0].path)
    train_to("target")
    assert worker.run_rank(attempts[-1], 0, 1, 0, 1) == 0
    assert attempts[-1].read("result.json")["reached_target"] is True


def test_a_stopped_run_keeps_them(attempts, train_to):
    train_to("preempted")
    assert worker.run_rank(attempts[-1], 0, 1, 0, 1) == 75
    assert remaining(attempts) == [1, 1, 1]


def test_a_result_that_cannot_be_written_costs_no_checkpoint(attempts, train_to, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    train_to("target")
    monkeypatch.setattr(Attempt, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        worker.run_rank(attempts[-1], 0, 1, 0, 1)
    assert remaining(attempts) == [1, 1, 1]
