"""Measures a model's own passes on one rank: what a prediction needs where no study has run yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from harness.calibrate import timed_once
from harness.cell import Cell
from harness.training.micro_batches import micro_batches
from harness.workloads.workload import Batch, CountedLoss, Share, Workload, build_workload
from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.placement import LayerShape
from kfac_core.timing.timer import PhaseTimer

_PASSES = 5  # after one that is not counted


def measure_model(cell: Cell, device: torch.device) -> dict[str, Any]:
    """One rank's forward and backward pass, its factors, and its layers, as in a calibration's `models`.

    Args:
        cell: says workload, local batch and K-FAC's settings; without K-FAC, those by default.
        device: of the rank.

    Raises:
        UserError: the workload's data is missing.
    """
    torch.manual_seed(cell.seed)
    _, batch_size = cell.training.batch_sizes(cell.world_size)
    workload = build_workload(cell, Share(0, 1, batch_size, cell.seed, device))
    model = workload.model()
    batches = islice(cycle(_batches(workload, cell)), _PASSES + 1)
    first = next(batches)
    passes = [timed_once(lambda batch=batch: _pass(workload, model, batch), device) for batch in batches]  # type: ignore[misc]
    factors, shapes = _factor_seconds(workload, model, cell, first, device)
    positions = _positions(workload, model, shapes, first, batch_size)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {
        "local_batch_size": batch_size,
        "forward_backward_seconds": median(passes),
        "factor_seconds": factors,
        "other_parameters": max(0, parameters - sum(shape.gradient_elements for shape in shapes)),
        "layers": [
            {"name": shape.name, "a": [shape.a.dim, shape.a.blocks], "g": [shape.g.dim, shape.g.blocks],
             "diagonal": shape.diagonal, "positions": positions.get(shape.name, 1)}
            for shape in shapes
        ],
    }  # fmt: skip


def _batches(workload: Workload, cell: Cell) -> Iterator[Batch]:
    """Micro-batches of the first steps of an epoch, of which a pass is one."""
    for batch in islice(workload.batches(0), _PASSES + 1):
        yield micro_batches(workload, batch, cell.training.accumulate)[0]


def _pass(workload: Workload, model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    workload.loss(model, batch).backward()


def _factor_seconds(
    workload: Workload, model: nn.Module, cell: Cell, batch: Batch, device: torch.device
) -> tuple[float, list[LayerShape]]:
    """Seconds of all factors of one batch, and their shapes; inverses are computed once and not counted."""
    config = cell.kfac or KFACConfig()
    steady = replace(config, factor_update_steps=1, inverse_update_steps=10 * _PASSES, strategy="comm_opt")
    timer = PhaseTimer(device)
    kfac = KFAC(model, steady, lr=1e-3, timer=timer)
    found = []
    for step in range(_PASSES + 1):
        if isinstance(workload, CountedLoss):
            kfac.set_loss_terms(workload.loss_terms(batch))
        timer.start()
        _pass(workload, model, batch)
        kfac.step()
        timer.stop()
        seconds = timer.drain().seconds[Phase.FACTOR_COMPUTE]
        if step:
            found.append(seconds)
    kfac.remove()
    return median(found), list(kfac.shapes)


def _positions(
    workload: Workload, model: nn.Module, shapes: list[LayerShape], batch: Batch, batch_size: int
) -> dict[str, int]:
    """Rows of a layer's output for each example: pixels or tokens; 1 where a layer is not one module."""
    found: dict[str, int] = {}
    modules = dict(model.named_modules())
    handles = []
    for shape in shapes:
        module = modules.get(shape.name)
        if module is None:
            continue

        def count_rows(_: nn.Module, __: Any, output: Any, shape: LayerShape = shape) -> None:
            if isinstance(output, Tensor):
                rows = output.numel() // max(1, shape.g.dim * shape.g.blocks * batch_size)
                found[shape.name] = max(1, rows)

        handles.append(module.register_forward_hook(count_rows))
    with torch.no_grad():
        workload.loss(model, batch)
    for handle in handles:
        handle.remove()
    return found
