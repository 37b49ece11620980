"""Runs parts of the GPU acceptance on a CUDA device without data: `python -m tests.harness.fake_gpu_parts`.

Every operator is asked for with tensors on the device, so that a missing kernel, a mix of devices or a wrong
shape shows. No number is right: results have no data. Prints the outcome of each part as JSON.
"""

from __future__ import annotations

from tests.kfac_core.fake_cuda.device import Watch, pretend_cuda  # isort: skip  first: before torch

import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.bench.gpu import training_steps
from harness.bench.gpu.activity import Activity
from harness.bench.gpu.findings import Findings
from harness.bench.gpu.parts import PARTS, decompositions, exactness, networks
from harness.bench.gpu.setting import Setting


class Event:
    """Reached at once, a millisecond after the one before."""

    def __init__(self, *, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, after: Event) -> float:
        return 1.0


class Stream:
    def synchronize(self) -> None: ...


class UnfusedSGD(torch.optim.SGD):
    """Of the fused kernel there is no version without data."""

    def __init__(self, *arguments: Any, fused: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)


def moved(module: torch.nn.Module, *where: Any, **how: Any) -> torch.nn.Module:
    """`Module.to`, which cannot swap tensors without data."""
    layout = how.pop("memory_format", None)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            weight = parameter.detach().to(*where, **how)
            if layout is not None and weight.ndim == 4:
                weight = weight.contiguous(memory_format=layout)
            setattr(part, name, torch.nn.Parameter(weight))
        for name, buffer in part.named_buffers(recurse=False):
            kept = where if buffer.is_floating_point() else where[:1]  # the device
            setattr(part, name, buffer.to(*kept, **how))
    return module


def pretend_more() -> None:
    """What the parts ask of torch.cuda beyond a step."""
    pretend_cuda()
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda device=None: None)
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.Event, cuda.Stream = Event, Stream
    cuda.stream = lambda stream: nullcontext()
    cuda.nvtx.range = lambda name: nullcontext()
    cuda.device_count = lambda: 1
    torch.backends.cuda.preferred_linalg_library = lambda backend=None: "default"
    scaler = torch.amp.GradScaler

    def with_cuda(device: str) -> torch.amp.GradScaler:
        available, cuda.is_available = cuda.is_available, lambda: True
        try:
            return scaler(device)
        finally:
            cuda.is_available = available

    every = exactness.cases
    exactness.cases = lambda: islice(every(), 0, None, 19)  # strategies alone are the same here
    exactness.STEPS = 2  # one with an inverse and one without
    exactness.trained = on_the_device_only(exactness.trained)
    arms = networks.arms
    networks.arms = lambda part: arms(part)[1::2]
    exactness.SOLVERS = {"inverse": exactness.SOLVERS["inverse"]}
    decompositions.ThreadPoolExecutor = lambda threads: ThreadPoolExecutor(1)  # FakeTensorMode takes one
    torch.amp.GradScaler = with_cuda
    torch.nn.Module.to = moved
    torch.optim.SGD = UnfusedSGD
    training_steps.activity = profiled


def on_the_device_only(trained: Callable[..., exactness.Gradients]) -> Callable[..., exactness.Gradients]:
    """`exactness.trained` without what it trains on the CPU: nothing here compares numbers."""

    def train(net: str, dtype: torch.dtype, device: torch.device, *rest: Any, **options: Any) -> Any:
        if device.type != "cpu":
            return trained(net, dtype, device, *rest, **options)
        model = exactness.ConvNet(24, 8) if net == "conv" else exactness.Transformer(30, 16)
        named = model.named_parameters()
        return {name: torch.ones(exactness.STEPS, *weight.shape, dtype=dtype) for name, weight in named}

    return train


def profiled(work: Callable[[], object]) -> Activity:
    work()
    return Activity()


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    pretend_more()
    outcomes = {}
    for name in names:
        findings = Findings(folder / f"{name}.json", {"part": name})
        setting = Setting(name, torch.device("cuda", 0), time.monotonic() + 600, findings, small=True)
        assert setting.on_gpu
        with FakeTensorMode(), Watch(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                import_module(f"harness.bench.gpu.parts.{PARTS[name].module}").run(setting)
                outcomes[name] = "ran"
            except Exception:
                outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
