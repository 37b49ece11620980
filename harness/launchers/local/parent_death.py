"""Starts a rank tied to its gang: `python tether.py GANG_PID CPUS COMMAND...` becomes COMMAND.

A program of its own rather than code run between fork and exec, where threads of the gang's libraries could
hold locks for ever. Imports nothing of this project: it starts once a rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives exec


def main(gang_pid: int, cpus: str, command: list[str]) -> None:
    """Die with the gang, keep to the CPUs (`0,3`), and become the command.

    Raises:
        OSError: the CPUs are not this process's to use, or the command cannot be run.
    """
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed: a rank would outlive its gang")
    if os.getppid() != gang_pid:
        sys.exit(1)  # the gang died before the tether held
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # wishes for a checkpoint: no rank dies of one that comes
        signal.signal(number, signal.SIG_IGN)  # before it can take it, nor does a program that never will
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    os.execvp(command[0], command)  # noqa: S606  # no shell is wanted


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
