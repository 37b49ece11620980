"""Training with K-FAC on any device, in any precision, alone or as one of several ranks."""

from __future__ import annotations

from functools import cache
from math import inf, isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.nets import ConvNet, Transformer

Gradients = dict[str, Tensor]
"""Of every parameter, of all steps: `[steps, ...]`."""

STEPS, EXAMPLES = 3, 8
CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "factor_update_steps": 1, "inverse_update_steps": 2, "damping": 0.1,
    "eigen_start": "cold", "gram_precision": "ieee", "product_precision": "ieee",
}  # fmt: skip
"""Nothing that approximates, which on a GPU the defaults do."""


def trained(
    net: str,
    dtype: torch.dtype,
    device: torch.device,
    config: dict[str, Any],
    *,
    channels_last: bool = False,
    half: torch.dtype | None = None,
    execution: Execution = Execution.BATCHED,
    rank: int = 0,
    ranks: int = 1,
) -> Gradients:
    """The gradients of `STEPS` steps after K-FAC, from the same start on every device.

    With several ranks each takes its part of the examples, and gradients are averaged over all.
    """
    torch.manual_seed(1)
    made: nn.Module = ConvNet(24, 8) if net == "conv" else Transformer(30, 16)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = made.to(device, dtype, memory_format=layout)
    scaler = torch.amp.GradScaler(device.type) if half == torch.float16 else None
    settings = KFACConfig.sc20(**{**BASE, **config})
    kfac = KFAC(model, settings, lr=0.1, grad_scaler=scaler, execution=execution)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for step in range(STEPS):
        inputs = _inputs(net, step, device, dtype).tensor_split(ranks)[rank].contiguous(memory_format=layout)
        optimizer.zero_grad()
        with torch.autocast(device.type, half or torch.bfloat16, enabled=half is not None):
            outputs = model(inputs).flatten(0, -2)
        labels = torch.arange(len(outputs), device=device) % 10
        loss = functional.cross_entropy(outputs.to(dtype), labels)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        for parameter in model.parameters() if ranks > 1 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(ranks)
        kfac.step()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        for name, parameter in model.named_parameters():
            found[name].append(parameter.grad.detach().cpu())
    kfac.remove()
    return {name: torch.stack(gradients) for name, gradients in found.items()}


def reference(net: str, config: dict[str, Any]) -> Gradients:
    """The same training in float64 on the CPU, factor by factor and layer by layer.

    In a world of one the strategies differ in nothing, so that they share a reference.
    """
    alone = {key: value for key, value in config.items() if key not in ("strategy", "grad_worker_fraction")}
    return _reference(net, tuple(sorted(alone.items())))


@cache
def _reference(net: str, config: tuple[tuple[str, Any], ...]) -> Gradients:
    return trained(net, torch.float64, CPU, dict(config), execution=Execution.SEQUENTIAL)


def _inputs(net: str, step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if net == "conv":
        return torch.randn(EXAMPLES, 3, 12, 12, dtype=torch.float64, generator=generator).to(device, dtype)
    return torch.randint(0, 30, (EXAMPLES, 8), generator=generator).to(device)


def error_of(got: Gradients, want: Gradients) -> float:
    """The largest relative error, of norms, of any parameter; NaN counts as infinite."""
    errors = [
        float((got[name].double() - exact.double()).norm() / exact.double().norm())
        for name, exact in want.items()
    ]
    return max(inf if isnan(error) else error for error in errors)
