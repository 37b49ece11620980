"""Makes the ranks of a gang one MPI world: the process manager's side of PMI-1, over a socket a rank.

Under `mpiexec` the ranks would be another process's children, and how each of them ended would be lost. The
protocol is lines of `key=value` words by which ranks exchange their addresses once, when MPI starts; MPICH
and its relatives speak it (Balaji et al. 2010, "PMI: A Scalable Parallel Process-Management Interface").
Open MPI does not: its ranks find themselves alone, and are refused.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

_LINE_BYTES = 4096  # the longest line: a value of _LONGEST, its key and the command
_LONGEST = 1024


@dataclass
class _Rank:
    ours: socket.socket
    theirs: socket.socket
    buffer: bytes = b""
    waits: bool = False


@dataclass
class ProcessManager:
    """Serves the ranks from a thread until it is closed; on one host.

    Args:
        world_size: the ranks that will ask, each through the socket that `of_rank` names.
    """

    world_size: int
    _ranks: list[_Rank] = field(default_factory=list)
    _values: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._ranks = [_Rank(*socket.socketpair()) for _ in range(self.world_size)]
        # MPICH names its shared memory after this: with a name used before, ranks would meet another world's.
        self._space = f"kronscale-{secrets.token_hex(8)}"
        self._values = {"PMI_process_mapping": f"(vector,(0,1,{self.world_size}))"}  # all on one node
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for rank in self._ranks:
            self._selector.register(rank.ours, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._wake.close()
        self._thread.join()
        self._selector.close()
        for rank in self._ranks:
            rank.ours.close()
            rank.theirs.close()
        self._woken.close()

    def of_rank(self, rank: int) -> tuple[dict[str, str], tuple[int, ...]]:
        """What the rank needs: environment variables, and the open file that it has to inherit."""
        descriptor = self._ranks[rank].theirs.fileno()
        variables = {"PMI_FD": descriptor, "PMI_RANK": rank, "PMI_SIZE": self.world_size}
        return {name: str(value) for name, value in variables.items()}, (descriptor,)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                self._hear(key.data)

    def _hear(self, rank: _Rank) -> None:
        try:
            heard = rank.ours.recv(_LINE_BYTES)
        except ConnectionError:
            heard = b""
        if not heard or len(rank.buffer) > _LINE_BYTES:  # it is gone, or speaks something else
            self._selector.unregister(rank.ours)
            return
        *lines, rank.buffer = (rank.buffer + heard).split(b"\n")
        for line in lines:
            words = dict(word.partition("=")[::2] for word in line.decode(errors="replace").split())
            self._answer(rank, words)

    def _answer(self, rank: _Rank, words: dict[str, str]) -> None:
        match words:
            case {"cmd": "init"}:
                _say(rank, "response_to_init", rc=0, pmi_version=1, pmi_subversion=1)
            case {"cmd": "get_maxes"}:
                _say(rank, "maxes", rc=0, kvsname_max=64, keylen_max=64, vallen_max=_LONGEST)
            case {"cmd": "get_appnum"}:
                _say(rank, "appnum", rc=0, appnum=0)
            case {"cmd": "get_universe_size"}:
                _say(rank, "universe_size", rc=0, size=self.world_size)
            case {"cmd": "get_my_kvsname"}:
                _say(rank, "my_kvsname", rc=0, kvsname=self._space)
            case {"cmd": "put", "key": key, "value": value}:
                self._values[key] = value
                _say(rank, "put_result", rc=0)
            case {"cmd": "get", "key": key} if key in self._values:
                _say(rank, "get_result", rc=0, value=self._values[key])
            case {"cmd": "get"}:
                _say(rank, "get_result", rc=-1, msg="key_not_found")
            case {"cmd": "barrier_in"}:
                rank.waits = True
                self._open_barrier()
            case {"cmd": "finalize"}:
                _say(rank, "finalize_ack", rc=0)
            case _:  # spawning and publishing; a rank that aborts ends by itself, and the gang sees it
                _say(rank, "unknown_command", rc=-1)

    def _open_barrier(self) -> None:
        if all(rank.waits for rank in self._ranks):
            for rank in self._ranks:
                rank.waits = False
                _say(rank, "barrier_out", rc=0)


def _say(rank: _Rank, command: str, **words: object) -> None:
    line = " ".join([f"cmd={command}", *(f"{key}={value}" for key, value in words.items())])
    try:
        rank.ours.sendall(f"{line}\n".encode())
    except OSError:  # it died between its question and the answer: the gang hears of that by itself
        return
