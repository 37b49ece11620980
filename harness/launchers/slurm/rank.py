"""Starts one rank of a step and stays its parent: `python rank.py ATTEMPT THREADS COMMAND...` under srun.

Slurm tells nobody how a single task ended. This program does: `rank-00001.end` holds a line from its start
and, however the rank ended, a line from its end. It also gives the rank its log, as srun would pass every
line over the network and read a `%` in the path as a pattern. Imports nothing of this project and nothing
slow: there is one a rank. Signals of Slurm it takes note of and outlives: they reach the rank itself too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def main(attempt: str, threads: str, command: list[str]) -> int:
    """Run the rank to its end; returns the exit code for srun.

    Raises:
        OSError: the log or the file of the end cannot be written.
    """
    environment = os.environ
    rank, world_size = environment["SLURM_PROCID"], environment["SLURM_NTASKS"]
    local_rank, node = environment["SLURM_LOCALID"], environment.get("SLURMD_NODENAME", "")
    signalled: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _frame: signalled.append(number))
    end = _open(attempt, f"rank-{int(rank):05}.end")
    step = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    _write(end, rank=int(rank), node=node, step=step, at=time.time())
    log = _open(attempt, f"logs/rank-{int(rank):05}.log")
    words = ["--rank", rank, "--world-size", world_size, "--local-rank", local_rank, "--threads", threads]
    child = os.fork()
    if child == 0:
        _become([*command, attempt, *words], log)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _write(end, exit_code=code, own=signal.SIGTERM not in signalled, at=time.time())
    return code if code >= 0 else 128 - code  # as shells count a death by signal


def _open(attempt: str, name: str) -> int:
    """Open for appending a file that is as open as the attempt's folder, as far as the umask lets it."""
    mode = 0o600 | os.stat(attempt).st_mode & 0o040  # noqa: PTH116  # pathlib is slow to import
    return os.open(f"{attempt}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)


def _become(command: list[str], log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # until the rank can act on it, a warning is not its end
        signal.signal(number, signal.SIG_IGN)
    try:
        os.execvp(command[0], command)  # noqa: S606  # no shell is wanted
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
        os._exit(127)


def _write(file: int, **fields: object) -> None:
    os.write(file, (json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
