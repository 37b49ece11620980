"""Reads a rank's record file strictly, line by line; `analysis` reads windows in bulk, by the same rules."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from harness.errors import StoredFileError
from harness.runs.records import (
    ADDED_IN,
    KINDS,
    SEALED_SINCE,
    Record,
    SealRecord,
    SegmentRecord,
    check_schema,
)
from harness.runs.seals import split_seal
from harness.runs.stored_files import parse_as, read_bytes

LARGEST_FILE = 8 << 30  # bytes of one rank's records

_HEAD = re.compile(rb'\s*\{\s*"schema":\s*([0-9]{1,9}),\s*"kind":\s*"(\w{1,40})"\s*(?:,|(?=\}))')
_RANK = re.compile(r"rank-([0-9]{5,9})\.jsonl")
_SEGMENT = f'"kind": "{SegmentRecord.KIND}"'.encode()


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

    @property
    def place(self) -> str:
        """For an error message."""
        return f"line {self.number}"


def read_content(path: Path) -> tuple[bytes, bool]:
    """The records in a rank's file without its seal, and whether there is one, which they match.

    Raises:
        FileNotFoundError: there is no file.
        StoredFileError: the records do not match their seal.
    """
    content, line = split_seal(read_bytes(path, LARGEST_FILE))
    if line is None:
        return content, False
    seal = parse(read_head(line, path, content.count(b"\n") + 1), path)
    assert isinstance(seal, SealRecord)  # noqa: S101  `split_seal` looked at its kind
    if len(content) != seal.bytes:
        raise StoredFileError(path, f"has {len(content)} bytes of records, its seal says {seal.bytes}")
    if zlib.crc32(content) != seal.crc32:
        raise StoredFileError(path, f"crc32={seal.crc32} of its seal does not match: records were changed")
    return content, True


def whole_lines(content: bytes) -> list[bytes]:
    """The lines of a file without those that a killed rank left unfinished, and without empty ones.

    Only the last line of a segment can be unfinished: that of the file, or one before a segment's first.
    """
    *lines, tail = content.split(b"\n")
    if tail.strip(b"\0 ") and _is_json(tail):  # else the rank was killed while it wrote this line
        lines.append(tail)
    if content.count(_SEGMENT) > 1:
        after = [*lines[1:], b""]
        lines = [
            line for line, next_ in zip(lines, after, strict=True) if _SEGMENT not in next_ or _is_json(line)
        ]
    return [line for line in lines if line.strip(b"\0 ")]


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
        if line.schema >= SEALED_SINCE:
            raise StoredFileError(
                path, f"kind={line.kind!r} is not one of {', '.join(sorted(KINDS))}", line.place
            )
        return None
    record = parse_as(kind, b"{" + line.text[line.start :], path, line.place)
    if line.schema >= SEALED_SINCE:
        for one in fields(kind):  # the defaults are for older versions' lines
            known = line.schema >= ADDED_IN.get(one.name, SEALED_SINCE)
            if known and f'"{one.name}":'.encode() not in line.text:
                raise StoredFileError(path, f"{one.name} is missing", line.place)
    check_rank(record.rank, path, line.place)
    return record


def check_rank(rank: int, path: Path, place: str) -> None:
    """Refuse a record of another rank than the file's.

    Raises:
        StoredFileError: it is.
    """
    if rank != rank_of(path):
        raise StoredFileError(path, f"rank={rank}, must be {rank_of(path)} in this file", place)


def rank_of(path: Path) -> int:
    """The rank whose records a file holds, by its name.

    Raises:
        StoredFileError: it is not named like a rank's file.
    """
    named = _RANK.fullmatch(path.name)
    if named is None:
        raise StoredFileError(path, "must be named like rank-00000.jsonl")
    return int(named[1])


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
