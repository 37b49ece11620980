"""Promise: a workload's batch is a function of seed, epoch and step, in any world; nothing comes twice."""

from __future__ import annotations

import hashlib
from importlib import import_module
from itertools import chain
from typing import Any

import pytest
import torch

from harness.workloads import WORKLOADS
from harness.workloads.workload import Workload
from tests.harness.workloads.batch_files import options, share, write_cifar10
from tests.harness.workloads.coco_folders import LIMITS as COCO
from tests.harness.workloads.coco_folders import write_coco
from tests.harness.workloads.image_folders import LIMITS as IMAGENET
from tests.harness.workloads.image_folders import PATIENTS, write_images, write_patients
from tests.harness.workloads.sentences import SMALL as TRANSFORMER
from tests.harness.workloads.sentences import write_pairs
from tests.harness.workloads.texts import SMALL, write_texts

TEXT = {**SMALL, "tokenizer": "words.json", "vocabulary": 45, "sequence_length": 13}
CASES: dict[str, dict[str, Any]] = {
    "digits": {},
    "cifar10": {"train_examples": 600, "test_examples": 200, "model": "resnet8", "width": 0.25},
    "imagenet": {**IMAGENET, "model": "resnet50"},
    "coco": COCO,
    "brain_mri": PATIENTS,
    "bert": TEXT,
    "bert with next sentences": {**TEXT, "next_sentence": True},
    "gpt": TEXT,
    "multi30k": {**TRANSFORMER, "tokenizer": "words.json"},
}
BATCH = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name, write in (
        ("cifar10", write_cifar10), ("imagenet", write_images), ("coco", write_coco), ("bert", write_texts),
        ("brain_mri", write_patients), ("gpt", write_texts), ("multi30k", write_pairs),
    ):  # fmt: skip
        if name != "coco":
            (root / name).mkdir()
        write(root / name)
    return root


@pytest.fixture(params=CASES)
def build(request, folders):
    """Makes the workload of a rank; `case` is its name."""
    name = request.param.split()[0]
    description, data = WORKLOADS[name], {} if name == "digits" else {"data": str(folders / name)}
    maker = getattr(import_module(description.module), description.builder)

    def made(rank: int = 0, world_size: int = 1, seed: int = 3, **changes: Any) -> Workload:
        asked = options(name, **{**CASES[request.param], **data, **changes})
        return maker(asked, share(rank, world_size, BATCH, seed))

    made.case = request.param
    return made


def digests(batch: Any) -> list[str]:
    """Of each example of a batch; numbers that belong to no example are left out."""
    columns = [column for column in batch if not isinstance(column, float)]
    return [
        hashlib.sha256(b"".join(map(_bytes, example))).hexdigest() for example in zip(*columns, strict=True)
    ]


def _bytes(part: Any) -> bytes:
    return b"".join(map(_bytes, part.values())) if isinstance(part, dict) else part.numpy().tobytes()


def epoch(
    build, world_size: int = 1, number: int = 0, first: int = 0, steps: int = 8, **changes: Any
) -> list:
    """The first global batches, put together from all ranks, example by example."""
    ranks = [build(rank, world_size, **changes).batches(number, first) for rank in range(world_size)]
    together = zip(*(map(digests, batches) for batches in ranks), strict=True)
    return [list(chain(*parts)) for _, parts in zip(range(steps), together, strict=False)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_world_sees_the_same_global_batches(build, world_size):
    assert epoch(build, world_size) == epoch(build)


def test_every_example_comes_once_an_epoch_and_what_fills_no_batch_is_left_out(build):
    whole = epoch(build, steps=10_000)
    assert len(whole) == build().steps_per_epoch > 1
    assert {len(batch) for batch in whole} == {BATCH}
    assert len(set(chain(*whole))) == BATCH * len(whole)


def test_a_resumed_epoch_goes_on_where_it_was_left(build):
    whole, steps = epoch(build, 2, 3, steps=10_000), build().steps_per_epoch
    assert epoch(build, 2, 3, first=1) == whole[1:9]
    assert epoch(build, 2, 3, first=steps) == []


def test_epochs_and_seeds_differ_repeat_themselves_and_leave_torchs_generator_alone(build):
    before = torch.get_rng_state()
    assert epoch(build, number=4) == epoch(build, number=4)
    assert epoch(build, number=4) != epoch(build, number=5)
    assert epoch(build, number=4) != epoch(build, number=4, seed=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("build", ["imagenet", "coco"], indirect=True)
def test_workers_change_neither_order_nor_views(build):
    assert epoch(build, workers=2) == epoch(build)


@torch.no_grad()
@pytest.mark.parametrize("build", [case for case in CASES if case != "coco"], indirect=True)
def test_ranks_share_the_held_out_examples_which_are_the_same_for_every_seed(build):
    torch.manual_seed(0)
    model = build().model().eval()
    alone, count = build().evaluate(model)
    parts = [build(rank, 3, seed=8).evaluate(model) for rank in range(3)]
    assert sum(part for _, part in parts) == count > 0
    for metric, total in alone.items():
        assert sum(sums[metric] for sums, _ in parts) == pytest.approx(total, rel=1e-5)
