"""Parses the lines of window records into plain columns, batch by batch, with pyarrow's JSON reader.

The next batch is read while one is parsed. A parsed batch keeps no text, so at most two are in memory as
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import json as arrow_json

from harness.errors import StoredFileError
from harness.runs.record_lines import parse, rank_of, read_head
from kfac_core.phases import Phase

OTHER = "other"
"""The part of a window's wall time that belongs to no phase."""

PHASE_ORDER = (*(phase.value for phase in Phase), OTHER)
WINDOW_COLUMNS = (
    "rank", "first_step", "steps", "samples", "wall_seconds", "segment", "instrument_seconds", "cpu_mhz",
)  # fmt: skip
LOADS = ("capacity", "foreign", "steal", "host_capacity", "host_foreign")
"""Keys of a window's `load_seconds`."""


MAPPINGS = ("seconds", "calls", "sent_bytes", "wait_seconds", "memory_bytes", "load_seconds")
"""A window's mappings; a frame has a column `<mapping>.<key>` for each of their keys."""

_BATCH_BYTES = 48 << 20  # enough blocks for both threads of a small machine
_BLOCK_BYTES = 1 << 20  # arrow's default; with larger blocks a thread was idle

_TYPES = {
    "seconds": pa.float64(),
    "calls": pa.int64(),
    "sent_bytes": pa.int64(),
    "wait_seconds": pa.float64(),
}
_INTEGERS = ("schema", "rank", "first_step", "steps", "samples", "segment")
_KNOWN = pa.schema(
    [("kind", pa.string()), *((name, pa.int64()) for name in _INTEGERS)]
    + [(name, pa.float64()) for name in ("wall_seconds", "instrument_seconds", "cpu_mhz")]
    + [("load_seconds", pa.struct([(kind, pa.float64()) for kind in LOADS]))]
    + [(name, pa.struct([(phase, kind) for phase in PHASE_ORDER])) for name, kind in _TYPES.items()]
)
"""Known columns, which saves arrow type inference; it infers the types of all others."""

_COUNTS = ("calls.", "sent_bytes.", "memory_bytes.")
_CHUNK = 8 << 10  # bytes; a window has about 1,000

Columns = dict[str, np.ndarray]
"""Columns of windows by name; those of a mapping by `<mapping>.<key>`, NaN where a record lacks the key."""


class _Piece(NamedTuple):
    """Windows of one file: complete lines, and their numbers in it."""

    text: bytes
    numbers: Sequence[int]
    run: str
    file: Path


class WindowLines:
    """Collects window lines and parses them batch by batch in a second thread; arrow releases the GIL."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._size = 0
        self._parser = ThreadPoolExecutor(max_workers=1)
        self._parsed: list[Future[_Parsed]] = []
        self.runs: list[tuple[str, int]] = []

    def add(self, text: bytes, numbers: Sequence[int], run: str, file: Path) -> None:
        """Add one piece of text: complete lines of one file, with their numbers."""
        if not numbers:
            return
        self._pieces.append(_Piece(text.rstrip(b"\n"), numbers, run, file))
        self._size += len(text)
        if self._size > _BATCH_BYTES:
            self._parse()

    def columns(self) -> tuple[Columns, list[tuple[str, str]]]:
        """The columns of all windows, in the order of `add`; and run and error of each refused piece.

        `runs` then holds the run and the number of lines of each piece, in order, without those refused.
        """
        with self._parser:
            self._parse()
            batches = [one.result() for one in self._parsed]
        self.runs = [piece for batch in batches for piece in batch.runs]
        names = dict.fromkeys(name for batch in batches for name in batch.columns)
        lengths = [len(batch.columns["rank"]) for batch in batches]
        columns = {
            name: np.concatenate(
                [
                    batch.columns.pop(name, np.full(n, np.nan))
                    for batch, n in zip(batches, lengths, strict=True)
                ]
            )
            for name in names
        }
        return columns, [refused for batch in batches for refused in batch.refused]

    def _parse(self) -> None:
        if self._parsed:
            self._parsed[-1].result()  # no more text in memory than this batch and the next
        self._parsed.append(self._parser.submit(_parse, self._pieces))
        self._pieces, self._size = [], 0


class _Parsed(NamedTuple):
    """A batch.

    Attributes:
        runs: run and number of lines of each piece that was read.
        refused: run and error of the others.
    """

    columns: Columns
    runs: list[tuple[str, int]]
    refused: list[tuple[str, str]]


def _parse(pieces: Sequence[_Piece]) -> _Parsed:
    """Parse a batch; after an error piece by piece, and the piece with the error line by line."""
    refused: list[tuple[str, str]] = []
    try:
        columns = _columns(pieces)
    except (pa.ArrowInvalid, _RefusedError):
        kept = []
        for piece in pieces:
            try:
                _columns([piece])
                kept.append(piece)
            except (pa.ArrowInvalid, _RefusedError) as error:
                refused.append((piece.run, _reason(piece, error)))
        pieces = kept
        columns = _columns(pieces)
    runs = [(piece.run, len(piece.numbers)) for piece in pieces]
    return _Parsed(columns, runs, refused)


class _RefusedError(Exception):
    """Windows that arrow can parse, but that no rank writes."""


def _reason(piece: _Piece, error: Exception) -> str:
    """Why a piece was refused, with the number of its first bad line."""
    try:
        for number, text in zip(piece.numbers, piece.text.split(b"\n"), strict=True):
            parse(read_head(text, piece.file, number), piece.file)
    except (StoredFileError, ValueError) as exact:
        return str(exact)
    return f"{piece.file}: {error}"


def _columns(pieces: Sequence[_Piece]) -> Columns:
    if not pieces:
        return {name: np.empty(0) for name in WINDOW_COLUMNS}
    if any(b"[" in piece.text or _has_long_line(piece.text) for piece in pieces):
        raise _RefusedError("a line is too long or holds a list")  # arrow crashes on deep nesting
    table = arrow_json.read_json(
        pa.BufferReader(b"\n".join(piece.text for piece in pieces)),
        arrow_json.ReadOptions(block_size=_BLOCK_BYTES),
        arrow_json.ParseOptions(explicit_schema=_KNOWN),
    )
    _check(table, pieces)
    return dict(_flat(table))


def _has_long_line(text: bytes) -> bool:
    """Whether any line has more than two chunks of bytes; one of more than one chunk may pass."""
    return any(text.find(b"\n", start, start + _CHUNK) < 0 for start in range(0, len(text) - _CHUNK, _CHUNK))


def _check(table: Any, pieces: Sequence[_Piece]) -> None:
    """Refuse what `PhaseRecord` does not allow, column by column."""
    lines = [len(piece.numbers) for piece in pieces]
    if table.num_rows != sum(lines):
        raise _RefusedError("a line holds more or less than one record")
    if unknown := set(table.column_names) - {*_KNOWN.names, "memory_bytes"}:
        raise _RefusedError(f"{min(unknown)} is not a known key")
    optional = ["wait_seconds", "instrument_seconds", "load_seconds", "cpu_mhz"]
    if compute.max(table["schema"]).as_py() == 1:
        optional.append("segment")
    for name in ("memory_bytes", *_KNOWN.names):
        if name not in optional and (name not in table.column_names or table[name].null_count):
            raise _RefusedError(f"{name} is missing")
    ranks = np.repeat([rank_of(piece.file) for piece in pieces], lines)
    if not np.array_equal(table["rank"].to_numpy(), ranks):
        raise _RefusedError("a window is another rank's")
    if compute.min(table["steps"]).as_py() < 1:
        raise _RefusedError("steps must be >= 1")


def _flat(table: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Columns that hold a number in some record; empty ones are left out.

    Raises:
        _RefusedError: a value is of another type, not finite, or negative.
    """
    for name in table.column_names:
        column = table[name]
        if pa.types.is_struct(column.type):
            whole = column.combine_chunks()
            for place in range(column.type.num_fields):
                values = compute.struct_field(whole, place)
                if values.null_count < len(values):
                    yield (key := f"{name}.{column.type.field(place).name}"), _numbers(key, values)
        elif name in WINDOW_COLUMNS:
            yield name, _numbers(name, column)


def keys_of(columns: Iterable[Any], mapping: str) -> list[str]:
    """The keys of a mapping among the columns; phases in the order of a step, unknown ones before `other`."""
    start = f"{mapping}."
    keys = [name.removeprefix(start) for name in columns if name.startswith(start)]
    order = {phase: place for place, phase in enumerate(PHASE_ORDER[:-1])}
    return sorted(keys, key=lambda key: (key == OTHER, order.get(key, len(order))))


def _numbers(name: str, array: Any) -> np.ndarray:
    kind = array.type
    whole = pa.types.is_integer(kind) or pa.types.is_null(kind)
    if not whole and (name.startswith(_COUNTS) or not pa.types.is_floating(kind)):
        raise _RefusedError(f"{name} holds {kind}, must be numbers")
    values = np.asarray(array.to_pandas(), dtype=float)
    if not whole and np.count_nonzero(np.isfinite(values)) < len(values) - array.null_count:
        raise _RefusedError(f"{name} must be finite")
    if len(values) and np.fmin.reduce(values) < 0 and name != f"seconds.{OTHER}":
        raise _RefusedError(f"{name} must be >= 0")
    return values
