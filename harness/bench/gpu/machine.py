"""The machine that is accepted: `python -m harness.bench.gpu.machine cuda` prints it as JSON."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]


def describe(kind: str) -> dict[str, Any]:
    """Device, versions and commit.

    Raises:
        SystemExit: torch sees no such device.
    """
    found: dict[str, Any] = {
        "device": f"CPU, {torch.get_num_threads()} threads: a rehearsal",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": _commit(),
    }
    if kind == "cuda":
        if not torch.cuda.is_available():
            sys.exit(f"torch {torch.__version__} sees no CUDA device; DEVICE=cpu rehearses on small sizes")
        about = torch.cuda.get_device_properties(0)
        found |= {
            "device": about.name,
            "devices": torch.cuda.device_count(),
            "memory_bytes": about.total_memory,
            "capability": f"{about.major}.{about.minor}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def _commit() -> str | None:
    """The checkout's commit, or None outside of one."""
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return None
    return asked.stdout.strip() or None


if __name__ == "__main__":
    json.dump(describe(sys.argv[1]), sys.stdout)
