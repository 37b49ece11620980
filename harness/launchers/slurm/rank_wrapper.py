"""Starts one rank of a step and stays its parent: `python rank.py ATTEMPT THREADS COMMAND...` under srun.

Slurm tells nobody how a single task ended. This program does: `rank-00001.end` holds a line from its start
and, however the rank ended, a line from its end. It also gives the rank its log, as srun would pass every
line over the network and read a `%` in the path as a pattern, and mends what Slurm tells it of PMI. Imports
nothing of this project and nothing slow: there is one a rank. Signals of Slurm it takes note of and outlives:
they reach the rank itself too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time

# Slurm's pmi2 reads each request of a PMI-1 client, such as MPICH, by one `read` of 1,024 bytes, and yet
# allows values of that length. The line around such a value is longer: its rest is an `invalid client
# request`, and all ranks hang in MPI's initialization.
_CLAIMED, _SAFE = b"vallen_max=1024\n", b"vallen_max=512\n"
_PMI_BYTES = 65536  # more than any message


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
    child = _fork_with_pmi() if "PMI_FD" in environment else os.fork()
    if child == 0:
        _become([*command, attempt, *words], log)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _write(end, exit_code=code, own=signal.SIGTERM not in signalled, at=time.time())
    return code if code >= 0 else 128 - code  # as shells count a death by signal


def _open(attempt: str, name: str) -> int:
    """Open for appending a file that is as open as the attempt's folder, as far as the umask lets it."""
    mode = 0o600 | os.stat(attempt).st_mode & 0o040  # noqa: PTH116  # pathlib is slow to import
    return os.open(f"{attempt}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)


def _fork_with_pmi() -> int:
    """Fork, and stay between the child's PMI and Slurm's as long as both are there."""
    slurms = int(os.environ["PMI_FD"])
    ours, childs = (end.detach() for end in socket.socketpair())
    child = os.fork()
    if child == 0:
        os.close(slurms)
        os.set_inheritable(childs, True)
        os.environ["PMI_FD"] = str(childs)
    else:
        os.close(childs)
        threading.Thread(target=_relay, args=(ours, slurms), daemon=True).start()
    return child


def _relay(ours: int, slurms: int) -> None:
    """Pass on what each says to the other until one is gone.

    Who has asked waits for the answer, and each writes a message at once: a read has all of one, and no more.
    """
    other = {ours: slurms, slurms: ours}
    poll = select.poll()
    for file in other:
        poll.register(file, select.POLLIN)
    try:
        while True:
            for file, _ in poll.poll():
                message = os.read(file, _PMI_BYTES)
                if not message:
                    return
                if message.startswith(b"cmd=maxes "):  # no message of PMI-2 does
                    message = message.replace(_CLAIMED, _SAFE)
                os.write(other[file], message)
    except OSError:  # as when a side is killed between two messages
        return
    finally:
        os.close(ours)


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
