"""Parts of a checkpoint: streamed to disk under a checksum, and read back only if it still holds."""

from __future__ import annotations

import os
import pickle
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

SHARED = "shared.pt"
"""Written by rank 0: what is the same on every rank."""


def own_part(rank: int) -> str:
    """Name of what only this rank has."""
    return f"rank-{rank:05}.pt"


class DamagedError(Exception):
    """A part is not what its manifest says, or cannot be read."""


@dataclass(frozen=True)
class Sum:
    """Size and checksum of a file's content."""

    size_bytes: int
    crc32: int


class _Summed:
    """Passes what it is given on, and sums it up.

    An error is kept for later instead of raised: torch's zip writer, left by an exception, writes on in its
    destructor and aborts the process.
    """

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file
        self.size_bytes = self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size_bytes += len(view)
        if self._file is not None and self.error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self.error = error
        return len(view)

    def flush(self) -> None:
        """Nothing is held back here."""

    def sum(self) -> Sum:
        return Sum(self.size_bytes, self.crc32)


def write_part(path: Path, content: Any) -> Sum:
    """Write tensors, numbers, strings and containers of them; they are on the disk when this returns.

    Raises:
        OSError: the disk is full or gone.
    """
    with path.open("wb") as file:
        summed = _Summed(file)
        torch.save(content, cast("IO[bytes]", summed))
        if summed.error is not None:
            raise summed.error
        file.flush()
        os.fsync(file.fileno())
    return summed.sum()


def sum_of(content: Any) -> Sum:
    """What `write_part` would return, without writing."""
    summed = _Summed(None)
    torch.save(content, cast("IO[bytes]", summed))
    return summed.sum()


def read_part(path: Path, expected: Sum) -> Any:
    """Read what `write_part` wrote, onto the CPU; runs no code that the file holds.

    Raises:
        DamagedError: it is missing, was changed, or holds what is no plain data.
    """
    try:
        with path.open("rb") as file:
            size_bytes = crc32 = 0
            while chunk := file.read(1 << 20):
                size_bytes += len(chunk)
                crc32 = zlib.crc32(chunk, crc32)
            if (got := Sum(size_bytes, crc32)) != expected:
                raise DamagedError(
                    f"{path.name} has {got.size_bytes} bytes with checksum {got.crc32:08x}, written were "
                    f"{expected.size_bytes} with {expected.crc32:08x}"
                )
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DamagedError(f"{path.name}: {error}") from error
