"""Heartbeat file: a rank's last step and phase, which survive SIGKILL.

Each rank maps one small file into memory and overwrites it at every phase change. This costs one memory
store, and the kernel keeps the page when the process is gone. Launchers and `status` read the file.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qqd24s")  # step, total steps, Unix time, phase


@dataclass(frozen=True)
class Heartbeat:
    """Content of a heartbeat file.

    Attributes:
        step: step in progress, counted from 0; -1 before training.
        total_steps: steps of the run if it does not reach its target.
        time: Unix time of the last phase change, seconds.
        phase: phase in progress; `start`, `evaluation`, `done` outside of steps.
    """

    step: int
    total_steps: int
    time: float
    phase: str


class HeartbeatWriter:
    """Writes the heartbeat file of one rank."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.step = -1
        self.total_steps = 0
        self.write("start")

    def write(self, phase: str) -> None:
        """Record that `phase` has begun."""
        _LAYOUT.pack_into(self._map, 0, self.step, self.total_steps, time.time(), phase.encode()[:24])


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The last heartbeat, or None if the rank did not write one."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < _LAYOUT.size or not raw.strip(b"\0"):
        return None
    step, total_steps, when, phase = _LAYOUT.unpack(raw[: _LAYOUT.size])
    return Heartbeat(step, total_steps, when, phase.rstrip(b"\0").decode(errors="replace"))
