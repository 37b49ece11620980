"""What a result depends on besides its cell: code, versions, machine. An allow-list, never os.environ."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "mpi4py", "pandas", "submitit", "scikit-learn", "kronscale")


@dataclass(frozen=True)
class Environment:
    """Written once per attempt by rank 0, as `environment.json`.

    Attributes:
        commit: of the checkout that ran, or None outside of one.
        dirty: whether tracked files differed from that commit.
        cpus: CPUs that rank 0 may run on.
        threads: threads that torch uses in each rank.
        hosts: host of every rank, in rank order.
    """

    commit: str | None
    dirty: bool | None
    python: str
    packages: dict[str, str]
    platform: str
    cpu: str
    cpus: int
    threads: int
    device: str
    backend: str
    host: str
    hosts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `environment.json`."""
        return asdict(self)


def read_environment(device: torch.device, backend: str, hosts: tuple[str, ...]) -> Environment:
    """The environment of this process."""
    commit, dirty = _checkout()
    return Environment(
        commit=commit,
        dirty=dirty,
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in PACKAGES},
        platform=platform.platform(),
        cpu=_cpu_model(),
        cpus=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        backend=backend,
        host=platform.node(),
        hosts=hosts,
    )


def _checkout() -> tuple[str | None, bool | None]:
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return commit, bool(_git(here, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
