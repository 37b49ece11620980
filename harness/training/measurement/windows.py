"""Writes the records of one rank's windows: phases, memory, load of the host, traced steps and the GPU."""

from __future__ import annotations

import resource
import socket
import sys
import time
from collections.abc import Callable

import psutil
import torch

from harness.runs.records import PhaseRecord, Record, TraceRecord
from harness.training.measurement.device import DeviceGauge
from harness.training.measurement.load import gauge_load
from harness.training.training_state import TrainingState
from harness.training.world import World
from kfac_core.timing import PhaseTimer, WindowTotals

_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux


class WindowRecorder:
    """Writes the records of each window while the phase timer is stopped; all ranks make it together.

    Args:
        entry_seconds: cost of entering one phase, see `kfac_core.timing.seconds_per_entry`.
        local_batch_size: examples per step of this rank.
    """

    def __init__(
        self,
        timer: PhaseTimer,
        world: World,
        write: Callable[[Record], None],
        entry_seconds: float,
        local_batch_size: int,
    ) -> None:
        self._timer, self._world, self._write = timer, world, write
        self._entry_seconds, self._local_batch_size = entry_seconds, local_batch_size
        self._gpu = DeviceGauge(world.device)
        self._load = gauge_load(world)

    def suspend(self, state: TrainingState, segment: int) -> None:
        """Move the timer's totals into `state`, so that a checkpoint includes the open window."""
        state.window += self._timer.drain()
        self._write_if_any(_trace_record(self._timer, self._world.rank, segment))

    def close(self, state: TrainingState, segment: int) -> None:
        """Write the records of the open window, if it has a step, and begin the next one."""
        steps = state.step - state.window_start
        if not steps:
            return
        totals = state.window + self._timer.drain()
        state.window = WindowTotals(0.0)
        rank, waits_measured = self._world.rank, self._world.communicator.traffic.wait_seconds is not None
        self._write(
            PhaseRecord(
                rank=rank,
                first_step=state.window_start,
                steps=steps,
                samples=steps * self._local_batch_size,
                wall_seconds=totals.wall_seconds,
                seconds=totals.seconds,
                calls=totals.calls,
                sent_bytes=totals.sent_bytes,
                memory_bytes=read_memory(state, self._world.device),
                segment=segment,
                wait_seconds=totals.wait_seconds if waits_measured else None,
                instrument_seconds=totals.entries * self._entry_seconds,
                load_seconds=self._load.read(),
                cpu_mhz=self._load.clock_mhz(),
            )
        )
        self._write_if_any(_trace_record(self._timer, rank, segment))
        self._write_if_any(self._gpu.read(rank, segment, state.window_start, steps))
        state.window_start = state.step

    def _write_if_any(self, record: Record | None) -> None:
        if record is not None:
            self._write(record)


def _trace_record(timer: PhaseTimer, rank: int, segment: int) -> TraceRecord | None:
    """The spans since the last call, on the host's Unix clock; None if no step was traced."""
    spans = timer.drain_spans()
    if not spans:
        return None
    first = spans[0].started
    began = time.time() - (time.perf_counter() - first)
    rows = tuple((span.step, span.phase, span.started - first, span.seconds, span.layer) for span in spans)
    return TraceRecord(rank, segment, socket.gethostname(), began, rows)


def read_memory(state: TrainingState, device: torch.device) -> dict[str, int]:
    """Resident set, its peak and the tensors of model, optimizer and K-FAC; on a GPU also its allocator's."""
    bytes_by_kind = {
        "rss": psutil.Process().memory_info().rss,
        "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT,
    }
    if device.type == "cuda":
        bytes_by_kind["device_allocated"] = torch.cuda.memory_allocated(device)
        bytes_by_kind["device_allocated_peak"] = torch.cuda.max_memory_allocated(device)
        bytes_by_kind["device_reserved_peak"] = torch.cuda.max_memory_reserved(device)
    kfac_bytes = state.kfac.memory() if state.kfac is not None else {}
    return {
        **bytes_by_kind,
        "model": sum(p.numel() * p.element_size() for p in state.model.parameters()),
        "optimizer": _optimizer_bytes(state.optimizer),
        **{f"kfac_{kind}": count for kind, count in kfac_bytes.items()},
    }


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
