"""Starts the ranks of an attempt as one MPI world on this host, under MPICH's `mpiexec` (Hydra)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.launchers import rank_wrapper
from harness.launchers.launch import Launch
from harness.launchers.rank_exits import end_lines
from harness.runs.record_lines import last_lines
from harness.runs.store import Attempt

NO_MPIEXEC = (
    f"backend: mpi needs the mpiexec of MPICH or a relative, found none beside {sys.executable} or on PATH: "
    "pip install mpich, or use backend: gloo"
)

_START_SECONDS = 120.0  # a busy machine starts an interpreter per rank in seconds
_POLL_SECONDS = 0.01
# Hydra must not end the other ranks when one dies: the launcher does, once it has seen which was the first.
_OPTIONS = ("-launcher", "fork", "-rmk", "user", "-disable-auto-cleanup")


def find_mpiexec() -> Path | None:
    """The `mpiexec` beside this Python, else the one on PATH; None if there is neither."""
    beside = Path(sys.executable).with_name("mpiexec")
    if beside.exists():
        return beside
    on_path = shutil.which("mpiexec")
    return Path(on_path) if on_path is not None else None


def start_world(
    prefix: Sequence[str],
    attempt: Attempt,
    launch: Launch,
    cpus: Sequence[Sequence[int]],
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start a rank for each of `cpus`; returns mpiexec once every rank has a line in its end file.

    Args:
        prefix: of mpiexec's command line, which has it die with this process.
        attempt: of the ranks.
        launch: of the attempt.
        cpus: CPU numbers by rank.
        environment: of every rank.

    Raises:
        OSError: there is no mpiexec, or it did not start the ranks.
    """
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise FileNotFoundError(NO_MPIEXEC)
    by_rank = ";".join(",".join(map(str, numbers)) for numbers in cpus)
    wrapper = [sys.executable, "-I", "-S", str(Path(rank_wrapper.__file__)), str(attempt.path)]
    log = attempt.path / "logs" / "mpiexec.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [
                *prefix, str(mpiexec), *_OPTIONS, "-n", str(len(cpus)),
                *wrapper, str(launch.cpus_per_rank), by_rank, *launch.command,
            ],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + _START_SECONDS
    while not all(end_lines(attempt, rank) for rank in range(len(cpus))):
        if process.poll() is not None or time.monotonic() > deadline:
            printed = [line.strip() for line in last_lines(log) if line.strip()]
            detail = printed[-1] if printed else "it printed nothing"
            raise OSError(f"{mpiexec} did not start {len(cpus)} ranks: {detail}")
        time.sleep(_POLL_SECONDS)
    return process
