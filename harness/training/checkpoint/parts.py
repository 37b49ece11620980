"""Parts of a checkpoint: written to disk with a checksum, and read back only if the checksum matches."""

from __future__ import annotations

import os
import pickle
import zlib
from pathlib import Path
from typing import IO, Any, cast

import torch

from harness.runs.checkpoint_store import PartSum

SHARED = "shared.pt"
"""File of what is the same on every rank; written by rank 0."""


def own_part(rank: int) -> str:
    """File of what only this rank has."""
    return f"rank-{rank:05}.pt"


class DamagedError(Exception):
    """A part cannot be read, or does not match its manifest."""


class _SummingWriter:
    """A file that computes size and checksum of what is written to it.

    It stores an error instead of raising it: after an exception torch's zip writer continues to write in its
    destructor, and aborts the process.
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
        """Nothing is buffered here."""

    def sum(self) -> PartSum:
        return PartSum(self.size_bytes, self.crc32)


def write_part(path: Path, content: Any) -> PartSum:
    """Write tensors, numbers, strings and containers of them, and sync them to disk.

    Raises:
        OSError: the disk is full or missing.
    """
    with path.open("wb") as file:
        writer = _SummingWriter(file)
        torch.save(content, cast("IO[bytes]", writer))
        if writer.error is not None:
            raise writer.error
        file.flush()
        os.fsync(file.fileno())
    return writer.sum()


def sum_of(content: Any) -> PartSum:
    """The sum that `write_part` would return, without writing."""
    writer = _SummingWriter(None)
    torch.save(content, cast("IO[bytes]", writer))
    return writer.sum()


def read_part(path: Path, expected: PartSum) -> Any:
    """Read what `write_part` wrote, onto the CPU, without running code that the file contains.

    Raises:
        DamagedError: the file is missing, was changed, or contains more than plain data.
    """
    try:
        with path.open("rb") as file:
            size_bytes = crc32 = 0
            while chunk := file.read(1 << 20):
                size_bytes += len(chunk)
                crc32 = zlib.crc32(chunk, crc32)
            if (got := PartSum(size_bytes, crc32)) != expected:
                raise DamagedError(
                    f"{path.name} must have {expected.size_bytes} bytes with checksum "
                    f"{expected.crc32:08x}, got {got.size_bytes} with {got.crc32:08x}"
                )
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DamagedError(f"{path.name}: {error}") from error
