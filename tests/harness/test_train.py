"""Promise: the training loop learns on real data, accounts for its time, and records why it stops."""

from __future__ import annotations

import hashlib
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from harness.cell import Cell
from harness.runs.attempt_outcome import Result
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import EvalRecord, PhaseRecord, Record
from harness.training.train import Trainer, _digest
from harness.training.world import World
from harness.workloads.digits.digits import build, read_table
from harness.workloads.workload import Share
from kfac_core.config import PAPERS
from kfac_core.phases import KFAC_PHASES

KFAC = {"factor_update_steps": 1, "inverse_update_steps": 5, "damping": 0.01}


def cell(**changes: Any) -> Cell:
    fields: dict[str, Any] = {
        "sweep": "test", "method": "m", "workload": "digits", "world_size": 1,
        "target": {"metric": "accuracy", "at_least": 0.95},
        "training": {"global_batch_size": 256, "epochs": 40},
        "optimizer": {"lr": 0.1, "warmup_epochs": 2},
    }  # fmt: skip
    return Cell.model_validate({**fields, **changes})


def train_on_rank(rank: int, world_size: int, cell: Cell, folder: str) -> tuple[Result, list[Record]]:
    records: list[Record] = []
    world = World(rank, world_size, torch.device("cpu"), "gloo")
    trainer = Trainer(
        cell, world, HeartbeatWriter(Path(folder) / f"heartbeat-{rank}-{cell.id}"), records.append
    )
    return trainer.run(), records


@pytest.mark.parametrize(
    ("optimizer", "kfac"),
    [
        pytest.param({"lr": 0.1, "warmup_epochs": 2}, None, id="sgd"),
        pytest.param({"lr": 0.1, "warmup_epochs": 2}, KFAC, id="kfac"),
        *(
            pytest.param(optimizer, kfac, id=name, marks=pytest.mark.slow)
            for name, optimizer, kfac in [
                ("adam", {"lr": 0.003, "name": "adam"}, None),
                ("rmsprop", {"lr": 0.003, "name": "rmsprop", "momentum": 0.0}, None),
                ("lars", {"lr": 10.0, "name": "lars"}, None),
                ("lamb", {"lr": 0.01, "name": "lamb"}, None),
                ("muon", {"lr": 0.01, "name": "muon"}, None),
                ("soap", {"lr": 0.003, "name": "soap"}, None),
                ("shampoo", {"lr": 0.1, "name": "shampoo"}, None),
                ("cosine", {"lr": 0.1, "schedule": {"shape": "cosine", "warmup": 2}}, None),
                ("nlcg", {"lr": 0.2, "name": "nlcg"}, None),
                ("nlcg-kfac", {"lr": 0.1, "name": "nlcg"}, {**PAPERS["sc20"], **KFAC, "kl_clip": None}),
            ]
        ),
    ],
)
def test_digits_are_learned(optimizer, kfac, tmp_path):
    result, records = train_on_rank(0, 1, cell(optimizer=optimizer, kfac=kfac), str(tmp_path))
    evaluations = [record for record in records if isinstance(record, EvalRecord)]
    assert result.reached_target
    assert result.stop_reason == "target"
    assert evaluations[-1].value == result.value >= 0.95
    assert list(evaluations[-1].metrics) == ["accuracy", "loss"]
    assert evaluations[-1].metrics["accuracy"] == result.value
    assert 0 < evaluations[-1].metrics["loss"] < 1
    assert evaluations[-1].train_seconds == result.train_seconds
    assert evaluations[-1].samples == result.steps * 256
    assert evaluations[-1].train_loss < evaluations[0].train_loss


@pytest.mark.parametrize("world_size", [1, 2])
def test_phases_and_other_add_up_to_the_wall_on_every_rank(world, world_size, tmp_path):
    spec = cell(kfac=KFAC, world_size=world_size, training={"global_batch_size": 128, "epochs": 2})
    ranks = world(world_size).run(train_on_rank, spec, str(tmp_path))
    evaluated = [record for record in ranks[0][1] if isinstance(record, EvalRecord)]
    assert all(record.samples == 128 * record.step for record in evaluated)  # of all ranks
    for _, records in ranks:
        windows = [record for record in records if isinstance(record, PhaseRecord)]
        assert sum(window.steps for window in windows) == 2 * 11
        assert sum(window.samples for window in windows) == 2 * 11 * 128 // world_size
        assert [window.first_step for window in windows] == list(range(0, 22, 5))
        assert all(set(KFAC_PHASES) <= set(window.seconds) for window in windows)
        # Medians: a busy machine may stop a rank between two readings of a clock, in some of the windows.
        gaps = [abs(sum(window.seconds.values()) / window.wall_seconds - 1) for window in windows]
        assert median(gaps) < 0.02, gaps
        assert median(window.seconds["other"] / window.wall_seconds for window in windows) < 0.1


@pytest.mark.parametrize("strategy", [None, "comm_opt", "dp_kfac"])
def test_two_ranks_train_the_same_bits_however_gradients_are_averaged(world, strategy, tmp_path):
    training = {"global_batch_size": 128, "epochs": 1, "stop_at_target": False}
    digests = set()
    for way in ("overlapped", "flat"):  # the halves of a sum of two are exact, in any order
        kfac = None if strategy is None else {**KFAC, "strategy": strategy}
        spec = cell(kfac=kfac, world_size=2, training={**training, "gradient_averaging": way})
        results = world(2).run(train_on_rank, spec, str(tmp_path))
        digests |= {result.parameters_sha256 for result, _ in results}
    assert len(digests) == 1


def test_the_digest_is_of_the_bytes_of_all_parameters_also_of_a_single_number():
    model = nn.Sequential(nn.Linear(3, 2), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    assert _digest(model) == hashlib.sha256(content).hexdigest()


def test_ranks_together_learn_what_one_rank_learns(world, tmp_path):
    training = {"global_batch_size": 128, "epochs": 2, "stop_at_target": False}
    values = {}
    for world_size in (1, 2, 4):
        spec = cell(kfac=KFAC, world_size=world_size, training=training)
        (_, records), *_ = world(world_size).run(train_on_rank, spec, str(tmp_path))
        values[world_size] = [r.train_loss for r in records if isinstance(r, EvalRecord)]
    # float32 sums in another order: equal to rounding, after 22 steps of a nonlinear iteration
    assert values[2] == pytest.approx(values[1], rel=1e-5)
    assert values[4] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.slow
def test_kfac_starts_at_its_epoch_and_before_it_training_equals_the_optimizer_alone(tmp_path):
    training = {"global_batch_size": 128, "epochs": 4, "stop_at_target": False, "window_steps": 11}
    late = {**training, "kfac_start_epoch": 2}
    _, alone = train_on_rank(0, 1, cell(training=training), str(tmp_path))
    _, records = train_on_rank(0, 1, cell(training=late, kfac=KFAC), str(tmp_path))
    values, wanted = ([r.train_loss for r in part if isinstance(r, EvalRecord)] for part in (records, alone))
    assert values[:2] == wanted[:2]
    assert values[2] != wanted[2]
    windows = [record for record in records if isinstance(record, PhaseRecord)]  # one an epoch
    assert [set(KFAC_PHASES) & set(window.seconds) for window in windows[:2]] == [set(), set()]
    # F = 1, E = 5: counted from K-FAC's start, not from the run's
    assert [window.calls["inverse_compute"] for window in windows[2:]] == [3, 2]
    assert all(set(KFAC_PHASES) <= set(window.seconds) for window in windows[2:])


@pytest.mark.parametrize("kfac", [None, {**PAPERS["sc20"], **KFAC, "kl_clip": None}])
def test_kfac_start_epoch_without_kfac_is_an_error(kfac):
    training = {"global_batch_size": 128, "epochs": 4, "kfac_start_epoch": 2}
    name = "nlcg" if kfac else "sgd"
    with pytest.raises(ValueError, match=r"kfac_start_epoch=2\.0 has no meaning"):
        cell(training=training, kfac=kfac, optimizer={"lr": 0.1, "name": name})


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(tmp_path):
    result, _ = train_on_rank(0, 1, cell(optimizer={"lr": 1e6}), str(tmp_path))
    assert result.stop_reason == "diverged"
    assert not result.reached_target


@pytest.mark.slow
def test_evaluations_within_an_epoch_change_no_bit_of_the_training(tmp_path):
    training = {"global_batch_size": 256, "epochs": 3, "stop_at_target": False}
    found = {}
    for every in (1, 0.4):
        one = cell(training={**training, "evaluate_every_epochs": every}, kfac=KFAC)
        result, records = train_on_rank(0, 1, one, str(tmp_path))
        rows = [record for record in records if isinstance(record, EvalRecord)]
        found[every] = (
            result.parameters_sha256,
            [(row.step, row.epoch) for row in rows],
            {row.step: row.value for row in rows},
        )
    assert found[0.4][0] == found[1][0]
    assert found[1][1] == [(5, 1.0), (10, 2.0), (15, 3.0)]
    assert [step for step, _ in found[0.4][1]] == [2, 4, 6, 8, 10, 12, 14, 15]
    assert all(epoch == step / 5 for step, epoch in found[0.4][1])
    assert found[0.4][2][10] == found[1][2][10]
    assert cell(training={**training, "evaluate_every_epochs": 2.0}).id == (
        cell(training={**training, "evaluate_every_epochs": 2}).id
    )


def test_ranks_see_every_example_of_an_epoch_once_and_the_same_global_batches():
    def epoch(world_size: int) -> list[torch.Tensor]:
        shares = [Share(r, world_size, 64 // world_size, 3, torch.device("cpu")) for r in range(world_size)]
        ranks = [list(build({"width": 4, "network": "small"}, share).batches(1)) for share in shares]
        return [torch.cat([x for x, _ in parts]) for parts in zip(*ranks, strict=True)]

    for one, many in zip(epoch(1), epoch(4), strict=True):
        assert torch.equal(one, many)
    seen = torch.cat(epoch(1)).flatten(1)
    data = build({"width": 4, "network": "small"}, Share(0, 1, 1, 0, torch.device("cpu")))
    pool = data._train[0].flatten(1)
    assert len(seen) == 1437 // 64 * 64
    counts = {row: int((pool == torch.tensor(row)).all(1).sum()) for row in map(tuple, pool.tolist())}
    for row in map(tuple, seen.tolist()):
        counts[row] -= 1
    assert min(counts.values()) >= 0


def test_held_out_images_are_in_no_training_batch():
    data = build({"width": 4, "network": "small"}, Share(0, 1, 1, 0, torch.device("cpu")))
    assert (len(data._train[1]), len(data._test[1])) == (1437, 360)


def test_the_images_are_those_that_scikit_learn_loads():
    images, labels = load_digits(return_X_y=True)
    table = read_table()
    assert np.array_equal(table[:, :-1], images)
    assert np.array_equal(table[:, -1], labels)
