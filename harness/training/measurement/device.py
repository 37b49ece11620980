"""A rank's GPU as NVML reports it: energy, clocks, temperature, and other processes that compute on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pynvml
import torch

from harness.runs.records import DeviceRecord

_THROTTLES = {
    "gpu_idle": "nvmlClocksEventReasonGpuIdle",
    "applications_clocks_setting": "nvmlClocksEventReasonApplicationsClocksSetting",
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
    "hw_slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "sync_boost": "nvmlClocksEventReasonSyncBoost",
    "sw_thermal_slowdown": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_thermal_slowdown": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "hw_power_brake_slowdown": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


class DeviceGauge:
    """Reads one GPU at the end of every window.

    Args:
        device: where the rank computes.

    Attributes:
        reason: why nothing can be read; empty where it can.
    """

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        self._reported = False
        self._energy: float | None = None
        self.reason = ""
        if device.type != "cuda":
            self.reason = f"the rank computes on {device.type}"
            return
        try:
            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU") else f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            self.reason = f"NVML: {error}"
            return
        self._energy = _query(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)

    def read(self, rank: int, segment: int, first_step: int, steps: int) -> DeviceRecord | None:
        """The window's record; without a GPU or driver one record with the reason, and None from then on."""
        if self._handle is None:
            if self._reported:
                return None
            self._reported = True
            return DeviceRecord(rank, segment, first_step, steps, self.reason)
        before, self._energy = self._energy, _query(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        known = before is not None and self._energy is not None
        power = _query(pynvml.nvmlDeviceGetPowerUsage, self._handle)
        memory = _query(pynvml.nvmlDeviceGetMemoryInfo, self._handle)
        return DeviceRecord(
            rank=rank,
            segment=segment,
            first_step=first_step,
            steps=steps,
            reason="" if known else "the GPU has no energy counter",
            energy_joules=(self._energy - before) / 1e3 if known else None,  # type: ignore[operator]  # both known
            power_watts=power / 1e3 if power is not None else None,
            sm_clock_mhz=_query(pynvml.nvmlDeviceGetClockInfo, self._handle, pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=_query(pynvml.nvmlDeviceGetClockInfo, self._handle, pynvml.NVML_CLOCK_MEM),
            temperature_celsius=_query(
                pynvml.nvmlDeviceGetTemperature, self._handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            throttle_reasons=self._throttles(),
            device_used_bytes=int(memory.used) if memory is not None else None,
            foreign_processes=self._foreign(),
        )

    def _throttles(self) -> tuple[str, ...] | None:
        bits = _query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle)
        if bits is None:
            return None
        return tuple(name for name, constant in _THROTTLES.items() if bits & getattr(pynvml, constant, 0))

    def _foreign(self) -> tuple[int, ...] | None:
        processes = _query(pynvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        if processes is None:
            return None
        return tuple(sorted(process.pid for process in processes if process.pid != os.getpid()))


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """The value that NVML returns, or None where this GPU or driver does not support the query."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None
