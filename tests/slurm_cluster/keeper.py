"""Runs a cluster's daemons: starts them in order, restarts or kills single ones on request, ends all of them.

`python -m tests.slurm_cluster.keeper FOLDER [--detached]`. Prints `ready` when jobs can be submitted. Reads
requests from its standard input, one per line (`start slurmctld`, `stop slurmd-n2`, `kill slurmd-n2`), and
answers each with `ok` or `error ...`. The end of its input or SIGTERM ends the cluster, so that the cluster
of a killed test run ends too. Everything that it starts stays its descendant, including daemons of daemons.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.slurm_cluster.config import NAME, NODES, Layout

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_REAP_SECONDS = 10.0


class Keeper:
    """The daemons of one cluster."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        folder = layout.folder
        self._environment = {
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(layout.slurm_conf),
            "MYSQL_UNIX_PORT": str(layout.database_socket),
            "LANG": "C.UTF-8",
        }
        munged = [
            "munged", "--foreground", f"--socket={layout.munge_socket}", f"--key-file={folder}/munge.key",
            f"--log-file={folder}/log/munged.log", f"--pid-file={folder}/munged.pid",
            f"--seed-file={folder}/munged.seed", "--num-threads=4",
        ]  # fmt: skip
        database = [
            "mariadbd", "--no-defaults", f"--datadir={folder}/database", f"--socket={layout.database_socket}",
            f"--pid-file={folder}/mariadbd.pid", f"--log-error={folder}/log/mariadbd.log",
            f"--user={getpass.getuser()}",
            "--skip-networking", "--skip-grant-tables",  # the folder of its socket keeps everyone else out
            "--skip-log-bin", "--innodb-buffer-pool-size=16M", "--innodb-log-file-size=8M",
            "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900",
        ]  # fmt: skip
        self._commands: dict[str, list[str]] = {
            "munged": munged,
            "mariadbd": database,
            "slurmdbd": ["slurmdbd", "-D"],
            "slurmctld": ["slurmctld", "-D"],
            **{f"slurmd-{node}": ["slurmd", "-D", "-N", node] for node in NODES},
        }

    def start_all(self) -> None:
        """Start every daemon; returns when all nodes are idle.

        Raises:
            RuntimeError: one of them ended or did not answer in time; with the ends of the logs.
        """
        _clear_shared_memory()
        key = self._layout.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.start("munged")
        self.start("mariadbd")
        _until(self._layout.munge_socket.exists, self, "munged")
        _until(self._layout.database_socket.exists, self, "mariadbd")
        self.start("slurmdbd")
        _until(lambda: self._output("sacctmgr", "--immediate", "add", "cluster", NAME), self, "slurmdbd")
        self.start("slurmctld")
        for node in NODES:
            self.start(f"slurmd-{node}")
        _until(self._all_idle, self, "slurmctld")

    def start(self, name: str) -> None:
        """Start one daemon."""
        log = (self._layout.folder / "log" / f"{name}.out").open("ab")
        with log:
            self._running[name] = subprocess.Popen(
                self._commands[name],
                env=self._environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End one daemon; with SIGKILL also all processes on its node, as in a power cut."""
        process = self._running.pop(name)
        process.send_signal(number)
        if number == signal.SIGKILL:
            lost = _on_node(name.removeprefix("slurmd-"))
            for end in (psutil.Process.suspend, psutil.Process.kill):  # or one would report another's end
                for other in lost:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        end(other)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop_all(self) -> None:
        """End every daemon and every process that any of them left behind."""
        for name in list(reversed(self._running)):
            self.stop(name)
        while children := psutil.Process().children(recursive=True):
            for child in children:
                _kill(child)
            psutil.wait_procs(children, timeout=1)

    def reap(self) -> None:
        """Reap orphans that became children of this process; daemons are waited for by name."""
        ours = {process.pid for process in self._running.values()}
        for child in psutil.Process().children():
            with contextlib.suppress(ChildProcessError, psutil.NoSuchProcess):
                if child.pid not in ours and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)

    def log_ends(self) -> str:
        """The last lines of all logs, for an error message."""
        logs = sorted((self._layout.folder / "log").iterdir())
        texts = ((log.name, log.read_text(errors="replace").splitlines()[-3:]) for log in logs)
        return "\n".join(f"{name}: {line}" for name, lines in texts for line in lines)

    def check(self, name: str) -> None:
        """Raise if a daemon has ended."""
        code = self._running[name].poll()
        if code is not None:
            raise RuntimeError(f"{name} ended with {code}\n{self.log_ends()}")

    def _output(self, *command: str) -> str | None:
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None

    def _all_idle(self) -> bool:
        return (self._output("sinfo", "--noheader", "--partition=main", "--format=%D %T") or "").strip() == (
            f"{len(NODES)} idle"
        )


def main(folder: Path, detached: bool) -> None:
    """Run a cluster in the empty `folder` until its input ends or SIGTERM."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _exit)
    layout = Layout.make(folder)
    layout.write()
    keeper = Keeper(layout)
    try:
        keeper.start_all()
        print("ready", flush=True)
        if detached:
            while True:
                keeper.reap()
                time.sleep(_REAP_SECONDS)
        for line in sys.stdin:
            keeper.reap()
            print(_handle(keeper, *line.split()), flush=True)
    except RuntimeError as error:
        print("error", str(error).replace("\n", " | "), flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending already
        keeper.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


def _handle(keeper: Keeper, verb: str, name: str) -> str:
    try:
        if verb == "start":
            keeper.start(name)
        else:
            keeper.stop(name, signal.SIGKILL if verb == "kill" else signal.SIGTERM)
    except (KeyError, OSError) as error:
        return f"error {error!r}"
    return "ok"


def _exit(_number: int, _frame: object) -> None:
    raise SystemExit


def _clear_shared_memory() -> None:
    """Remove shared memory that killed MPI ranks of this user left behind and no process uses.

    MPICH names its shared memory after the job's number, and every cluster counts from 1: a job that finds
    that of another size ends with "MPIDI_POSIX_comm_bootstrap: Out of memory".
    """
    in_use = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            in_use += maps.read_text(errors="replace")
    for file in Path("/dev/shm").glob("mpich_shm_*"):  # noqa: S108  # where MPICH puts it
        with contextlib.suppress(OSError):
            if file.stat().st_uid == os.getuid() and file.name not in in_use:
                file.unlink()


def _until(holds: Callable[[], object], keeper: Keeper, name: str) -> None:
    ends = time.monotonic() + _START_SECONDS
    while not holds():
        keeper.check(name)
        if time.monotonic() > ends:
            raise RuntimeError(f"{name} did not answer within {_START_SECONDS:.0f} s\n{keeper.log_ends()}")
        time.sleep(0.05)


def _on_node(node: str) -> list[psutil.Process]:
    """Processes of jobs on a node, and the daemons of Slurm that started them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.environ().get("SLURMD_NODENAME") == node:
                found += [*(one for one in process.parents() if one.name().startswith("slurmstepd")), process]
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--detached" in sys.argv[2:])
