"""Parses the lines of window records into plain columns, batch by batch, with pyarrow's JSON reader.

The next batch is read while one is parsed. A parsed batch keeps no text, so at most two are in memory as
text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import json as arrow_json

from harness.errors import StoreError
from kfac_core.timing.phases import Phase

OTHER = "other"
"""The part of a window's wall time that belongs to no phase."""

PHASE_ORDER = (*(phase.value for phase in Phase), OTHER)
WINDOW_COLUMNS = ("rank", "first_step", "steps", "samples", "wall_seconds", "segment", "instrument_seconds")

_BATCH_BYTES = 48 << 20  # enough blocks for both threads of a small machine
_BLOCK_BYTES = 1 << 20  # arrow's default; with larger blocks a thread was idle

_MAPPINGS = {
    "seconds": pa.float64(),
    "calls": pa.int64(),
    "sent_bytes": pa.int64(),
    "wait_seconds": pa.float64(),
}
_INTEGERS = ("schema", "rank", "first_step", "steps", "samples", "segment")
_KNOWN = pa.schema(
    [("kind", pa.string()), *((name, pa.int64()) for name in _INTEGERS)]
    + [(name, pa.float64()) for name in ("wall_seconds", "instrument_seconds")]
    + [(name, pa.struct([(phase, kind) for phase in PHASE_ORDER])) for name, kind in _MAPPINGS.items()]
)
"""Known columns, which saves arrow type inference; it infers the types of all others."""

Columns = dict[str, np.ndarray]
"""Columns of windows by name; those of a mapping by `<mapping>.<key>`, NaN where a record lacks the key."""


@dataclass
class _Batch:
    """Window lines of several files: one piece of text per file."""

    pieces: list[bytes] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    size: int = 0


class WindowLines:
    """Collects window lines and parses them batch by batch in a second thread; arrow releases the GIL.

    Attributes:
        runs: the run and number of lines of each added piece, in order.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []
        self._batch = _Batch()
        self._parser = ThreadPoolExecutor(max_workers=1)
        self._parsed: list[Future[Columns]] = []

    def add(self, text: bytes, lines: int, run: str, file: Path) -> None:
        """Add one piece of text: complete lines of one file."""
        if not lines:
            return
        self.runs.append((run, lines))
        batch = self._batch
        batch.pieces.append(text.rstrip(b"\n"))
        batch.files.append(file)
        batch.size += len(text)
        if batch.size > _BATCH_BYTES:
            self._parse()

    def columns(self) -> Columns:
        """The columns of all windows, in the order of `add`."""
        with self._parser:
            self._parse()
            batches = [one.result() for one in self._parsed]
        names = dict.fromkeys(name for batch in batches for name in batch)
        lengths = [len(batch["rank"]) for batch in batches]
        return {
            name: np.concatenate(
                [batch.pop(name, np.full(n, np.nan)) for batch, n in zip(batches, lengths, strict=True)]
            )
            for name in names
        }

    def _parse(self) -> None:
        if self._parsed:
            self._parsed[-1].result()  # no more text in memory than this batch and the next
        self._parsed.append(self._parser.submit(_columns, self._batch))
        self._batch = _Batch()


def _columns(batch: _Batch) -> Columns:
    """Parse a batch into plain columns."""
    if not batch.pieces:
        return {name: np.empty(0) for name in WINDOW_COLUMNS}
    try:
        table = arrow_json.read_json(
            pa.BufferReader(b"\n".join(batch.pieces)),
            arrow_json.ReadOptions(block_size=_BLOCK_BYTES),
            arrow_json.ParseOptions(explicit_schema=_KNOWN),
        )
    except pa.ArrowInvalid:
        # A damaged line, or NaN, which arrow rejects: Python is slower, but names the line.
        pieces = zip(batch.pieces, batch.files, strict=True)
        table = pa.Table.from_pylist(
            [read_line(line, file) for text, file in pieces for line in text.split(b"\n")]
        )
    return dict(_flat(table))


def _flat(table: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Columns that hold a number in some record; empty ones are left out."""
    for name in table.column_names:
        column = table[name]
        if pa.types.is_struct(column.type):
            whole = column.combine_chunks()
            for place in range(column.type.num_fields):
                values = compute.struct_field(whole, place)
                if values.null_count < len(values):
                    yield f"{name}.{column.type.field(place).name}", _numbers(values)
        elif name in WINDOW_COLUMNS:
            yield name, _numbers(column)


def mapping(columns: Columns, name: str) -> Columns:
    """Remove a mapping's columns from `columns` and return them by key."""
    start = f"{name}."
    return {key.removeprefix(start): columns.pop(key) for key in list(columns) if key.startswith(start)}


def total_of(columns: Mapping[str, np.ndarray], windows: int) -> np.ndarray:
    """Sum over columns, with NaN as 0."""
    total = np.zeros(windows)
    for values in columns.values():
        total += np.nan_to_num(values)
    return total


def read_line(line: bytes, path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise StoreError(f"{path} holds a damaged record ({error}): {line[:60]!r}") from None
    return record


def _numbers(array: Any) -> np.ndarray:
    return np.asarray(array.to_pandas(), dtype=float)
