"""Which process answers for something, said so that another process can check whether it still does."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import psutil

_CLOCK_SLACK_SECONDS = 2.0  # creation times are read against a boot time that the clock's corrections move


@dataclass(frozen=True)
class ProcessIdentity:
    """A process on a host; its creation time tells it from a later one with the same number.

    Attributes:
        created: Unix time at which the process was made, seconds.
    """

    host: str
    pid: int
    created: float

    @classmethod
    def mine(cls) -> Self:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Out of what `to_dict` gave."""
        return cls(str(raw["host"]), int(raw["pid"]), float(raw["created"]))

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)

    def alive(self) -> bool:
        """Whether the process lives; one on another host is taken to live, as it cannot be seen from here."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < _CLOCK_SLACK_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def terminate(self) -> bool:
        """Send SIGTERM; returns whether the process was here to get it."""
        if self.host != socket.gethostname() or not self.alive():
            return False
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True
