"""A cluster to try things on: `python -m tests.slurm_cluster start`; `stop` ends all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tests.slurm_cluster.cluster import PACKAGES, missing_programs

_PREFIX = f"kronscale-slurm-by-hand-{os.getuid()}-"
_ADVICE = """\
A Slurm of four nodes runs in {folder}. To use it in this shell:

  export SLURM_CONF={folder}/slurm.conf
  sinfo
  kronscale run -f jobs/sweeps/demo.yaml --site slurm-test --runs results/on-slurm --where world_size=2
  make slurm-stop
"""


def start() -> int:
    """Start a cluster that outlives this process, and print how to use it."""
    if missing := missing_programs():
        sys.stderr.write(f"no {', '.join(missing)}: apt-get install {PACKAGES}\n")
        return 2
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Errors go to a file: a pipe of the caller, as in `make slurm | tail`, would stay open
    with (folder / "keeper.err").open("w") as errors, subprocess.Popen(
        [sys.executable, "-m", "tests.slurm_cluster.keeper", str(folder), "--detached"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
    ) as keeper:  # fmt: skip
        answer = keeper.stdout.readline().strip() if keeper.stdout else ""
        if answer != "ready":
            sys.stderr.write(answer + "\n")
            return 1
        sys.stdout.write(_ADVICE.format(folder=folder))
        sys.stdout.flush()
        os._exit(0)  # without waiting for the keeper, as Popen's `with` would
    return 1


def stop() -> int:
    """End all clusters that `start` has started here."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        keeper = _keeper(folder)
        if keeper is not None:
            keeper.send_signal(signal.SIGTERM)
            psutil.wait_procs([keeper], timeout=60)
        sys.stdout.write(f"{folder}: {'stopped' if keeper is not None else 'was not running'}\n")
    return 0


def _keeper(folder: Path) -> psutil.Process | None:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "tests.slurm_cluster.keeper" in words and str(folder) in words:
            return process
    return None


if __name__ == "__main__":
    sys.exit({"start": start, "stop": stop}[sys.argv[1]]())
