"""Starts the ranks of a benchmark on this machine and reads their figures (no torch here)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.errors import UserError


def measure_on_ranks(module: str, options: dict[str, Any]) -> list[Any]:
    """Run a module, which uses `harness.bench.rank`, as every rank; returns the figures in rank order.

    Args:
        module: the benchmark's rank, run with `python -m`.
        options: for the ranks, as JSON; with `ranks` and `threads`.

    Raises:
        UserError: a rank failed; with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="kronscale-bench-") as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(options))
        _run(module, folder, options["ranks"], options["threads"])
        files = (folder / f"rank-{rank}.json" for rank in range(options["ranks"]))
        return [json.loads(file.read_text()) for file in files]


def _run(module: str, folder: Path, ranks: int, threads: int) -> None:
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
