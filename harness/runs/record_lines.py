"""The record file of a rank: appended line by line, read strictly, and ended by its checksum.

`analysis` reads windows in bulk, by the same rules.

A resumed run repeats the steps after its checkpoint, so some of its records do not count. Every start of a
run is a segment (see `SegmentRecord`). A record counts if its last step is at most the limit of its segment:
the earliest step at which a later segment began.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from harness.errors import StoredFileError
from harness.runs.records import (
    KINDS,
    ChecksumRecord,
    DeviceRecord,
    EvalRecord,
    PhaseRecord,
    Record,
    SegmentRecord,
    TraceRecord,
    check_schema,
    to_line,
)
from harness.runs.store import Attempt
from harness.runs.stored_files import open_regular, parse_as, read_bytes

_TAIL_BYTES = 256 * 1024  # enough for a long traceback or some hundred windows
_HEAD = re.compile(rb'\s*\{\s*"schema":\s*([0-9]{1,9}),\s*"kind":\s*"(\w{1,40})"\s*(?:,|(?=\}))')
_RANK = re.compile(r"rank-([0-9]{5,9})\.jsonl")
_SEGMENT = f'"kind": "{SegmentRecord.KIND}"'.encode()
_CHECKSUM = f'"kind": "{ChecksumRecord.KIND}"'.encode()


class RecordWriter:
    """Appends records to one rank's file; each line is flushed to the system when `write` returns.

    If a killed predecessor left an incomplete line, the writer ends that line first.
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

    def write_checksum(self, rank: int) -> None:
        """End the file: this rank writes nothing more.

        Raises:
            OSError: the disk is full or gone; the file counts as cut.
        """
        self.write(ChecksumRecord(rank, self._lines, self._bytes, self._crc32))

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


def read_content(path: Path) -> tuple[bytes, bool]:
    """The records in a rank's file, and whether its checksum is there, which they match.

    Raises:
        FileNotFoundError: there is no file.
        StoredFileError: the records do not match their checksum.
    """
    content = read_bytes(path)
    start = content.rfind(b"\n", 0, len(content) - 1) + 1
    if _CHECKSUM not in content[start : start + 60]:
        return content, False
    record = parse(read_head(content[start:], path, content.count(b"\n", 0, start) + 1), path)
    content = content[:start]
    if not isinstance(record, ChecksumRecord) or zlib.crc32(content) != record.crc32:
        raise StoredFileError(path, "does not match the checksum at its end: records were changed")
    return content, True


class Line(NamedTuple):
    """A line of a record file.

    Attributes:
        text: the whole line.
        start: where its fields begin in `text`, after schema and kind.
    """

    number: int
    schema: int
    kind: str
    text: bytes
    start: int


def whole_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and text of a file's lines without those that a killed rank left unfinished, and empty ones.

    Only the last line of a segment can be unfinished: that of the file, or one before a segment's first.
    """
    *lines, tail = content.split(b"\n")
    if tail.strip(b"\0 ") and _is_json(tail):  # else the rank was killed while it wrote this line
        lines.append(tail)
    resumed = content.count(_SEGMENT) > 1
    for number, (line, after) in enumerate(zip_longest(lines, lines[1:], fillvalue=b""), start=1):
        unfinished = resumed and _SEGMENT in after and not _is_json(line)
        if line.strip(b"\0 ") and not unfinished:
            yield number, line


def read_head(text: bytes, path: Path, number: int) -> Line:
    """Schema and kind of a line, which begin it.

    Raises:
        StoredFileError: it does not begin with them, or a newer version wrote it.
    """
    head = _HEAD.match(text)
    if head is None:
        shown = text[:60].decode(errors="replace")
        raise StoredFileError(path, f"holds {shown!r}, must begin with schema and kind", f"line {number}")
    check_schema(int(head[1]), path, f"line {number}")
    return Line(number, int(head[1]), head[2].decode(), text, head.end())


def parse(line: Line, path: Path) -> Record | None:
    """The record in a line; None for a kind that only older versions wrote.

    Raises:
        StoredFileError: it is not a record of its kind, or another rank's.
    """
    kind = KINDS.get(line.kind)
    if kind is None:
        return None
    place = f"line {line.number}"
    record = parse_as(kind, b"{" + line.text[line.start :], path, place)
    if record.rank != (rank := rank_of(path)):
        raise StoredFileError(path, f"rank={record.rank}, must be {rank} in this file", place)
    return record


def rank_of(path: Path) -> int:
    """The rank whose records a file holds, by its name.

    Raises:
        StoredFileError: it is not named like a rank's file.
    """
    named = _RANK.fullmatch(path.name)
    if named is None:
        raise StoredFileError(path, "must be named like rank-00000.jsonl")
    return int(named[1])


def effective_evaluations(attempt: Attempt) -> list[dict[str, Any]]:
    """The evaluations of the run that count, oldest first."""
    return [record for record in effective_records(attempt, 0) if record["kind"] == EvalRecord.KIND]


def effective_records(attempt: Attempt, rank: int) -> list[dict[str, Any]]:
    """The records of one rank that count, over all attempts of the run, in the order written.

    Raises:
        StoredFileError: one of its files is damaged.
    """
    segment, first_steps = 0, {}
    records: list[tuple[int, dict[str, Any]]] = []
    for record in _records(attempt, rank):
        if isinstance(record, SegmentRecord):
            segment += 1
            first_steps[segment] = record.first_step
        records.append((segment, {"kind": record.KIND, **vars(record)}))
    limits = segment_limits(first_steps)
    return [one for segment, one in records if last_step(one["kind"], one) <= limits.get(segment, math.inf)]


def segment_limits(first_steps: Mapping[int, int]) -> dict[int, int]:
    """Limits by segment; a segment that is missing here has none.

    Args:
        first_steps: the step at which each segment of one run began, by segment.
    """
    return {
        segment: min(step for later, step in first_steps.items() if later > segment)
        for segment in range(max(first_steps, default=0))
    }


def last_step(kind: str, record: Any) -> Any:
    """Steps that the run had taken at the end of what a record is about; 0 for kinds that always count.

    Args:
        kind: the record's kind.
        record: its fields, or a data frame of records of this kind.
    """
    if kind in (PhaseRecord.KIND, DeviceRecord.KIND):
        return record["first_step"] + record["steps"]
    if kind == EvalRecord.KIND:
        return record["step"]
    if kind == TraceRecord.KIND:
        return max((step + 1 for step, *_ in record["spans"]), default=0)
    return 0


def last_lines(path: Path) -> list[str]:
    """Whole lines at the end of a file, oldest first; empty if the file does not exist."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = text.splitlines()
    return lines[1:] if start else lines


def last_record(path: Path, kind: str) -> dict[str, Any] | None:
    """The newest record of `kind` near the end of a record file, or None."""
    marker = f'"kind": "{kind}"'
    for line in reversed(last_lines(path)):
        if marker in line:
            try:
                record = parse(read_head(line.encode(), path, 0), path)
            except StoredFileError:  # truncated: its writer was killed or is still writing
                continue
            if record is not None:
                return vars(record).copy()
    return None


def _records(attempt: Attempt, rank: int) -> Iterator[Record]:
    for one in reversed(attempt.lineage()):
        path = one.records(rank)
        try:
            content, _ = read_content(path)
        except FileNotFoundError:
            continue
        for number, text in whole_lines(content):
            record = parse(read_head(text, path, number), path)
            if record is not None:
                yield record


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
