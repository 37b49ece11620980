"""Promise: real text is learned, by LAMB and with K-FAC, and on two ranks what one rank learns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from harness.cell import Cell
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import EvalRecord, Record
from harness.training.train import Trainer
from harness.training.world import World
from harness.workloads import WORKLOADS
from harness.workloads.models.language import bert
from harness.workloads.models.weights import save_weights
from kfac_core.config import PAPERS

pytestmark = pytest.mark.slow

SIZE = {"layers": 1, "hidden": 64, "heads": 4, "vocabulary": 512, "sequence_length": 64, "dropout": 0.0}
FEW = {**SIZE, "hidden": 32, "data": "embedded", "train_examples": 128, "test_examples": 32}
"""Four steps an epoch in batches of 32: for what is compared and need not learn much."""
KFAC = {**PAPERS["sc20"], "damping": 0.003, "factor_update_steps": 5, "inverse_update_steps": 25}
LAMB = {"name": "lamb", "lr": 0.02, "warmup_epochs": 0.5}
SGD = {"lr": 0.3, "warmup_epochs": 0.5}
SKIP = {"bert": ("bert.embeddings", "cls"), "gpt": ("transformer.wte", "transformer.wpe", "lm_head")}


def train(rank: int, world_size: int, name: str, changes: dict, folder: str, cache: str) -> list[EvalRecord]:
    os.environ["KRONSCALE_CACHE"] = cache  # the world may have started before this test's cache was named
    fields = {
        "sweep": "test", "method": "m", "world_size": world_size,
        "workload": {"name": name, "options": {**SIZE, "data": "embedded", "test_examples": 128}},
        "target": {"metric": "loss", "at_most": 0.1},
        "training": {"global_batch_size": 64, "epochs": 2},
    }  # fmt: skip
    records: list[Record] = []
    world = World(rank, world_size, torch.device("cpu"), "gloo")
    heartbeat = HeartbeatWriter(Path(folder) / f"heartbeat-{rank}-{world_size}")
    Trainer(Cell.model_validate({**fields, **changes}), world, heartbeat, records.append).run()
    return [record for record in records if isinstance(record, EvalRecord)]


# What the frequencies of the tokens alone give is 5.26.
@pytest.mark.parametrize(
    ("name", "optimizer", "largest"), [("gpt", SGD, [4.8]), ("bert", LAMB, [5.25, 5.08])]
)
def test_an_epoch_or_two_bring_the_loss_down(world, tmp_path, token_cache, name, optimizer, largest):
    changes = {
        "optimizer": optimizer, "kfac": {**KFAC, "skip": SKIP[name]},
        "training": {"global_batch_size": 64, "epochs": len(largest)},
    }  # fmt: skip
    (records,) = world(1).run(train, name, changes, str(tmp_path), str(token_cache))
    assert [one.value < most for one, most in zip(records, largest, strict=True)] == [True] * len(largest)


PHASES = {
    "optimizer": {
        "name": "lamb", "lr": 0.1, "schedule": {"shape": "polynomial", "power": 0.5, "warmup": 0.5},
    },
    "kfac": {**KFAC, "factor_update_steps": 1, "inverse_update_steps": 2,
             "skip": ("bert.embeddings", "cls.predictions")},
    "training": {"global_batch_size": 32, "epochs": 2, "accumulate": 4, "factor_micro_batches": 2},
}  # fmt: skip


def test_both_of_berts_losses_from_phase_one_weights_on_two_ranks_as_on_one(world, tmp_path, token_cache):
    """The second phase as published, in small; on two ranks half as many micro-batches."""
    small = {**FEW, "next_sentence": True, "positions": 64}
    torch.manual_seed(5)
    first = bert({**WORKLOADS["bert"].options, **small, "sequence_length": 16})
    save_weights(first, tmp_path)
    options = {**small, "sequence_length": 64, "start": str(tmp_path)}
    changes = {**PHASES, "workload": {"name": "bert", "options": options}}
    halves = {**changes, "training": {**PHASES["training"], "accumulate": 2, "factor_micro_batches": None}}
    whole = {**changes, "training": {**PHASES["training"], "factor_micro_batches": None}}
    (alone,), (both, _), (some,) = (
        world(size).run(train, "bert", fields, str(tmp_path), str(token_cache))
        for size, fields in ((1, whole), (2, halves), (1, changes))
    )
    names = {"accuracy", "loss", "next_sentence_accuracy", "next_sentence_loss"}
    for two_ranks, one_rank in zip(both, alone, strict=True):
        assert two_ranks.train_loss == pytest.approx(one_rank.train_loss, rel=1e-4)
        assert two_ranks.metrics is not None
        assert two_ranks.metrics.keys() == names
        assert two_ranks.metrics == pytest.approx(one_rank.metrics, rel=1e-2)
        assert two_ranks.value == two_ranks.metrics["loss"] == pytest.approx(one_rank.value, rel=1e-4)
    assert 0.5 < alone[0].metrics["next_sentence_loss"] < 1.0  # ln 2 = 0.69 for a guess
    assert some[1].train_loss != alone[1].train_loss
    assert some[1].train_loss == pytest.approx(alone[1].train_loss, rel=0.05)
    assert alone[1].train_loss < alone[0].train_loss
