"""Memory of this process, bytes by kind."""

from __future__ import annotations

import resource
import sys

import psutil
import torch

from harness.training.training_state import TrainingState

_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux


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
