"""What a step does on the device, from torch's profiler: launches, copies, and waits of the host."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_WAITS = frozenset({
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpy2D",
    "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
})  # fmt: skip
"""Calls of CUDA in which the host waits for the device."""

_ALLOCATIONS = frozenset({"cudaMalloc", "cudaFree", "cudaHostAlloc"})
"""Calls that may wait, and that a warmed-up step does not make."""

_RANGE, _PHASES = "kronscale.measured", "kronscale."


@dataclass
class Activity:
    """Counts of one step.

    Attributes:
        launches: kernels.
        copies: copies and fills on the device.
        waits: waits of the host, by `phase: call`.
        warned: waits that torch itself knows of, `torch.cuda.set_sync_debug_mode`.
    """

    launches: int = 0
    copies: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    warned: int = 0


def activity(work: Callable[[], object]) -> Activity:
    """Profile one run of `work` on a GPU; the phase timer must mark its phases, `PhaseTimer(ranges=True)`."""
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        with torch.profiler.record_function(_RANGE):
            work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="kronscale-trace-") as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        found = count(json.loads(path.read_text())["traceEvents"])
    found.warned = known_waits(work)
    return found


def count(events: Sequence[dict[str, Any]]) -> Activity:
    """Count the events of a trace in Chrome's format, as torch's profiler exports it.

    Kernels count wherever they are; calls of the host only within the measured range, in the innermost
    phase.
    """
    found = Activity()
    timed = [event for event in events if "dur" in event]
    named = [event for event in timed if event.get("cat") == "user_annotation"]
    ranges = [event for event in named if str(event["name"]).startswith(_PHASES)]
    for event in timed:
        kind, name = event.get("cat"), str(event["name"])
        if kind == "kernel":
            found.launches += 1
        elif kind in ("gpu_memcpy", "gpu_memset"):
            found.copies += 1
        elif kind in ("cuda_runtime", "cuda_driver") and name in _WAITS | _ALLOCATIONS:
            around = [each for each in ranges if _within(event, each)]
            if any(each["name"] == _RANGE for each in around):
                phase = str(min(around, key=lambda each: float(each["dur"]))["name"])
                found.waits[f"{phase.removeprefix(_PHASES).replace('measured', 'other')}: {name}"] += 1
    return found


def _within(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    start, begun = float(event["ts"]), float(outer["ts"])
    return begun <= start <= begun + float(outer["dur"])


def known_waits(work: Callable[[], object]) -> int:
    """Operators of one run that wait, as torch counts them."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize()
    return sum("synchroniz" in str(each.message) for each in seen)
