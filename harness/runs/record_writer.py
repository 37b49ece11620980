"""Appends records to a rank's file and seals it when the rank ends in order."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.runs.records import Record, SealRecord, to_line


class RecordWriter:
    """Appends records to one rank's file; each line is flushed to the system when `write` returns.

    If a killed predecessor left an incomplete line, the writer ends that line first. `seal` ends the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        before = path.read_bytes()
        self._lines, self._bytes, self._crc32 = before.count(b"\n"), len(before), zlib.crc32(before)
        if before and not before.endswith(b"\n"):
            self._append(b"\n")

    def write(self, record: Record) -> None:
        """Append one line.

        Raises:
            OSError: the disk is full or gone; earlier lines are complete.
        """
        self._append(to_line(record).encode())

    def seal(self, rank: int) -> None:
        """Append the seal: this rank writes nothing more.

        Raises:
            OSError: the disk is full or gone; the file counts as not sealed.
        """
        self.write(SealRecord(rank, self._lines, self._bytes, self._crc32))

    def _append(self, line: bytes) -> None:
        written = 0
        while written < len(line):  # an unbuffered write may take a part
            written += self._file.write(line[written:])
        self._lines += 1
        self._bytes += len(line)
        self._crc32 = zlib.crc32(line, self._crc32)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
