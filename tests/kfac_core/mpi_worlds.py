"""Real MPI worlds for tests: ranks under the `mpiexec` beside this Python, used like those of `worlds.py`.

The ranks of a world are joined by Gloo too, so that one rank can compare the two.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from multiprocessing import current_process
from multiprocessing.connection import Client, Listener
from pathlib import Path

from tests.kfac_core.worlds import START_SECONDS, World, serve

MPIEXEC = Path(sys.executable).with_name("mpiexec")


class MPIWorld(World):
    """`world_size` ranks that are an MPI world; `run` calls a module-level function on each."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        with Listener(str(Path(self._folder.name) / "socket")) as listener:
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            # Tensors are sent as open files, which multiprocessing shares only between processes of one key.
            (Path(self._folder.name) / "key").write_bytes(bytes(current_process().authkey))
            self._mpiexec = subprocess.Popen(
                [MPIEXEC, "-n", str(world_size), sys.executable, "-m", __name__, self._folder.name],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            connections = [listener.accept() for _ in range(world_size)]
        self._pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in connections)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        try:
            self._mpiexec.wait(10)
        finally:
            self._mpiexec.kill()
            self._folder.cleanup()


def _main(folder: str) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    current_process().authkey = (Path(folder) / "key").read_bytes()
    pipe = Client(str(Path(folder) / "socket"))
    pipe.send(world.rank)
    serve(pipe, world.rank, world.size, str(Path(folder) / "store"))
    MPI.Finalize()
    os._exit(0)  # Gloo's threads take their time


if __name__ == "__main__":
    _main(sys.argv[1])
