"""Parent of one rank: `python wrapper.py ATTEMPT THREADS CPUS COMMAND...` under srun or Hydra's mpiexec.

Neither srun nor mpiexec reports how a single rank ended. This program does: `rank-00001.end` gets a line when
the rank starts and, however the rank ends, a line when it ends. The program also redirects the rank's output
to its log (srun would pass every line over the network and read a `%` in the path as a pattern) and corrects
what Slurm tells the rank about PMI. It notes and survives signals; Slurm sends them to the rank itself too.

Under srun it also ends the rank if slurmstepd, its parent, is gone: Slurm no longer knows such a rank, which
would train on, as would its peers. `orphaned.jsonl` then tells the job's supervisor.

CPUS are CPU numbers by rank, such as `0,1;2,3`, to pin the ranks of one host; `-` under srun, which does so
itself. With CPUS the rank dies with this program, and it gets a session of its own: when a rank dies, Hydra
sends SIGUSR1 to the sessions of the others. Imports nothing of this project and nothing slow: there is one
process per rank.
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
# allows values of that length. The line around such a value is longer: its tail is an `invalid client
# request`, and all ranks hang in MPI's initialization.
_OFFERED, _SAFE = b"vallen_max=1024\n", b"vallen_max=512\n"
_PMI_BYTES = 65536  # more than any message
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(attempt: str, threads: str, cpus: str, command: list[str]) -> int:
    """Run the rank to its end; returns the exit code for srun.

    Raises:
        OSError: the log or the file of the end cannot be written.
    """
    environment, parent = os.environ, os.getppid()
    on_slurm = cpus == "-"
    names = (
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        if on_slurm
        else ("PMI_RANK", "PMI_SIZE", "PMI_RANK")
    )
    rank, world_size, local_rank = (environment[name] for name in names)
    signalled: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _frame: signalled.append(number))
    end = _open(attempt, f"rank-{int(rank):05}.end")
    log = _open(attempt, f"logs/rank-{int(rank):05}.log")
    if not on_slurm:
        _wait_for_wrappers(attempt, int(world_size))
    words = ["--rank", rank, "--world-size", world_size, "--local-rank", local_rank, "--threads", threads]
    wrapper = os.getpid()
    child = _fork_with_pmi() if on_slurm and "PMI_FD" in environment else os.fork()
    if child == 0:
        if not on_slurm:
            _isolate(cpus.split(";")[int(rank)], wrapper)
        _become([*command, attempt, *words], log)
    place: dict[str, object] = {"wrapper": wrapper, "pid": child}
    if on_slurm:
        step = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
        place = {"node": environment.get("SLURMD_NODENAME", ""), "step": step}
    _write(end, rank=int(rank), **place, at=time.time())
    gone = threading.Event()
    if on_slurm and parent > 1:  # 0 is a parent outside of a container, 1 one that is gone already
        threading.Thread(target=_end_with_parent, args=(parent, child, gone), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _write(end, exit_code=code, own=signal.SIGTERM not in signalled, at=time.time())
    if gone.is_set():
        _write(_open(attempt, "orphaned.jsonl"), rank=int(rank), node=place["node"])
    return code if code >= 0 else 128 - code  # as shells count a death by signal


def _open(attempt: str, name: str) -> int:
    """Open for appending a file that is as open as the attempt's folder, as far as the umask lets it."""
    mode = 0o600 | os.stat(attempt).st_mode & 0o040  # noqa: PTH116  # pathlib is slow to import
    return os.open(f"{attempt}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)


def _wait_for_wrappers(attempt: str, world_size: int) -> None:
    """Return once all wrappers handle signals: at the first death Hydra's SIGUSR1 would end the others."""
    files = [f"{attempt}/rank-{rank:05}.end" for rank in range(world_size)]
    while not all(map(os.path.exists, files)):
        time.sleep(0.01)


def _isolate(cpus: str, wrapper: int) -> None:
    """Give the rank its session and CPUs, and have it die with its parent."""
    import ctypes  # noqa: PLC0415  # srun's ranks do not need it

    os.setsid()
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != wrapper:
        os._exit(1)  # it died before the signal was set


def _end_with_parent(parent: int, child: int, gone: threading.Event) -> None:
    """Kill the rank when slurmstepd has ended."""
    try:
        rank = os.pidfd_open(child)
    except ProcessLookupError:  # it has ended already, as where there is no such command
        return
    try:
        files = select.poll()
        files.register(os.pidfd_open(parent), select.POLLIN)
        files.poll()
    except ProcessLookupError:  # it has ended meanwhile
        pass
    gone.set()
    try:
        signal.pidfd_send_signal(rank, signal.SIGKILL)
    except ProcessLookupError:
        return


def _fork_with_pmi() -> int:
    """Fork, and relay between the child's PMI and Slurm's as long as both are there."""
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
    """Pass the messages of each side to the other until one is gone.

    A side that has sent a request waits for the answer, and each side writes a message at once: one read gets
    one whole message.
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
                if message.startswith(b"cmd=maxes "):  # PMI-2 has no such message
                    message = message.replace(_OFFERED, _SAFE)
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
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # a request for a checkpoint must not end a starting rank
        signal.signal(number, signal.SIG_IGN)
    try:
        os.execvp(command[0], command)  # noqa: S606  # no shell is wanted
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
        os._exit(127)


def _write(file: int, **fields: object) -> None:
    os.write(file, (json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    # Not sys.exit: Python gives handled signals their default back before it is gone. When a rank has ended
    # Hydra sends SIGUSR1 to the others; a wrapper that this kills has it send SIGKILL to those still waiting.
    os._exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
