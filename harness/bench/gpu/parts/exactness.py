"""Strategies, solvers, layer kinds and options: training on the device against float64 on the CPU.

The reference trains one factor and one layer after another in float64 on the CPU, which the test suite holds
against dense solves of the Kronecker system. On the device everything is batched, so that the two share
neither kernels nor order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import inf, isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from harness.bench.gpu.nets import ConvNet, Transformer
from harness.bench.gpu.setting import Setting, without_tf32
from kfac_core import KFAC, KFACConfig
from kfac_core.config import SOLVERS, STRATEGIES, Execution
from kfac_core.device_grams import DeviceGrams, GramPrecision

Gradients = dict[str, Tensor]
"""Of every parameter, of all steps: `[steps, ...]`."""

STEPS, EXAMPLES = 3, 8
_CPU = torch.device("cpu")
_BASE: dict[str, Any] = {"factor_update_steps": 1, "inverse_update_steps": 2, "damping": 0.1}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"factor_start": "first"}, {"kl_clip": None}, {"eigen_rank": 8}, {"eigen_start": "warm"},
    {"factor_batch_fraction": 0.5}, {"overlap_factors": True}, {"sequence": "reduce"},
    {"factor_dtype": "float64", "inverse_dtype": "float64"},
)  # fmt: skip
_DOUBLE_LIMIT, _SINGLE_LIMIT, _HALF_LIMIT = 1e-8, 1e-3, 0.1
_WARM_LIMIT = 1e-2
"""Relative errors. On CPUs the batched form is within 2e-10 in float64 and 6e-6 in float32. One orthogonal
iteration depends on the basis that it starts from, which is arbitrary where eigenvalues are equal: 2e-4."""


def run(setting: Setting) -> None:
    """Compare every case in float64, and the solvers in float32 too."""
    without_tf32()
    for net, config in cases():
        name = f"{net}, {', '.join(f'{key}={value}' for key, value in config.items())}"
        if not setting.has_time(f"from {name} on"):
            return
        want = reference(net, _frozen(config))
        got = trained(net, torch.float64, setting.device, config)
        _compare(
            setting, "float64", name, got, want, _WARM_LIMIT if "eigen_start" in config else _DOUBLE_LIMIT
        )
    for net in ("conv", "transformer"):
        for solver in SOLVERS:
            config = {"solver": solver}
            want = reference(net, _frozen(config))
            sequential = trained(net, torch.float32, _CPU, config, execution=Execution.SEQUENTIAL)
            on_cpu = error_of(sequential, want)
            got = trained(net, torch.float32, setting.device, config)
            _compare(setting, "float32", f"{net}, {solver}", got, want, _SINGLE_LIMIT, cpu_error=on_cpu)
    _formats(setting)
    _gram_precisions(setting)


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each net with each strategy and solver, then with one option after another."""
    for net in ("conv", "transformer"):
        for strategy in STRATEGIES:
            fraction = {"grad_worker_fraction": 1.0} if strategy == "hybrid_opt" else {}
            for solver in SOLVERS:
                yield net, {"strategy": strategy, "solver": solver, **fraction}
        for options in _OPTIONS:
            yield net, options


def _frozen(config: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """In a world of one the strategies differ in nothing, so that they share a reference."""
    alone = {key: value for key, value in config.items() if key not in ("strategy", "grad_worker_fraction")}
    return tuple(sorted(alone.items()))


@cache
def reference(net: str, config: tuple[tuple[str, Any], ...]) -> Gradients:
    """The same training in float64 on the CPU, factor by factor."""
    return trained(net, torch.float64, _CPU, dict(config), execution=Execution.SEQUENTIAL)


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
    model = made.to(device, dtype, memory_format=layout)  # type: ignore[call-overload]  # torch's overloads lack it
    scaler = torch.amp.GradScaler(device.type) if half == torch.float16 else None
    kfac = KFAC(
        model, KFACConfig.sc20(**{**_BASE, **config}), lr=0.1, grad_scaler=scaler, execution=execution
    )
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
            _average(model, ranks)
            kfac.step()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            kfac.step()
            scaler.step(optimizer)
            scaler.update()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None  # noqa: S101  every parameter of both nets is used
            found[name].append(parameter.grad.detach().cpu())
    kfac.remove()
    return {name: torch.stack(gradients) for name, gradients in found.items()}


def _average(model: nn.Module, ranks: int) -> None:
    for parameter in model.parameters() if ranks > 1 else ():
        assert parameter.grad is not None  # noqa: S101  every parameter of both nets is used
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(ranks)


def _inputs(net: str, step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if net == "conv":
        return torch.randn(EXAMPLES, 3, 12, 12, dtype=torch.float64, generator=generator).to(device, dtype)
    return torch.randint(0, 30, (EXAMPLES, 8), generator=generator).to(device)


def _formats(setting: Setting) -> None:
    """Channels-last, half precision and a GradScaler; half precision is compared with looser limits."""
    for name, limit, options in (
        ("channels last, float64", _DOUBLE_LIMIT, {"channels_last": True}),
        ("bfloat16 autocast", _HALF_LIMIT, {"half": torch.bfloat16}),
        ("float16 autocast, GradScaler", _HALF_LIMIT, {"half": torch.float16}),
    ):
        net = "conv" if "channels" in name else "transformer"
        dtype = torch.float64 if "64" in name else torch.float32
        got = trained(net, dtype, setting.device, {}, **options)
        _compare(setting, "formats", f"{net}, {name}", got, reference(net, ()), limit)


def _gram_precisions(setting: Setting) -> None:
    """Relative error of a gram by the precision of its operands."""
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    exact = rows.double().mT @ rows.double()
    limits: tuple[tuple[GramPrecision | None, float], ...] = (
        (None, 1e-6), ("tf32", 2e-3), ("bfloat16", 2e-3),
    )  # fmt: skip
    for precision, limit in limits:
        gram = DeviceGrams(torch.float32, precision).of_rows(rows.to(setting.device))[0]
        _compare(setting, "gram_precision", precision or "float32", {"": gram.cpu()}, {"": exact}, limit)


def _compare(
    setting: Setting, table: str, name: str, got: Gradients, want: Gradients, limit: float, **more: float
) -> None:
    error = error_of(got, want)
    setting.findings.row(table, case=name, error=error, limit=limit, **more)
    setting.findings.check(f"{table}: {name}", f"relative error {error:.1e}", passed=error <= limit)


def error_of(got: Gradients, want: Gradients) -> float:
    """The largest relative error, of norms, of any parameter; NaN counts as infinite."""
    errors = [
        float((got[name].double() - exact.double()).norm() / exact.double().norm())
        for name, exact in want.items()
    ]
    return max(inf if isnan(error) else error for error in errors)
