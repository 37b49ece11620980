"""Promise: micro-batches train what the whole batch trains, whatever averages gradients and places K-FAC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from harness.cell import Cell
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import PhaseRecord, Record
from harness.study.sweep.cells import canonical
from harness.training import train
from harness.training.passes import part
from harness.training.world import World

KFAC = {"factor_update_steps": 1, "inverse_update_steps": 1, "damping": 0.01}
ARMS: dict[str, dict[str, Any]] = {
    "sgd": {"kfac": None},
    "sgd flat": {"kfac": None, "gradient_averaging": "flat"},
    "comm_opt": {"kfac": KFAC},
    "dp_kfac": {"kfac": {**KFAC, "strategy": "dp_kfac"}},
    "hybrid_opt": {"kfac": {**KFAC, "strategy": "hybrid_opt", "grad_worker_fraction": 0.5}},
    "overlap": {"kfac": {**KFAC, "overlap_factors": True}},
    "overlap flat": {"kfac": {**KFAC, "overlap_factors": True}, "gradient_averaging": "flat"},
}


def spec(
    accumulate: int,
    world_size: int,
    kfac: Any,
    gradient_averaging: str = "overlapped",
    first: int | None = None,
) -> Cell:
    training = {
        "global_batch_size": 256, "epochs": 1, "accumulate": accumulate,
        "gradient_averaging": gradient_averaging, "factor_micro_batches": first,
    }  # fmt: skip
    return Cell.model_validate(
        {
            "sweep": "test", "method": "m", "world_size": world_size, "kfac": kfac,
            "workload": {"name": "digits", "options": {"width": 4}},
            "target": {"metric": "accuracy", "at_least": 1.0}, "training": training,
            "optimizer": {"lr": 0.05, "momentum": 0.9},
        }
    )  # fmt: skip


def train_in_float64(
    rank: int, world_size: int, cell: Cell, folder: str, backend: str = "gloo"
) -> tuple[Tensor, list[Record]]:
    """The parameters at the end of the run, and its records."""
    build = train.build_workload

    def doubled(cell: Cell, share: Any) -> Any:
        workload: Any = build(cell, share)
        model = workload.model
        workload._train = (workload._train[0].double(), workload._train[1])
        workload._test = (workload._test[0].double(), workload._test[1])

        def smooth() -> Any:
            network = model().double()
            network[4] = torch.nn.AvgPool2d(2)  # which of equal pixels is the largest is up to rounding
            return network

        workload.model = smooth
        return workload

    train.build_workload = doubled
    try:
        records: list[Record] = []
        world = World(rank, world_size, torch.device("cpu"), backend)
        heartbeat = HeartbeatWriter(Path(folder) / f"{rank}-{cell.id}")
        trainer = train.Trainer(cell, world, heartbeat, records.append)
        trainer.run()
        parameters = [each.detach().flatten() for each in trainer.state.model.parameters()]
        return torch.cat(parameters), records
    finally:
        train.build_workload = build


@pytest.mark.parametrize(("world_size", "names"), [(1, ["comm_opt", "overlap"]), (4, list(ARMS))])
def test_micro_batches_train_what_the_whole_batch_trains(world, world_size, names, tmp_path):
    for name in names:
        arm = ARMS[name]
        whole, cut = (
            world(world_size).run(train_in_float64, spec(parts, world_size, **arm), str(tmp_path))
            for parts in (1, 4)
        )
        of_whole = [[each for each in records if isinstance(each, PhaseRecord)] for _, records in whole]
        for rank, ((expected, _), (found, records)) in enumerate(zip(whole, cut, strict=True)):
            assert (found - expected).norm() < 1e-10 * expected.norm(), name
            windows = [record for record in records if isinstance(record, PhaseRecord)]
            steps = sum(window.steps for window in windows)
            calls = {name: sum(window.calls[name] for window in windows) for name in ("forward", "backward")}
            assert calls == {"forward": 4 * steps, "backward": 4 * steps}
            sent = sum(window.calls.get("gradient_comm", 0) for window in windows)
            assert sent == sum(window.calls.get("gradient_comm", 0) for window in of_whole[rank])


def test_the_first_micro_batches_make_the_factors_as_the_first_examples_of_the_batch_do(world, tmp_path):
    for name in ("comm_opt", "overlap", "dp_kfac"):
        kfac = ARMS[name]["kfac"]
        a_half = {**kfac, "factor_batch_fraction": 0.5}
        (wanted, *_), (found, *_), (every, *_) = (
            world(2).run(train_in_float64, cell, str(tmp_path))
            for cell in (spec(1, 2, a_half), spec(4, 2, kfac, first=2), spec(4, 2, kfac))
        )  # fmt: skip
        assert (found[0] - wanted[0]).norm() < 1e-10 * wanted[0].norm(), name
        assert (found[0] - every[0]).norm() > 1e-7 * wanted[0].norm(), name


def test_factor_micro_batches_are_of_those_that_there_are_and_all_of_them_is_the_default():
    with pytest.raises(ValidationError, match="factor_micro_batches=3 must be <= accumulate=2"):
        spec(2, 1, KFAC, first=3)
    assert canonical(spec(2, 1, KFAC, first=2)).id == spec(2, 1, KFAC).id != spec(2, 1, KFAC, first=1).id


def test_a_batch_is_cut_along_its_examples():
    pixels, boxes = torch.arange(12).view(6, 2), [{"boxes": number} for number in range(6)]
    parts = [part((pixels, boxes), number, 3) for number in range(3)]
    assert torch.equal(torch.cat([pixels for pixels, _ in parts]), pixels)
    assert [each for _, boxes in parts for each in boxes] == boxes
    with pytest.raises(ValueError, match="6 examples cannot be cut into 4 equal parts"):
        part(pixels, 0, 4)
    with pytest.raises(TypeError, match="got a dict"):
        part({"pixels": pixels}, 0, 2)


def test_micro_batches_divide_the_local_batch_and_one_keeps_the_cells_id():
    with pytest.raises(ValidationError, match="accumulate=3 does not divide the local batch of 128"):
        spec(3, 2, None)
    fields = spec(1, 2, None).model_dump()
    del fields["training"]["accumulate"]
    assert Cell.model_validate(fields).id == spec(1, 2, None).id != spec(2, 2, None).id
