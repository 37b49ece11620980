"""Promise: rates follow SC20's schedule, losses are means, and a run ends for the reason that it gives."""

from __future__ import annotations

import math

import pytest

from harness.cell import Optimizer
from harness.runs.records import EvalRecord
from harness.training import train
from harness.training.optimizers import learning_rate
from tests.harness.test_train import cell, train_on_rank

SC20 = {"lr": 0.1, "warmup_epochs": 2, "decay_epochs": (6, 4), "decay_factor": 0.1}


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.02), (10, 0.06), (19, 0.096), (20, 0.1), (39, 0.1), (40, 0.01), (60, 0.001)]
)
def test_rates_rise_from_a_fifth_and_fall_at_the_start_of_each_epoch_that_is_named(step, rate):
    """Ten steps an epoch; from a fifth of the peak over two epochs, then a tenth at 4 and 6 (SC20, VI)."""
    assert learning_rate(Optimizer(**SC20), 4, step, 10, 8) == pytest.approx(rate)
    assert learning_rate(Optimizer(**SC20, lr_scaling="linear"), 4, step, 10, 8) == pytest.approx(4 * rate)


def evaluations(records):
    return [record for record in records if isinstance(record, EvalRecord)]


def test_the_training_loss_is_the_mean_over_the_steps_since_the_last_evaluation(tmp_path):
    """With a rate of next to nothing it stays at that of ten equally likely digits."""
    still = cell(optimizer={"lr": 1e-9}, training={"global_batch_size": 256, "epochs": 3})
    _, records = train_on_rank(0, 1, still, str(tmp_path))
    losses = [record.train_loss for record in evaluations(records)]
    assert losses == pytest.approx([math.log(10)] * 3, rel=0.1)


@pytest.mark.parametrize(
    ("found", "stops", "ended"),
    [
        ((0.99, 1.0), True, ("target", True, 5)),
        ((0.99, 1.0), False, ("epochs", True, 10)),
        ((0.99, math.nan), True, ("diverged", False, 5)),  # its parameters are not finite
        ((0.5, 1.0), True, ("epochs", False, 10)),
    ],
)
def test_a_run_ends_at_its_target_only_if_it_may_and_never_reaches_it_diverged(
    found, stops, ended, tmp_path, monkeypatch
):
    accuracy, loss = found
    monkeypatch.setattr(train, "evaluate", lambda *_: ({"accuracy": accuracy, "loss": 1.0}, loss))
    spec = cell(training={"global_batch_size": 256, "epochs": 2, "stop_at_target": stops})
    result, _ = train_on_rank(0, 1, spec, str(tmp_path))
    assert (result.stop_reason, result.reached_target, result.steps) == ended
