"""What a result depends on besides its cell: code, versions and machine; never all of os.environ."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from harness.runs.run_place import cpu_model, has_native_bfloat16

PACKAGES = ("torch", "numpy", "mpi4py", "pandas", "submitit", "scikit-learn", "kronscale")

_GIT_SECONDS = 20.0


@dataclass(frozen=True)
class Environment:
    """The content of `environment.json`, which rank 0 writes once per attempt.

    Attributes:
        commit: of the checkout that ran; None outside of one, or if git fails.
        dirty: whether tracked files differed from that commit.
        packages: versions of those of `PACKAGES` that are installed; PYTHONPATH may provide others.
        cpus: CPUs that rank 0 may run on.
        threads: threads that torch uses in each rank.
        hosts: host of every rank, in rank order.
        gradient_averaging: how ranks average gradients, an `AveragingMethod`.
        keeps_freed_memory: whether malloc keeps freed memory (`malloc.keep_freed_memory`).
        native_bfloat16: whether the CPUs compute in bfloat16 without emulating it; None if not known.
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
    gradient_averaging: str
    keeps_freed_memory: bool
    native_bfloat16: bool | None

    def to_json(self) -> dict[str, Any]:
        """Plain values for `environment.json`."""
        return asdict(self)


def read_environment(
    device: torch.device,
    backend: str,
    hosts: tuple[str, ...],
    *,
    gradient_averaging: str = "none",
    keeps_freed_memory: bool = False,
) -> Environment:
    """The environment of this process."""
    commit, dirty = _checkout()
    return Environment(
        commit=commit,
        dirty=dirty,
        python=platform.python_version(),
        packages=_versions(),
        platform=platform.platform(),
        cpu=cpu_model(),
        cpus=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        backend=backend,
        host=platform.node(),
        hosts=hosts,
        gradient_averaging=gradient_averaging,
        keeps_freed_memory=keeps_freed_memory,
        native_bfloat16=has_native_bfloat16(),
    )


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _checkout() -> tuple[str | None, bool | None]:
    try:
        _git("ls-files", "--error-unmatch", "--", Path(__file__).name)  # a venv may be in another repo
        return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):  # a slow git must not end a run
        return None, None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_GIT_SECONDS)
    return done.stdout.strip()
