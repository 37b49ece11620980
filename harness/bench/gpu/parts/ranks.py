"""Two ranks: every strategy's gradients on the device against those of two ranks on the CPU.

With two GPUs tensors travel over NCCL, else over Gloo, and the ranks share the device.
"""

from __future__ import annotations

import torch

from harness.bench.gpu.setting import Setting
from harness.bench.start import measure_on_ranks

_RANKS = 2
_LIMIT = 1e-8


def run(setting: Setting) -> None:
    """Start the ranks, and judge what each of them found."""
    nccl = setting.on_gpu and torch.cuda.device_count() >= _RANKS
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    setting.findings.note(f"{_RANKS} ranks over {backend} on {_RANKS if nccl else 1} device(s)")
    options = {
        "ranks": _RANKS, "threads": 1, "backend": backend, "device": setting.device.type,
        "small": setting.small,
    }  # fmt: skip
    found = measure_on_ranks("harness.bench.gpu.rank", options)
    for case in found[0]["cases"]:
        error = max(each["cases"][case]["error"] for each in found)
        apart = max(each["cases"][case]["apart"] for each in found)
        setting.findings.row("strategies", case=case, error=error, between_ranks=apart, limit=_LIMIT)
        setting.findings.check(
            f"{case} on {_RANKS} ranks", f"relative error {error:.1e}, between ranks {apart:.1e}",
            passed=max(error, apart) <= _LIMIT,
        )  # fmt: skip
    for size in found[0]["reduce_seconds"]:
        seconds = max(each["reduce_seconds"][size] for each in found)
        setting.findings.row(
            "all_reduce", bytes=int(size), seconds=seconds, bytes_per_second=int(size) / seconds
        )
