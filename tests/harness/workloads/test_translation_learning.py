"""Promise: translation is learned; two ranks take the steps of one; a stopped run goes on bit for bit."""

from __future__ import annotations

import json
from functools import partial

import pytest

from harness.cli import main
from harness.runs.records import EvalRecord
from tests.harness.checkpoint.runs import cell, new_attempt, train
from tests.harness.workloads.sentences import SMALL

pytestmark = pytest.mark.slow

SIZE = {**SMALL, "hidden": 32, "feed_forward": 64, "train_examples": 256, "test_examples": 40, "longest": 9}
KFAC = {
    "damping": 0.003, "factor_update_steps": 2, "inverse_update_steps": 4,
    "skip": ["source_embedding", "target_embedding", "head"],
}  # fmt: skip


def running(world_size, kfac, **changes):
    """A cell of 16 steps in two epochs on so many ranks."""
    fields = {
        "workload": {"name": "multi30k", "options": {**SIZE, "data": "synthetic", **changes}},
        "target": {"metric": "loss", "at_most": 0.1}, "optimizer": {"lr": 0.1},
        "training": {"global_batch_size": 32, "epochs": 2, "window_steps": 5},
    }  # fmt: skip
    return cell("sgd", world_size, **fields, **({"kfac": KFAC} if kfac else {}))


@pytest.mark.parametrize("kfac", [False, True])
def test_two_ranks_take_the_steps_of_one(world, tmp_path, kfac):
    """With unequal numbers of tokens on the ranks, and K-FAC's factors of padded batches."""
    evaluations = {}
    for size in (1, 2):
        mine = running(size, kfac)
        run = world(size).run(train, mine, new_attempt(tmp_path / str(size), mine))[0]
        evaluations[size] = [record for record in run.records if isinstance(record, EvalRecord)]
    for one, other in zip(evaluations[1], evaluations[2], strict=True):
        assert other.train_loss == pytest.approx(one.train_loss, rel=1e-4)
        assert other.value == pytest.approx(one.value, rel=1e-3)
    first, second = evaluations[1]
    assert second.value < first.value < 3.69  # log 40, of tokens that are equally likely


def test_a_run_that_was_stopped_goes_on_bit_for_bit(world, tmp_path):
    mine = running(1, kfac=True, dropout=0.1)
    (whole,) = world(1).run(train, mine, new_attempt(tmp_path / "whole", mine))
    attempt = new_attempt(tmp_path / "cut", mine)
    world(1).run(partial(train, stop_before=11), mine, attempt)  # in the middle of the second epoch
    (rest,) = world(1).run(train, mine, attempt)
    assert rest.bits == whole.bits
    assert rest.result.value == whole.result.value


SWEEP = """\
sweep: tiny
workload:
  name: multi30k
  options: {data: synthetic, layers: 1, hidden: 16, feed_forward: 16, heads: 2, vocabulary: 40, longest: 8,
            train_examples: 64, test_examples: 20, bleu: true}
target: {metric: bleu, at_least: 99}
training: {global_batch_size: 16, epochs: 1}
optimizer: {lr: 0.1}
kfac: {factor_update_steps: 1, inverse_update_steps: 2, skip: [source_embedding, target_embedding, head]}
methods: [{name: comm_opt, kfac: {strategy: comm_opt}}]
grid: {world_size: [1, 2]}
repeats: 1
"""


def test_runs_on_one_and_two_ranks_leave_their_records_and_a_bleu(tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    file, runs = tmp_path / "s.yaml", tmp_path / "runs"
    file.write_text(SWEEP)
    assert main(["run", "-f", str(file), "--runs", str(runs)]) == 0, capsys.readouterr()
    scores = []
    for size in (1, 2):
        (attempt,) = runs.glob(f"tiny/comm_opt-p{size}-*/attempt-1")
        ranks = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(attempt.glob("rank-*.jsonl"))
        ]
        assert [sum(record["kind"] == "phases" for record in records) for records in ranks] == [2] * size
        (evaluation,) = (record for record in ranks[0] if record["kind"] == "evaluation")
        assert (evaluation["metric"], evaluation["direction"]) == ("bleu", "higher")
        scores.append(evaluation["value"])
    # a token that is nearly as likely as another may turn with the order of a sum
    assert scores[1] == pytest.approx(scores[0], abs=1.0)
