"""Starts the ranks of a benchmark on this machine and stops them together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.errors import UserError


def start_ranks(module: str, folder: Path, ranks: int, threads: int) -> None:
    """Run `python -m module FOLDER/options.json --rank R` for every rank, and wait for all of them.

    Raises:
        UserError: a rank failed; with the end of its log.
    """
    command = [sys.executable, "-m", module, str(folder / "options.json"), "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            arguments = [*command, str(rank)]
            processes.append(subprocess.Popen(arguments, env=environment, stdout=out, stderr=out))
    try:
        for rank, process in enumerate(processes):
            if process.wait():
                tail = " | ".join(logs[rank].read_text().splitlines()[-3:])
                raise UserError(f"rank {rank} of the benchmark exited with {process.returncode}: {tail}")
    finally:
        for process in processes:
            process.kill()
