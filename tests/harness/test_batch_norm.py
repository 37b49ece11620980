"""Promise: batch normalisation over all ranks is that of one rank with the whole batch, forward and backward.

The reference is torch's own layer on the whole batch in one process, in float64.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.cell import Cell
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import PhaseRecord, Record
from harness.training.batch_norm import SynchronisedBatchNorm, synchronise_batch_norm
from harness.training.train import Trainer
from harness.training.world import World
from kfac_core.collectives import Communicator, SingleCommunicator, connect
from kfac_core.collectives.mpi import MPICommunicator
from tests.harness.workloads.batch_files import options

CHANNELS = 5
SIZES = {2: [7, 2], 3: [1, 0, 8]}
"""Local batches by world size; the whole batch is the same. A rank may have one example, or none."""


def network(kind: str) -> nn.Module:
    """Two normalisations, so that a gradient goes through one to the other."""
    torch.manual_seed(1)
    if kind == "rows":
        layers = [nn.Linear(4, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Tanh(), nn.Linear(CHANNELS, 3)]
        last: nn.Module = nn.BatchNorm1d(3, affine=False)
    else:
        momentum = None if kind == "cumulative" else 0.3
        layers = [
            nn.Conv2d(2, CHANNELS, 3), nn.BatchNorm2d(CHANNELS, momentum=momentum), nn.ReLU(),
            nn.Conv2d(CHANNELS, 3, 2),
        ]  # fmt: skip
        last = nn.BatchNorm2d(3, momentum=momentum)
    model = nn.Sequential(*layers, last).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.uniform_(module.bias)
    return model


def whole_batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """Inputs far from zero, where sums of squares would cancel, and a weight of each output in the loss."""
    generator = torch.Generator().manual_seed(step)
    shape = (9, 4) if kind == "rows" else (9, 2, 6, 5)
    inputs = torch.randn(*shape, generator=generator, dtype=torch.float64) * 2 + 100
    outputs = (9, 3) if kind == "rows" else (9, 3, 3, 2)
    return inputs, torch.randn(*outputs, generator=generator, dtype=torch.float64)


def two_steps(model: nn.Module, kind: str, own: slice) -> list[Tensor]:
    """Outputs and gradients by input, then by parameter, of two batches; running statistics at the end."""
    found = []
    for step in range(2):
        inputs, weights = whole_batch(kind, step)
        x = inputs[own].requires_grad_()
        y = model(x)
        model.zero_grad()
        (y * weights[own]).sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad, *(each.grad.clone() for each in model.parameters())]
    with torch.no_grad():
        evaluated = model.eval()(whole_batch(kind, 2)[0])
    return [*found, *(each.clone() for each in model.buffers()), evaluated]


def synchronised(rank: int, world_size: int, kind: str, over: str) -> tuple[list[Tensor], int]:
    """What this rank found, and the number of parameters."""
    communicator: Communicator = MPICommunicator() if over == "mpi" else connect()
    model = network(kind)
    synchronise_batch_norm(model, communicator, nullcontext)
    first = sum(SIZES[world_size][:rank])
    found = two_steps(model.train(), kind, slice(first, first + SIZES[world_size][rank]))
    return found, len(list(model.parameters()))


@pytest.mark.parametrize(("over", "world_size"), [("gloo", 3), ("mpi", 2)])
@pytest.mark.parametrize("kind", ["rows", "images", "cumulative"])
def test_ranks_normalise_as_one_rank_with_the_whole_batch(world, mpi_world, kind, over, world_size):
    wanted = two_steps(network(kind).train(), kind, slice(None))
    ranks = (mpi_world if over == "mpi" else world)(world_size).run(synchronised, kind, over)
    step = 2 + ranks[0][1]
    for place, reference in enumerate(wanted):
        parts = [found[place] for found, _ in ranks]
        by_example = place < 2 * step and place % step < 2
        if by_example:
            got = torch.cat(parts)
        elif place < 2 * step:  # a parameter's gradient is the sum of the ranks' parts, as of their losses
            got = torch.stack(parts).sum(0)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts)
            got = parts[0]
        torch.testing.assert_close(got, reference, rtol=1e-10, atol=1e-10)


def test_one_value_of_each_channel_in_the_whole_world_is_an_error(world):
    messages = world(2).run(normalise_one_value)
    assert all("one value per channel" in message for message in messages)


def normalise_one_value(rank: int, _: int) -> str:
    model = nn.Sequential(nn.BatchNorm1d(2))
    synchronise_batch_norm(model, connect(), nullcontext)
    with pytest.raises(ValueError, match="one value") as error:
        model(torch.ones(1 - rank, 2))
    return str(error.value)


def test_one_rank_needs_no_other_layers():
    model = network("rows")
    synchronise_batch_norm(model, SingleCommunicator(), nullcontext)
    assert not any(isinstance(module, SynchronisedBatchNorm) for module in model.modules())


def test_names_and_tensors_of_a_model_stay_and_a_layer_in_two_places_stays_one(world):
    assert world(2).run(converted) == [True, True]


def converted(_: int, __: int) -> bool:
    shared, model = nn.BatchNorm2d(3), network("images")
    model.append(nn.Sequential(shared, shared))
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    synchronise_batch_norm(model, connect(), nullcontext)
    made = model[-1][0]
    assert isinstance(made, SynchronisedBatchNorm)
    assert made is model[-1][1]
    return {name: value.data_ptr() for name, value in model.state_dict().items()} == before


def cell(world_size: int, *, sync: bool) -> Cell:
    asked = options("cifar10", model="resnet8", width=0.25, data="synthetic", train_examples=24,
                    test_examples=4)  # fmt: skip
    return Cell.model_validate(
        {
            "sweep": "test", "method": "m", "world_size": world_size, "optimizer": {"lr": 0.01},
            "workload": {"name": "cifar10", "options": asked},
            "target": {"metric": "accuracy", "at_least": 1.0},
            "training": {"global_batch_size": 12, "epochs": 1, "sync_batch_norm": sync},
        }
    )  # fmt: skip


def train(rank: int, world_size: int, cell: Cell, folder: str) -> tuple[list[Record], str, list[Tensor]]:
    records: list[Record] = []
    world = World(rank, world_size, torch.device("cpu"), "gloo")
    trainer = Trainer(cell, world, HeartbeatWriter(Path(folder) / f"{rank}-{cell.id}"), records.append)
    result = trainer.run()
    buffers = [each for name, each in trainer.state.model.named_buffers() if "running" in name]
    return records, result.parameters_sha256, buffers


def test_a_run_keeps_one_set_of_statistics_and_counts_it_as_gradient_communication(world, tmp_path):
    runs = {sync: world(2).run(train, cell(2, sync=sync), str(tmp_path)) for sync in (False, True)}
    for sync, ((_, digest, statistics), (_, other_digest, others)) in runs.items():
        assert digest == other_digest
        equal = all(torch.equal(*pair) for pair in zip(statistics, others, strict=True))
        assert equal == sync
    layers = len(runs[True][0][2]) // 2
    channels = sum(each.numel() for each in runs[True][0][2]) // 2
    alone, together = ([r for r in runs[sync][0][0] if isinstance(r, PhaseRecord)] for sync in (False, True))
    calls, sent = (
        sum(getattr(r, field)["gradient_comm"] for r in together)
        - sum(getattr(r, field)["gradient_comm"] for r in alone)
        for field in ("calls", "sent_bytes")
    )
    steps = sum(record.steps for record in together)
    assert steps == 2
    assert calls == steps * 2 * layers
    assert sent == steps * 4 * (4 * channels + layers)
    assert not any({"forward", "backward"} & set(record.sent_bytes) for record in together)


def test_the_setting_changes_the_id_of_several_ranks_only():
    assert cell(2, sync=True).id != cell(2, sync=False).id
    assert cell(1, sync=True).id == cell(1, sync=False).id
    without = cell(2, sync=False).model_dump()
    del without["training"]["sync_batch_norm"]
    assert Cell.model_validate(without).id == cell(2, sync=False).id
