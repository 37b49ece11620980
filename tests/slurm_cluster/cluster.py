"""A real Slurm on this machine for tests: `with Cluster() as cluster: cluster.run("sinfo")`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "srun", "sbatch", "sacctmgr", "munged", "mariadbd")
PACKAGES = "slurm-wlm slurmdbd munge mariadb-server"
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing_programs() -> list[str]:
    """Programs that are not installed; empty if the cluster can start."""
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


class Cluster:
    """Four nodes of four CPUs and four fake GPUs, a controller and its accounting, all in one folder.

    It has its own configuration, ports, credentials and database, apart from any Slurm of the machine. It
    ends with the `with` block, or with the process that started it, however that ends.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kronscale-slurm-"))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Self:
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm_cluster.keeper", str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._expect("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeper.communicate(timeout=60)

    def run(self, *command: str) -> str:
        """Run a command on the login node.

        Raises:
            CalledProcessError: it failed.
        """
        return subprocess.run(
            command, env={**os.environ, **self.environment}, check=True, capture_output=True, text=True
        ).stdout

    def start(self, daemon: str) -> None:
        """Start `slurmctld`, `slurmdbd` or a node's `slurmd-n1` again."""
        self._request("start", daemon)

    def stop(self, daemon: str) -> None:
        """Stop a daemon; jobs on its node continue."""
        self._request("stop", daemon)

    def kill(self, daemon: str) -> None:
        """Kill a daemon; with slurmd also all processes on its node, as in a power cut."""
        self._request("kill", daemon)

    def log(self, daemon: str) -> str:
        """Log of a daemon."""
        return (self.folder / "log" / f"{daemon}.log").read_text(errors="replace")

    def accounting(self, fields: Sequence[str]) -> list[dict[str, str]]:
        """All jobs in the accounting, without their steps."""
        words = ["sacct", "--allocations", "--noheader", "--parsable2", "--starttime=now-1day"]
        lines = self.run(*words, f"--format={','.join(fields)}").splitlines()
        return [dict(zip(fields, line.split("|"), strict=True)) for line in lines]

    def _request(self, verb: str, daemon: str) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{verb} {daemon}\n")
        self._keeper.stdin.flush()
        self._expect("ok")

    def _expect(self, answer: str) -> None:
        assert self._keeper.stdout is not None
        got = self._keeper.stdout.readline().strip()
        if got != answer:
            raise RuntimeError(f"the test cluster's keeper must answer {answer!r}, got {got!r}")
