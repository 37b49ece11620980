"""Memory of this process, bytes by kind."""

from __future__ import annotations

import resource
import sys

import psutil
import torch

_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux


def read_memory(device: torch.device) -> dict[str, int]:
    """Resident set now and at its peak; on a GPU also what its allocator holds and held."""
    bytes_by_kind = {
        "rss": psutil.Process().memory_info().rss,
        "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT,
    }
    if device.type == "cuda":
        bytes_by_kind["device_allocated"] = torch.cuda.memory_allocated(device)
        bytes_by_kind["device_allocated_peak"] = torch.cuda.max_memory_allocated(device)
        bytes_by_kind["device_reserved_peak"] = torch.cuda.max_memory_reserved(device)
    return bytes_by_kind
