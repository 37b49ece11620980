"""Identity of a process, by which another process can check whether it is still alive."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import asdict, dataclass
from typing import Any, Self

import psutil

from harness.runs.stored_files import STRICT, Positive, Seconds

_CLOCK_TOLERANCE_SECONDS = 2.0  # creation times are relative to a boot time that clock corrections move


@dataclass(frozen=True)
class ProcessIdentity:
    """A process on a host; its creation time tells it from a later one with the same number.

    Attributes:
        created: Unix time at which the process was created, seconds.
    """

    __pydantic_config__ = STRICT
    host: str
    pid: Positive
    created: Seconds

    @classmethod
    def mine(cls) -> Self:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)

    def alive(self) -> bool:
        """Whether the process is alive; a process on another host cannot be checked and counts as alive."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < _CLOCK_TOLERANCE_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def terminate(self) -> bool:
        """Send SIGTERM; returns whether the process was alive on this host."""
        if self.host != socket.gethostname() or not self.alive():
            return False
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True
