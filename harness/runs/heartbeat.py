"""Heartbeat file: a rank's last step and phase, which survive SIGKILL.

Each rank maps one small file into memory and overwrites a part of it at every phase change. This costs one
memory store, and the kernel keeps the page when the process is gone. Launchers and `status` read the file.

The file has two slots, written in turn, each with a sequence number and a checksum. A rank that is killed in
the middle of a write leaves one slot damaged, and the other still has the phase change before it.
"""

from __future__ import annotations

import math
import mmap
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from harness.errors import StoredFileError
from harness.runs.stored_files import read_bytes

_CONTENT = struct.Struct("<qqqd24s")  # sequence number, step, total steps, Unix time, phase
_CHECKSUM = struct.Struct("<I4x")  # CRC-32 of the content, padded to eight bytes
_SLOT_BYTES = _CONTENT.size + _CHECKSUM.size


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
        path.write_bytes(bytes(2 * _SLOT_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 2 * _SLOT_BYTES)
        self._sequence = 0
        self.step = -1
        self.total_steps = 0
        self.write("start")

    def write(self, phase: str) -> None:
        """Record that `phase` has begun."""
        self._sequence += 1
        content = _CONTENT.pack(self._sequence, self.step, self.total_steps, time.time(), phase.encode()[:24])
        start = self._sequence % 2 * _SLOT_BYTES
        self._map[start : start + _SLOT_BYTES] = content + _CHECKSUM.pack(zlib.crc32(content))


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The newest undamaged heartbeat, or None if the rank did not write one."""
    try:
        raw = read_bytes(path)
    except (FileNotFoundError, StoredFileError):  # it is for people; outcomes and records decide
        return None
    slots = (raw[start : start + _SLOT_BYTES] for start in (0, _SLOT_BYTES))
    undamaged = [_CONTENT.unpack_from(slot) for slot in slots if _is_whole(slot)]
    if not undamaged:
        return None
    _, step, total_steps, when, phase = max(undamaged)
    if step < -1 or total_steps < 0 or not 0 <= when < math.inf:
        return None
    return Heartbeat(step, total_steps, when, phase.rstrip(b"\0").decode(errors="replace"))


def _is_whole(slot: bytes) -> bool:
    """Whether the slot was written to its end; zeros, as in a new file, were not."""
    if len(slot) < _SLOT_BYTES or not slot.strip(b"\0"):
        return False
    (checksum,) = _CHECKSUM.unpack_from(slot, _CONTENT.size)
    return bool(checksum == zlib.crc32(slot[: _CONTENT.size]))
