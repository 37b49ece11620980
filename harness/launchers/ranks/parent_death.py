"""Runs a command that dies with its parent: `python parent_death.py PARENT_PID CPUS COMMAND...`.

A program of its own rather than code run between fork and exec, where threads of the parent's libraries could
hold locks for ever. Imports nothing of this project, because it starts once per rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives exec


def main(parent_pid: int, cpus: str, command: list[str]) -> None:
    """Request SIGKILL at the parent's death, pin to the CPUs (`0,3`), and execute the command.

    Raises:
        OSError: this process may not use the CPUs, or the command cannot be run.
    """
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed: the command would outlive its parent")
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent died before prctl
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # a request for a checkpoint must not end a rank that is
        signal.signal(number, signal.SIG_IGN)  # still starting, nor a program that does not handle it
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    os.execvp(command[0], command)  # noqa: S606  # no shell is wanted


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
